import math

import pytest
import torch
from torch.nn import functional as F

from wsi_mil.contracts import check_model
from wsi_mil.errors import ConfigError
from wsi_mil.lookup import find_model, find_regulariser
from wsi_mil.models._base import Progress
from wsi_mil.models._clam import smooth_top1_svm

CASES = [
    (method, classes, subtyping) for method, classes in (("clam_sb", 2), ("clam_mb", 3)) for subtyping in (False, True)
]


@pytest.mark.parametrize(("method", "classes", "subtyping"), CASES)
def test_outputs_and_instance_losses(method, classes, subtyping, vectors, batch_of, criterion, close, terms_of):
    v = vectors(method)
    c = v.under(f"c{classes}{'s' if subtyping else 'n'}_")
    model = find_model(method).from_official(v.under(f"w_c{classes}/"))
    batch = batch_of(v["h"])
    output = model(batch)
    close(output.attention_logits.T, c["A_raw"])
    close(output.bag_embedding[0], c["features"])
    close(output.logits, c["logits"])
    close(output.logits.softmax(dim=1), c["prob"])
    objective = model.objective(criterion(classes), instance_loss="cross_entropy", k_sample=3, subtyping=subtyping)
    for y in range(classes):
        target = torch.tensor([y])
        close(objective.instance_term(output, target), c[f"instloss_y{y}"])
        close(sum(terms_of(objective, model, batch, target).values()), c[f"total_y{y}"])


@pytest.mark.parametrize(("method", "classes"), [("clam_sb", 2), ("clam_mb", 3)])
def test_weights_without_instance_classifiers_are_refused_with_the_way_on(method, classes, vectors):
    published = {key: value for key, value in vectors(method).under(f"w_c{classes}/").items() if "instance" not in key}
    with pytest.raises(ConfigError, match=r"no instance_classifiers.*add zeros for each class"):
        find_model(method).from_official(published)


@pytest.mark.parametrize(("method", "classes", "subtyping"), CASES)
def test_the_chosen_tiles_are_the_published_ones(method, classes, subtyping, vectors, batch_of, criterion):
    v = vectors(method)
    c = v.under(f"c{classes}{'s' if subtyping else 'n'}_")
    model = find_model(method).from_official(v.under(f"w_c{classes}/"))
    objective = model.objective(criterion(classes), instance_loss="cross_entropy", k_sample=3, subtyping=subtyping)
    seen = []
    objective._classify = lambda logits, wanted: seen.append((logits.argmax(dim=1), wanted)) or logits.sum()
    for y in range(classes):
        seen.clear()
        objective.instance_term(model(batch_of(v["h"])), torch.tensor([y]))
        assert torch.cat([wanted for _, wanted in seen]).tolist() == c[f"instlabels_y{y}"].tolist()
        assert torch.cat([said for said, _ in seen]).tolist() == c[f"instpreds_y{y}"].tolist()


def model_and_batch(method, batch_of, lengths=(19, 7, 1), **params):
    torch.manual_seed(0)
    model = find_model(method)(in_dim=6, n_outputs=3, hidden=16, attention_dim=8, **params)
    return model, batch_of(*(torch.randn(n, 6) for n in lengths))


@pytest.mark.parametrize("loss", ["svm", "cross_entropy"])
@pytest.mark.parametrize("method", ["clam_sb", "clam_mb"])
def test_instances_send_no_gradient_to_attention_but_to_features(method, loss, batch_of, criterion):
    model, batch = model_and_batch(method, batch_of)
    objective = model.objective(criterion(3), instance_loss=loss, subtyping=True)
    objective.instance_term(model(batch), torch.tensor([0, 2, 1])).backward()
    assert all(p.grad is None or not p.grad.any() for p in [*model.attention.parameters(), *model.head.parameters()])
    assert model.features.linear.weight.grad.any()
    assert model.instance_classifiers.weight.grad.any()


@pytest.mark.parametrize("method", ["clam_sb", "clam_mb"])
def test_without_subtyping_only_the_classifier_of_the_bags_class_learns(method, batch_of, criterion):
    model, batch = model_and_batch(method, batch_of, lengths=(9,))
    model.objective(criterion(3)).instance_term(model(batch), torch.tensor([1])).backward()
    touched = model.instance_classifiers.weight.grad.reshape(3, 2, 16).abs().sum(dim=(1, 2)) > 0
    assert touched.tolist() == [False, True, False]


