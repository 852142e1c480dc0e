import pytest
import torch

from wsi_mil.contracts import check_model
from wsi_mil.errors import ConfigError
from wsi_mil.lookup import find_model
from wsi_mil.models._base import Progress

PARTS = {"dim_reduction": "w_dimred/", "attention": "w_attn/", "classifier": "w_cls/", "att_classifier": "w_ucls/"}


def checkpoint(v, wrap=""):
    return {part: {wrap + name: w for name, w in v.under(prefix).items()} for part, prefix in PARTS.items()}


@pytest.mark.parametrize("kind", ["AFS", "MaxS", "MaxMinS"])
def test_one_step(kind, vectors, batch_of, criterion, close, terms_of):
    v = vectors("dtfd")
    t = v.under(f"{kind}_")
    model = find_model("dtfd").from_official(checkpoint(v, "module."), distillation=kind)
    batch = batch_of(v["x"])
    output = model(batch, permutation=v["perm"])
    for g in range(4):
        rows = v[f"chunk{g}_idx"]
        start, end = output.auxiliary["group_offsets"][g : g + 2].tolist()
        assert output.auxiliary["order"][start:end].tolist() == rows.tolist()
        close(output.auxiliary["group_attention"][rows], v[f"chunk{g}_attn"])
        close(output.auxiliary["cam"][rows].softmax(dim=1), v[f"chunk{g}_cam_softmax"])
    close(output.auxiliary["distilled"], t["pseudo_feat"])
    close(output.auxiliary["group_logits"], t["sub_logits"])
    close(output.logits, t["slide_logits"])
    terms = terms_of(model.objective(criterion(2)), model, batch, v["label"], permutation=v["perm"])
    close(terms["pseudo_bags"], t["loss0"])
    close(terms["bag"], t["loss1"])


def small(batch_of, lengths=(11, 3, 1), **params):
    torch.manual_seed(0)
    model = find_model("dtfd")(in_dim=6, n_outputs=params.pop("n_outputs", 2), hidden=8, attention_dim=4, **params)
    return model, batch_of(*(torch.randn(n, 6) for n in lengths))


@pytest.mark.parametrize("kind", ["AFS", "MaxS", "MaxMinS"])
@pytest.mark.parametrize("detach", [True, False])
def test_the_second_tiers_loss_reaches_the_first_only_when_trained_jointly(kind, detach, batch_of, criterion):
    model, batch = small(batch_of, distillation=kind, detach=detach)
    criterion(2)(model(batch).logits, torch.tensor([0, 1, 1])).backward()
    first = [p for name, p in model.named_parameters() if not name.startswith("tier2.")]
    assert any(p.grad is not None and p.grad.any() for p in first) == (not detach)
    assert all(p.grad.any() for name, p in model.named_parameters() if name.startswith("tier2.") and p.ndim > 1)


def test_one_optimiser_with_two_groups_is_the_published_two(batch_of, criterion):
    """Tier 1 steps on its loss, then tier 2 on its own; both forward passes came before."""
    target, progress = (
        torch.tensor([0, 1, 1]),
        Progress(step=0, total_steps=1, generator=torch.Generator().manual_seed(1)),
    )
    model, batch = small(batch_of, distillation="MaxS")
    objective = model.objective(criterion(2))
    groups = list(objective.parameter_groups(model))
    assert [len(group["params"]) for group in groups] == [9, 8]
    together = torch.optim.Adam(groups, lr=0.1)
    sum(objective.loss(model, batch, target, progress).values()).backward()
    together.step()
    other, _ = small(batch_of, distillation="MaxS", detach=False)
    objective = other.objective(criterion(2))
    first, second = (torch.optim.Adam(g["params"], lr=0.1) for g in objective.parameter_groups(other))
    progress.generator.manual_seed(1)
    terms = objective.loss(other, batch, target, progress)
    of_first = torch.autograd.grad(terms["pseudo_bags"], first.param_groups[0]["params"], retain_graph=True)
    of_second = torch.autograd.grad(terms["bag"], second.param_groups[0]["params"])
    for optimiser, gradients in ((first, of_first), (second, of_second)):
        for p, gradient in zip(optimiser.param_groups[0]["params"], gradients, strict=True):
            p.grad = gradient
        optimiser.step()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_bags_pseudo_bags_count_alike_whatever_their_number(batch_of, criterion, terms_of):
    model, batch = small(batch_of)
    target = torch.tensor([0, 1, 1])
    objective = model.eval().objective(criterion(2))
    alone = [
        terms_of(objective, model, batch_of(bag.features), target[i : i + 1]) for i, bag in enumerate(batch.bags())
    ]
    together = terms_of(objective, model, batch, target)
    for name in ("bag", "pseudo_bags"):
        torch.testing.assert_close(together[name], torch.stack([terms[name] for terms in alone]).mean())


@pytest.mark.parametrize(
    ("n", "sizes"), [(1, [1]), (3, [1, 1, 1]), (4, [1] * 4), (6, [2, 2, 1, 1]), (21, [6, 5, 5, 5])]
)
def test_sizes_of_pseudo_bags(n, sizes, batch_of):
    model, batch = small(batch_of, lengths=(n,))
    for generator in (None, torch.Generator().manual_seed(0)):
        auxiliary = model.train()(batch, generator=generator).auxiliary
        assert auxiliary["group_offsets"].diff().tolist() == sizes
        assert sorted(auxiliary["order"].tolist()) == list(range(n))


