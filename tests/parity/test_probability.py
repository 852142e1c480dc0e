import pytest
import torch
from torch.nn import functional as F

from wsi_mil.lookup import find_model

FORMS = {
    "prob_max": "max",
    "prob_mean": "ave",
    "prob_linear_softmax": "lin",
    "prob_exp_softmax": "exp",
    "prob_attention": "att",
}


def injected(method, classes, dtype=torch.float64):
    """The method on features that are themselves the tile logits, and behind them the attention logits."""
    eye, none = torch.eye(classes, dtype=dtype), torch.zeros(classes, classes, dtype=dtype)
    weights = {"fc_prob.weight": torch.cat([eye, none], dim=1), "fc_prob.bias": torch.zeros(classes, dtype=dtype)}
    if method == "prob_attention":
        weights |= {"fc_att.weight": torch.cat([none, eye], dim=1), "fc_att.bias": torch.zeros(classes, dtype=dtype)}
    return find_model(method).from_official(weights)


@pytest.mark.parametrize(("method", "name"), FORMS.items())
def test_bag_probability_and_its_gradient(method, name, vectors, batch_of, close):
    v = vectors("instance_pooling")
    p = v["p"].clone().requires_grad_()
    model = injected(method, 3)
    output = model(batch_of(*torch.cat([p.logit(), v["att_logits"]], dim=2)))
    y = output.logits.sigmoid()
    close(y, v[f"y_{name}"], 1e-12)
    y.sum().backward()
    close(p.grad, v[f"dy_{name}"], 1e-12)
    for c in range(3):
        close(model.instance_scores(output, "probability", c), v["p"][..., c].flatten(), 1e-12)


def test_attention_is_a_score_of_its_own(vectors, batch_of, close):
    v = vectors("instance_pooling")
    model = injected("prob_attention", 3)
    output = model(batch_of(*torch.cat([v["p"].logit(), v["att_logits"]], dim=2)))
    weights = v["att_logits"].softmax(dim=1)
    close(output.attention, weights.flatten(0, 1), 1e-12)
    close(model.instance_scores(output, "attention", 2), weights[..., 2].flatten(), 1e-12)


def test_what_is_drawn_is_the_attention_of_the_predicted_class(batch_of):
    torch.manual_seed(0)
    model = injected("prob_attention", 3)
    output = model(batch_of(*torch.randn(4, 5, 6).double()))
    predicted = output.logits.argmax(dim=1)
    assert len(predicted.unique()) > 1
    wanted = torch.cat([rows[:, c] for rows, c in zip(output.attention.split(5), predicted, strict=True)])
    assert torch.equal(model.instance_scores(output, "attention"), wanted)
    columns = [column for column in model.score_columns(("a", "b", "c")) if column.kind == "attention"]
    assert [column.name for column in columns] == ["attention", "attention:a", "attention:b", "attention:c"]
    assert len([c for c in injected("prob_attention", 1).score_columns(("a", "b")) if c.kind == "attention"]) == 1


@pytest.mark.parametrize("n", [1, 2, 50])
def test_order_of_the_poolings_and_one_tile(n, batch_of):
    torch.manual_seed(n)
    batch = batch_of(torch.randn(n, 2).double() * 3)
    values = {m: injected(m, 1)(batch).logits.item() for m in FORMS if m != "prob_attention"}
    ordered = [values[m] for m in ("prob_max", "prob_linear_softmax", "prob_exp_softmax", "prob_mean")]
    if n == 1:
        assert ordered == pytest.approx([batch.features[0, 0].item()] * 4)
    else:
        assert ordered == sorted(ordered, reverse=True)
        assert len(set(ordered)) == 4


@pytest.mark.parametrize("method", FORMS)
def test_loss_is_the_cross_entropy_of_the_bag_probability(method, batch_of, criterion):
    torch.manual_seed(0)
    bags = [torch.randn(n, 2).double() for n in (6, 1)]
    logits = injected(method, 1)(batch_of(*bags)).logits
    target = torch.tensor([1, 0])
    wanted = F.binary_cross_entropy(logits[:, 0].sigmoid(), target.double())
    torch.testing.assert_close(criterion(1)(logits, target), wanted)


@pytest.mark.parametrize("method", FORMS)
@pytest.mark.parametrize("level", [-200.0, 0.0, 200.0])
def test_long_bags_and_certain_tiles_stay_finite_under_autocast(method, level, batch_of):
    model = injected(method, 1, torch.float32)
    x = torch.full((70_000, 2), level, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(batch_of(x)).logits
    logits.sum().backward()
    torch.testing.assert_close(logits, torch.full_like(logits, level), rtol=1e-4, atol=2e-3)
    assert x.grad.isfinite().all()


def test_exclusive_classes_are_given_that_one_is_true(batch_of):
    model = injected("prob_linear_softmax", 3)
    logits = model(batch_of(torch.randn(5, 6).double())).logits[0]
    y = logits.sigmoid()
    alone = torch.stack([y[c] * (1 - y[[j for j in range(3) if j != c]]).prod() for c in range(3)])
    torch.testing.assert_close(logits.softmax(dim=0), alone / alone.sum())


def test_training_starts_at_the_prior(batch_of, refused):
    torch.manual_seed(0)
    model = find_model("prob_linear_softmax")(in_dim=4, n_outputs=1, prior=0.01)
    output = model(batch_of(torch.zeros(9, 4)))
    assert output.logits.sigmoid().item() == pytest.approx(0.01)
    for prior in (0.0, 1.0):
        refused("prob_max", "prior", params={"prior": prior})