@pytest.mark.parametrize("n", [1, 2, 5, 8, 9, 15, 16, 17])
@pytest.mark.parametrize("overlap", ["both", "none"])
def test_small_bags_take_as_many_tiles_as_there_are(n, overlap, batch_of, criterion):
    model, batch = model_and_batch("clam_mb", batch_of, lengths=(n,))
    objective = model.objective(criterion(3), overlap=overlap)
    counts = []
    objective._classify = lambda logits, wanted: counts.append(wanted.tolist()) or logits.sum()
    objective.instance_term(model(batch), torch.tensor([2]))
    k = min(8, n if overlap == "both" else n // 2)
    assert counts == ([[1] * k + [0] * k] if k else [])


def test_bags_of_one_step_are_averaged(batch_of, criterion):
    model, batch = model_and_batch("clam_sb", batch_of)
    objective, target = model.objective(criterion(3), subtyping=True), torch.tensor([0, 2, 1])
    alone = [
        objective.instance_term(model(batch_of(bag.features)), target[i : i + 1]) for i, bag in enumerate(batch.bags())
    ]
    torch.testing.assert_close(objective.instance_term(model(batch), target), torch.stack(alone).mean())


def test_smooth_svm():
    logits, target = torch.tensor([[2.0, 1.0], [0.5, 3.0], [-1.0, 0.0]]), torch.tensor([0, 0, 1])
    margin = [1 + 1 - 2, 1 + 3 - 0.5, 1 - 1 - 0]
    wanted = sum(math.log(1 + math.exp(m)) for m in margin) / 3
    assert smooth_top1_svm(logits, target).item() == pytest.approx(wanted, abs=1e-6)


def test_svm_is_hard_where_a_score_leads_by_far():
    gap = math.log(1000)
    ahead = torch.tensor([[gap + 0.01, 0.0]])
    assert smooth_top1_svm(ahead, torch.tensor([0])).item() == 0
    assert smooth_top1_svm(ahead, torch.tensor([1])).item() == pytest.approx(gap + 1.01, abs=1e-5)
    close_by = torch.tensor([[gap - 0.01, 0.0]])
    assert smooth_top1_svm(close_by, torch.tensor([0])).item() == pytest.approx(
        math.log1p(math.exp(1.01 - gap)), abs=1e-6
    )


def test_svm_is_the_default_instance_loss(batch_of, criterion):
    model, batch = model_and_batch("clam_sb", batch_of, lengths=(4,))
    output = model(batch)
    logits = output.auxiliary["instance_classes"][:, 1]
    order = output.attention_logits[:, 0].argsort()
    rows, wanted = torch.cat([order.flip(0)[:2], order[:2]]), torch.tensor([1, 1, 0, 0])
    term = model.objective(criterion(3), k_sample=2).instance_term(output, torch.tensor([1]))
    torch.testing.assert_close(term, smooth_top1_svm(logits[rows], wanted))
    term = model.objective(criterion(3), k_sample=2, instance_loss="cross_entropy").instance_term(
        output, torch.tensor([1])
    )
    torch.testing.assert_close(term, F.cross_entropy(logits[rows], wanted))


@pytest.mark.parametrize("gated", [True, False])
def test_forced_dropout_is_the_drawn_one(gated, batch_of):
    model, batch = model_and_batch("clam_mb", batch_of, gated=gated, dropout=0.4)
    model.train()
    generator = torch.Generator().manual_seed(5)
    drawn = model(batch, generator=torch.Generator().manual_seed(5))
    mask = torch.rand(27, 16, generator=generator) < 0.4
    gate = torch.cat([torch.rand(27, 8, generator=generator) < 0.25 for _ in range(2 if gated else 1)], dim=1)
    forced = model.eval()(batch, forced_mask=mask, forced_gate_mask=gate)
    torch.testing.assert_close(forced.logits, drawn.logits)
    hidden = model.features(batch.features).masked_fill(mask, 0) / 0.6
    inner = (model.attention.tanh(hidden).tanh()).masked_fill(gate[:, :8], 0) / 0.75
    if gated:
        inner = inner * model.attention.gate(hidden).sigmoid().masked_fill(gate[:, 8:], 0) / 0.75
    torch.testing.assert_close(forced.attention_logits, model.attention.weights(inner))


def test_heatmaps_of_branches_speak_of_the_predicted_class(batch_of):
    model, batch = model_and_batch("clam_mb", batch_of, lengths=(9, 5, 8, 6))
    output = model.eval()(batch)
    predicted = output.logits.argmax(dim=1).repeat_interleave(torch.tensor(batch.lengths))
    assert len(predicted.unique()) > 1
    wanted = output.attention[torch.arange(28), predicted]
    torch.testing.assert_close(model.instance_scores(output, "attention"), wanted)
    torch.testing.assert_close(model.instance_scores(output, "attention", 2), output.attention[:, 2])
    names = [(c.name, c.label, c.index) for c in model.score_columns(("a", "b", "c"))]
    assert names[:3] == [("attention", None, None), ("attention:a", "a", 0), ("attention:b", "b", 1)]


@pytest.mark.parametrize("method", ["clam_sb", "clam_mb"])
def test_aem_regularises_every_column(method, batch_of, criterion):
    model, batch = model_and_batch(method, batch_of)
    objective = find_regulariser("aem")(model.objective(criterion(3)), weight=0.3)
    progress = Progress(step=0, total_steps=1, generator=torch.Generator())
    terms = objective.loss(model.eval(), batch, torch.tensor([0, 1, 2]), progress)
    assert list(terms) == ["bag", "instance", "aem"]
    p = model(batch).attention
    each = [(rows * rows.log()).sum(dim=0).mean() for rows in torch.split(p, batch.lengths)]
    torch.testing.assert_close(terms["aem"], 0.3 * torch.stack(each).mean())


def official(gated, place, last="2"):
    """Published names of a small single-branch model."""
    names = {"attention_net.0": (16, 6), "classifiers": (2, 16)}
    names |= {f"instance_classifiers.{c}": (2, 16) for c in range(2)}
    inner = {"attention_a.0": (8, 16), "attention_b.0": (8, 16), "attention_c": (1, 8)}
    inner = inner if gated else {"module.0": (8, 16), f"module.{last}": (1, 8)}
    names |= {f"attention_net.{place}.{name}": shape for name, shape in inner.items()}
    weights = {f"{name}.weight": torch.randn(shape) for name, shape in names.items()}
    return weights | {f"{name}.bias": torch.randn(shape[0]) for name, shape in names.items()}


@pytest.mark.parametrize(("gated", "place", "last"), [(True, 3, ""), (True, 2, ""), (False, 3, "2"), (False, 3, "3")])
def test_published_names_of_other_settings(gated, place, last, batch_of):
    weights = official(gated, place, last) | {"instance_loss_fn.labels": torch.arange(2)}
    model = find_model("clam_sb").from_official(weights)
    assert (model.gated, model.hidden, model.attention_dim, model.training) == (gated, 16, 8, False)
    h = F.relu(F.linear(torch.ones(1, 6), weights["attention_net.0.weight"], weights["attention_net.0.bias"]))
    wanted = F.linear(h, weights["classifiers.weight"], weights["classifiers.bias"])
    torch.testing.assert_close(model(batch_of(torch.ones(1, 6))).logits, wanted)


def test_the_other_form_is_refused_by_its_keys():
    with pytest.raises(ConfigError, match=r"classifiers\.0\.weight"):
        find_model("clam_mb").from_official(official(True, 3))


@pytest.mark.parametrize("wrong", [{"instance_loss": "hinge"}, {"overlap": "some"}, {"k_sample": 0}, {"bag_weight": 2}])
def test_wrong_settings_are_refused(wrong, refused):
    refused("clam_sb", next(iter(wrong)), objective=wrong)
    with pytest.raises(ConfigError, match="n_outputs=1"):
        find_model("clam_sb")(in_dim=6, n_outputs=1)


@pytest.mark.parametrize("params", [{"gated": False, "dropout": 0.0}], ids=lambda params: "-".join(params))
def test_other_forms_obey_every_law(params):
    assert [result for result in check_model(find_model("clam_mb"), params=params) if not result.passed] == []