def test_training_deals_at_random_and_evaluation_does_not(batch_of):
    model, batch = small(batch_of, lengths=(12, 9))
    model.train()
    drawn = model(batch, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(7)
    permutation = torch.cat([torch.randperm(n, generator=generator) for n in (12, 9)])
    torch.testing.assert_close(model.eval()(batch, permutation=permutation).logits, drawn.logits)
    assert not torch.equal(model(batch).logits, drawn.logits)
    assert torch.equal(model(batch, generator=generator).logits, model(batch).logits)


@pytest.mark.parametrize("kind", ["MaxS", "MaxMinS"])
def test_more_tiles_of_each_pseudo_bag(kind, batch_of):
    model, batch = small(batch_of, lengths=(10,), distillation=kind, n_distilled=2, n_groups=3)
    permutation = torch.randperm(10)
    output = model.eval()(batch, permutation=permutation)
    hidden = model.features(batch.features)
    wanted = []
    for rows in torch.tensor_split(permutation, 3):
        a = model.attention(hidden[rows]).softmax(dim=0)
        p = (a * hidden[rows] @ model.head.weight.T).softmax(dim=1)[:, 1]
        ranked = rows[p.argsort(descending=True)]
        wanted.append(hidden[ranked[:2]])
        if kind == "MaxMinS":
            wanted.append(hidden[ranked[-2:]])
    torch.testing.assert_close(output.auxiliary["distilled"], torch.cat(wanted))


def test_ranking_class(batch_of):
    def chosen(n_outputs=3, **params):
        model, batch = small(batch_of, lengths=(12,), n_outputs=n_outputs, distillation="MaxS", n_groups=2, **params)
        if n_outputs == 2:
            torch.nn.init.constant_(model.head.bias[:1], 5.0)  # tier 1 gives the first class
        output = model.eval()(batch)
        given = output.auxiliary["group_logits"].argmax(dim=1)
        ends = output.auxiliary["group_offsets"].tolist()
        ordered = output.auxiliary["cam"][output.auxiliary["order"]].softmax(dim=1)
        rows = {
            name: [ends[g] + ordered[ends[g] : ends[g + 1], c].argmax().item() for g, c in enumerate(columns)]
            for name, columns in (("last", [-1, -1]), ("given", given.tolist()))
        }
        hidden = model.features(batch.features)[output.auxiliary["order"]]
        return [name for name, r in rows.items() if torch.equal(hidden[r], output.auxiliary["distilled"])]

    assert chosen() == ["given"]
    assert chosen(2) == ["last"]
    assert chosen(2, rank_by="given") == ["given"]
    assert chosen(rank_by="given") == ["given"]
    assert chosen(rank_by="last") == ["last"]


def test_published_weights_rank_as_published(vectors):
    v = vectors("dtfd")
    assert find_model("dtfd").from_official(checkpoint(v)).rank_by == "last"
    assert find_model("dtfd").from_official(checkpoint(v), rank_by="given").rank_by == "given"


@pytest.mark.parametrize("container", ["model", "state_dict"])
def test_the_four_state_dicts_may_lie_in_a_checkpoint(container, vectors):
    weights = checkpoint(vectors("dtfd"))
    wanted = find_model("dtfd").from_official(weights).state_dict()
    found = find_model("dtfd").from_official({container: weights, "epoch": 3}).state_dict()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_residual_blocks_of_the_published_layer(vectors, batch_of):
    weights = checkpoint(vectors("dtfd"))
    blocks = {f"resBlocks.0.block.{i}.weight": torch.randn(12, 12) for i in (0, 2)}
    weights["dim_reduction"] |= blocks
    model = find_model("dtfd").from_official(weights)
    x = torch.randn(1, 16)
    h = (x @ weights["dim_reduction"]["fc1.weight"].T).relu()
    first, second = blocks.values()
    h = h + (((h @ first.T).relu()) @ second.T).relu()
    head = weights["classifier"]
    output = model(batch_of(x))
    torch.testing.assert_close(output.auxiliary["group_logits"], h @ head["fc.weight"].T + head["fc.bias"])


def test_keys_without_a_place_are_named(vectors):
    weights = checkpoint(vectors("dtfd"))
    weights["classifier"]["fc2.weight"] = torch.zeros(2)
    with pytest.raises(ConfigError, match=r"classifier\.fc2\.weight"):
        find_model("dtfd").from_official(weights)
    del weights["att_classifier"]
    with pytest.raises(ConfigError, match="att_classifier"):
        find_model("dtfd").from_official(weights, ignore=("classifier.fc2*",))


@pytest.mark.parametrize("wrong", [{"distillation": "Max"}, {"n_groups": 0}, {"n_distilled": 0}, {"rank_by": "first"}])
def test_wrong_settings_are_refused(wrong, refused):
    refused("dtfd", next(iter(wrong)), params=wrong)


@pytest.mark.parametrize(
    "params",
    [{"distillation": "MaxS", "n_distilled": 3}, {"distillation": "MaxMinS", "detach": False, "residual_layers": 1}],
    ids=lambda params: "-".join(params),
)
def test_other_forms_obey_every_law(params):
    assert [result for result in check_model(find_model("dtfd"), params=params) if not result.passed] == []
