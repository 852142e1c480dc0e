import math

import pytest
import torch

from wsi_mil.errors import ConfigError
from wsi_mil.lookup import find_model

FILES = {"abmilx": "relu", "abmilx_ln_ffn_bias": "gelu", "abmilx_mhla_only": "relu"}


@pytest.mark.parametrize("name", FILES)
def test_scores_logits_and_all_gradients(name, vectors, batch_of, criterion, close, terms_of, same_gradients):
    v = vectors(name)
    model = find_model("abmilx").from_official(v.under("w/"), activation=FILES[name])
    b, n, _ = v["x"].shape
    batch = batch_of(*v["x"])
    output = model(batch)

    def as_published(columns):
        return columns.reshape(b, n, model.heads).transpose(1, 2)

    close(output.auxiliary["hidden"].reshape(v["embedded"].shape), v["embedded"])
    close(as_published(output.auxiliary["local_attention_logits"]), v["local_attention_logits"][..., 0])
    if model.attn_plus:
        close(as_published(output.attention_logits), v["refined_attention_logits"][..., 0])
    close(as_published(output.attention), v["attention"])
    close(output.bag_embedding[:, 0], v["bag"])
    close(output.logits, v["logits"])
    terms = terms_of(model.objective(criterion(3)), model, batch, v["label"].long())
    close(terms["bag"], v["loss"])
    same_gradients(model, find_model("abmilx").from_official(v.under("g/")))


def test_without_biases_the_layer_norms_have_none_either(vectors, batch_of):
    v = vectors("abmilx_ln_ffn_bias")
    biased = ("feature.0.bias", "feature.1.bias", "norm1.bias", "proj.bias", "classifier.bias")
    weights = {key: value for key, value in v.under("w/").items() if key not in biased}
    model = find_model("abmilx").from_official(weights, activation="gelu")
    assert (model.bias, model.layer_norm, model.attention_bias) == (False, True, True)
    zeros = {key: torch.zeros_like(v[f"w/{key}"]) for key in biased}
    same = find_model("abmilx").from_official(weights | zeros, activation="gelu")
    batch = batch_of(*v["x"])
    torch.testing.assert_close(model(batch).logits, same(batch).logits)
    assert len(list(model.parameters())) == len(weights)


def test_alpha_zero_is_the_local_attention_alone(vectors, batch_of):
    v = vectors("abmilx")
    weights = v.under("w/") | {"attn_plus_fn.v.weight": torch.zeros(1, 1)}
    local = {key: value for key, value in weights.items() if not key.startswith("attn_plus_fn")}
    batch = batch_of(v["x"][0])
    ours = [find_model("abmilx").from_official(w)(batch).logits for w in (weights, local)]
    torch.testing.assert_close(*ours)


def test_a_constant_on_all_scores_changes_no_attention(vectors, batch_of):
    v = vectors("abmilx")
    model = find_model("abmilx").from_official(v.under("w/"))
    batch = batch_of(v["x"][0])
    before = model(batch)
    model.score.register_forward_hook(lambda _module, _arguments, scores: scores + 0.7)
    after = model(batch)
    alpha = model.plus.alpha.item()
    torch.testing.assert_close(
        after.attention_logits, before.attention_logits + 0.7 * (1 + alpha), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(after.attention, before.attention, rtol=1e-4, atol=1e-6)


def test_the_refined_scores_and_their_gradients_are_those_of_the_dense_formula():
    torch.manual_seed(0)
    model = find_model("abmilx")(in_dim=8, n_outputs=2, hidden=16, heads=4).double()
    parts = torch.randn(23, 4, 4, dtype=torch.float64, requires_grad=True)
    scores = torch.randn(23, 4, dtype=torch.float64, requires_grad=True)
    plus = model.plus
    query, key = plus.query_key(plus.norm(parts)).chunk(2, dim=-1)
    shares = (torch.einsum("qhd,nhd->hqn", query, key) / 2).softmax(dim=-1)
    dense = scores + torch.einsum("hqn,nh->qh", shares, plus.alpha * scores)
    answers = [plus(parts, scores), dense]
    torch.testing.assert_close(*answers, rtol=1e-12, atol=1e-12)
    wanted = [parts, scores, *plus.parameters()]
    gradients = [torch.autograd.grad(answer.square().sum(), wanted) for answer in answers]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_first_weights_are_spread_as_published():
    torch.manual_seed(0)
    model = find_model("abmilx")(in_dim=128, n_outputs=2, hidden=64, bias=True)
    assert model.features.weight.std().item() == pytest.approx(math.sqrt(2 / (128 + 64)), rel=0.05)
    assert all((layer.bias == 0).all() for layer in (model.features, model.project, model.head))
    assert model.plus.alpha.item() == 1


def test_long_bags_are_refused_and_the_linear_form_is_named(batch_of):
    batch = batch_of(torch.randn(12, 8))
    with pytest.raises(ConfigError, match="attn_plus=False"):
        find_model("abmilx")(in_dim=8, n_outputs=2, max_tiles=11)(batch)
    find_model("abmilx")(in_dim=8, n_outputs=2, max_tiles=11, attn_plus=False)(batch)
