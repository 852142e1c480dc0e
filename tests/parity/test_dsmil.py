import pytest
import torch
from torch.nn import functional as F

from wsi_mil.contracts import check_model
from wsi_mil.errors import ConfigError
from wsi_mil.lookup import find_model, find_regulariser
from wsi_mil.tasks import class_task


@pytest.mark.parametrize("case", range(4))
def test_original_form_all_gradients(case, vectors, batch_of, criterion, close, terms_of, same_gradients):
    v = vectors("dsmil")
    t = v.under(f"t{case}_")
    model = find_model("dsmil").from_official(v.under(f"t{case}_w/"))
    classes, nonlinear, value_layer = t["cfg"].tolist()
    assert (model.n_outputs, model.nonlinear, model.value_layer) == (classes, nonlinear == 1, value_layer == 1)
    batch = batch_of(v["x"])
    output = model(batch)
    close(output.instance_logits, t["classes"])
    close(output.attention, t["A"])
    close(output.bag_embedding, t["B"])
    close(output.logits, t["bag"])
    assert output.auxiliary["critical"][0].tolist() == t["crit_idx"].tolist()
    target = torch.tensor([1]) if classes == 1 else t["y"].argmax(dim=1)
    terms = terms_of(model.objective(criterion(classes), loss="bce"), model, batch, target)
    close(terms["bag"], 0.5 * t["bag_loss"])
    close(terms["max"], 0.5 * t["max_loss"])
    close(sum(terms.values()), t["loss"])
    same_gradients(model, find_model("dsmil").from_official(v.under(f"t{case}_g/")))


def test_cross_entropy_form_with_aem_and_all_gradients(vectors, batch_of, criterion, close, terms_of, same_gradients):
    v = vectors("aem_dsmil")
    model = find_model("dsmil").from_official(v.under("w/"), prediction="mean")
    batch = batch_of(v["x"][0])
    output = model(batch)
    close(output.instance_logits, v["ins_logits"])
    close(output.attention_logits.T, v["attn_logits"])
    close(output.auxiliary["bag_logits"], v["bag_logits"])
    close(output.auxiliary["max_logits"], v["max_logits"])
    close(output.logits.softmax(dim=1), v["pred"])
    objective = find_regulariser("aem")(model.objective(criterion(3)), weight=0.1)
    terms = terms_of(objective, model, batch, v["label"])
    close(terms["bag"] + terms["max"], v["bag_loss"])
    close(terms["aem"], 0.1 * v["div"])
    close(sum(terms.values()), v["loss"])
    same_gradients(model, find_model("dsmil").from_official(v.under("g/")))


def test_two_layers_of_unequal_widths_in_the_form_of_aem(batch_of, close):
    """No vectors: its published layers are D_feat to D_inner and D_inner to 128."""
    torch.manual_seed(0)
    shapes = {"i_classifier.fc.0": (2, 6), "b_classifier.q.0": (4, 6), "b_classifier.q.2": (128, 4)}
    w = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    w |= {f"{name}.bias": torch.randn(shape[0]) for name, shape in shapes.items()}
    w |= {"b_classifier.fcc.weight": torch.randn(2, 2, 6), "b_classifier.fcc.bias": torch.randn(2)}
    model = find_model("dsmil").from_official(w)
    assert (model.query_dim, model.query_hidden) == (128, 4)
    x = torch.randn(9, 6)
    inner = F.linear(x, w["b_classifier.q.0.weight"], w["b_classifier.q.0.bias"]).relu()
    q = F.linear(inner, w["b_classifier.q.2.weight"], w["b_classifier.q.2.bias"]).tanh()
    critical = F.linear(x, w["i_classifier.fc.0.weight"], w["i_classifier.fc.0.bias"]).argmax(dim=0)
    attention = (q @ q[critical].T / 128**0.5).softmax(dim=0)
    output = model(batch_of(x))
    close(output.attention, attention)
    close(output.logits, F.conv1d((attention.T @ x)[None], w["b_classifier.fcc.weight"], w["b_classifier.fcc.bias"]))


