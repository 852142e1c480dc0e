import math

import pytest
import torch

from wsi_mil.errors import ConfigError
from wsi_mil.lookup import find_model, find_regulariser
from wsi_mil.models._base import Progress
from wsi_mil.regularisers.aem import negative_entropy


def term(logits, top_k=None):
    """Value and gradient for one bag. logits: (1, 1, n)."""
    rows = logits.reshape(-1, 1).clone().requires_grad_()
    value = negative_entropy(rows, torch.tensor([0, len(rows)]), top_k=top_k)
    value.backward()
    return value, rows.grad.flatten()


@pytest.mark.parametrize("case", range(6))
def test_entropy_term(case, vectors, close):
    v = vectors("aem_loss").under(f"c{case}_")
    value, gradient = term(v["attn"])
    close(value, v["div"])
    close(gradient, v["grad"])


@pytest.mark.parametrize("case", range(4))
def test_top_k_term(case, vectors, close):
    v = vectors("aem_topk").under(f"k{case}_")
    value, gradient = term(v["attn"], top_k=v["k"].item())
    close(value, v["div_stable"])
    if v["div_official_expr"] != -999:
        close(value, v["div_official_expr"])
    close(gradient.sort().values, v["grad_stable"].flatten().sort().values)


def test_columns_and_bags_are_averaged():
    logits = torch.randn(9, 3)
    offsets = torch.tensor([0, 4, 9])
    single = [
        negative_entropy(logits[start:end, m : m + 1], torch.tensor([0, end - start]))
        for start, end in ((0, 4), (4, 9))
        for m in range(3)
    ]
    torch.testing.assert_close(negative_entropy(logits, offsets), torch.stack(single).mean())


def test_hidden_tiles_count_as_nothing():
    logits = torch.tensor([[0.3], [1.0], [-0.4]])
    hidden = torch.cat([logits, torch.full((2, 1), torch.finfo(torch.float32).min)])
    masked = negative_entropy(hidden, torch.tensor([0, 5]))
    torch.testing.assert_close(masked, negative_entropy(logits, torch.tensor([0, 3])))


def test_tiles_at_minus_infinity_give_no_nan():
    logits = torch.tensor([[0.3], [1.0], [-torch.inf]], requires_grad=True)
    value = negative_entropy(logits, torch.tensor([0, 3]))
    value.backward()
    torch.testing.assert_close(value, negative_entropy(logits[:2], torch.tensor([0, 2])))
    assert logits.grad.isfinite().all()


def test_one_step_on_the_term_raises_the_entropy():
    logits = (3 * torch.randn(20, 1)).requires_grad_()
    offsets = torch.tensor([0, 20])
    before = negative_entropy(logits, offsets)
    before.backward()
    after = negative_entropy(logits.detach() - 0.1 * logits.grad, offsets)
    assert after < before
    assert -math.log(20) <= after


def progress(step, total=10):
    return Progress(step=step, total_steps=total, generator=torch.Generator().manual_seed(0))


def test_schedules(criterion):
    inner = find_model("abmil")(in_dim=4, n_outputs=2).objective(criterion(2))
    aem = find_regulariser("aem")
    assert [aem(inner, weight=0.2).weight_at(progress(s)) for s in (0, 5, 9)] == [0.2, 0.2, 0.2]
    cosine = aem(inner, weight=0.2, schedule="cosine", end_weight=0.1)
    assert cosine.weight_at(progress(0)) == pytest.approx(0.2)
    assert cosine.weight_at(progress(5)) == pytest.approx(0.15)
    assert cosine.weight_at(progress(10)) == pytest.approx(0.1)


def test_weight_zero_is_the_base_method_bit_for_bit(batch_of, criterion):
    batch, target = batch_of(torch.randn(7, 6), torch.randn(3, 6)), torch.tensor([0, 1])
    gradients = []
    for weight in (None, 0.0):
        torch.manual_seed(0)
        model = find_model("acmil")(in_dim=6, n_outputs=2).train()
        objective = model.objective(criterion(2))
        if weight is not None:
            objective = find_regulariser("aem")(objective, weight=weight)
        torch.stack(list(objective.loss(model, batch, target, progress(0)).values())).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    terms = objective.loss(model, batch, target, progress(0))
    assert terms["aem"].item() == 0
    assert not terms["aem"].requires_grad


def test_the_model_is_asked_once(batch_of, criterion):
    model = find_model("abmil")(in_dim=6, n_outputs=2)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    aem = find_regulariser("aem")
    objective = aem(aem(model.objective(criterion(2)), weight=0.1), weight=0.2)
    objective.loss(model, batch_of(torch.randn(7, 6)), torch.tensor([1]), progress(0))
    assert len(calls) == 1


@pytest.mark.parametrize("method", ["mean_pool", "max_pool", "focusmil"])
def test_methods_without_attention_are_refused_before_training(method, criterion):
    cls = find_model(method)
    model = cls(in_dim=6, n_outputs=cls.binary_outputs)
    objective = find_regulariser("aem")(model.objective(criterion(model.n_outputs)))
    with pytest.raises(ConfigError, match="attention"):
        objective.parameter_groups(model)


@pytest.mark.parametrize("wrong", [{"schedule": "linear"}, {"top_k": 0}])
def test_wrong_settings_are_refused(wrong, refused):
    refused("abmil", next(iter(wrong)), regularisers={"aem": wrong})
