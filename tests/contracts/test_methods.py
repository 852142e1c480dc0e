"""Every method that exists is held to every law because its file exists."""

import pytest

from wsi_mil.contracts import (
    LAWS,
    Subject,
    check_law,
    check_model,
    law_name,
)
from wsi_mil.errors import ConfigError
from wsi_mil.lookup import find_model, find_regulariser, model_names, regulariser_names

VARIANTS = [
    ("abmil", {"gated": False, "feature_layer": False}),
    ("abmil", {"dropout": 0.3}),
    ("acmil", {"variant": "multi_head"}),
    ("acmil", {"n_branches": 1, "top_k": 0}),
    ("acmil", {"variant": "multi_head", "n_branches": 1}),
    ("acmil", {"masking": "bernoulli", "mask_drop": 1.0}),
    ("focusmil", {"hidden": (), "latent_dim": 4}),
    ("mean_pool", {"hidden": 16}),
    ("max_pool", {"hidden": 16, "dropout": 0.2}),
    ("smabmil", {"where": "early", "alpha": 0.7, "hidden": 16}),
    ("smabmil", {"where": "mid", "mode": "exact"}),
    ("abmilx", {"layer_norm": True, "ffn": True, "bias": True, "attn_plus": False, "hidden": 32}),
    ("rrt", {"order": "coords", "strict_mask": True, "cross_mlp": True, "hidden": 32}),
    ("psa", {"depth": 2, "adapter_layers": 2, "decay": "inverse_quadratic", "head_dim": 8}),
    ("asmil", {"token_dropping": "bernoulli", "n_drop": 1, "n_tokens": 2}),
    ("ilra", {"layer_norm": False, "latents": 2, "blocks": 1, "hidden": 16}),
]

THOROUGH = ("abmil", "acmil")


@pytest.mark.parametrize("law", LAWS, ids=law_name)
@pytest.mark.parametrize("method", model_names())
def test_method(method, law):
    result = check_law(law, Subject(cls=find_model(method)))
    assert result.passed, result.message


@pytest.mark.parametrize("law", LAWS, ids=law_name)
@pytest.mark.parametrize(("method", "params"), VARIANTS, ids=[f"{m}-{'-'.join(p)}" for m, p in VARIANTS])
def test_variant(method, params, law):
    result = check_law(law, Subject(cls=find_model(method), params=params))
    assert result.passed, result.message


@pytest.mark.parametrize("regulariser", regulariser_names())
@pytest.mark.parametrize("method", model_names())
def test_with_plug_in(method, regulariser):
    """Every law for two methods, a training step of all; what does not go together is refused."""
    subject = Subject(cls=find_model(method), wrap=find_regulariser(regulariser))
    try:
        model = subject.model(subject.cls.binary_outputs, training=True)
        loss = subject.loss(model, subject.batch())
    except ConfigError:
        assert method not in THOROUGH or (method, regulariser) == ("abmil", "attention_diversity")
        return
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    if method in THOROUGH:
        results = [check_law(law, subject) for law in LAWS]
        assert [result for result in results if not result.passed] == []


def test_the_named_methods_are_there():
    assert {"mean_pool", "max_pool", "abmil", "acmil", "focusmil"} <= set(model_names())
    assert "aem" in regulariser_names()


def test_one_result_a_law():
    results = check_model(find_model("mean_pool"))
    assert [result.name for result in results] == [law_name(law) for law in LAWS]
    assert next(r for r in results if r.name == "attention sums to one").message == "does not apply: no attention"