def test_with_one_output_both_losses_are_one(batch_of, criterion, close, terms_of):
    model = find_model("dsmil")(in_dim=6, n_outputs=1).eval()
    batch, target = batch_of(torch.randn(7, 6), torch.randn(1, 6), torch.randn(3, 6)), torch.tensor([0, 1, 1])
    one = terms_of(model.objective(criterion(1), loss="ce"), model, batch, target)
    other = terms_of(model.objective(criterion(1), loss="bce"), model, batch, target)
    close(one["bag"], other["bag"])
    close(one["max"], other["max"])


def test_class_weights_count_in_both_losses(batch_of, terms_of):
    model = find_model("dsmil")(in_dim=6, n_outputs=3).eval()
    task, batch = class_task("y", ("a", "b", "c")), batch_of(torch.randn(7, 6))
    for loss in ("ce", "bce"):
        plain = terms_of(model.objective(task.criterion(3), loss=loss), model, batch, torch.tensor([1]))
        heavy = terms_of(
            model.objective(task.criterion(3, [1.0, 5.0, 1.0]), loss=loss), model, batch, torch.tensor([1])
        )
        torch.testing.assert_close(heavy["max"], 5 * plain["max"])
        torch.testing.assert_close(heavy["bag"], 5 * plain["bag"])


def test_mean_of_both_streams_with_one_output(batch_of):
    model = find_model("dsmil")(in_dim=6, n_outputs=1, prediction="mean").eval()
    output = model(batch_of(torch.randn(7, 6), torch.randn(2, 6)))
    streams = [output.auxiliary[name].sigmoid() for name in ("bag_logits", "max_logits")]
    torch.testing.assert_close(output.logits.sigmoid(), sum(streams) / 2)
    assert "contribution" not in model.score_kinds


def test_contributions_know_that_each_logit_sees_every_embedding(batch_of):
    model = find_model("dsmil")(in_dim=6, n_outputs=3, value_layer=True).eval()
    torch.nn.init.normal_(model.head.bias)
    features = torch.randn(9, 6)
    output = model(batch_of(features))
    values = F.relu(model.value.linear(features))
    shares = torch.stack([model.instance_scores(output, "contribution", k) for k in range(3)], dim=1)
    for n in range(9):
        embedding = output.attention[n][:, None] * values[n]
        wanted = (model.head.weight * embedding).sum(dim=(1, 2)) + output.attention[n].mean() * model.head.bias
        torch.testing.assert_close(shares[n], wanted)
    torch.testing.assert_close(shares.sum(dim=0), output.logits[0])


def test_forced_dropout_of_the_values(batch_of):
    model = find_model("dsmil")(in_dim=6, n_outputs=2, value_layer=True, value_dropout=0.3).train()
    batch = batch_of(torch.randn(7, 6))
    mask = torch.rand(7, 6, generator=torch.Generator().manual_seed(2)) < 0.3
    drawn = model(batch, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(model.eval()(batch, forced_mask=mask).logits, drawn.logits)
    assert not torch.equal(model(batch).logits, drawn.logits)


def test_checkpoints_with_a_network_inside(vectors):
    weights = {k.replace("fc.0.", "fc."): w for k, w in vectors("dsmil").under("t0_w/").items()}
    weights["i_classifier.feature_extractor.conv1.weight"] = torch.zeros(2)
    with pytest.raises(ConfigError, match="feature_extractor"):
        find_model("dsmil").from_official(weights)
    find_model("dsmil").from_official(weights, ignore=("i_classifier.feature_extractor.*",))


def test_wrong_settings_are_refused(refused):
    for wrong in ({"loss": "mse"}, {"max_weight": -1}):
        refused("dsmil", next(iter(wrong)), objective=wrong)
    refused("dsmil", "prediction", params={"prediction": "max"})


@pytest.mark.parametrize(
    "params",
    [
        {"value_layer": True, "value_dropout": 0.2, "hidden": 16, "nonlinear": False},
        {"prediction": "mean", "query_hidden": 8},
    ],
    ids=lambda params: "-".join(params),
)
def test_other_forms_obey_every_law(params):
    assert [result for result in check_model(find_model("dsmil"), params=params) if not result.passed] == []
