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

WITHOUT_ATTENTION = {
    *("adapool", "differential_attention", "focusmil", "gated_pool", "gem", "ggem", "ins", "latent_attention"),
    *("lse_pool", "max_pool", "mean_pool", "mixed_pool", "softpool", "tree_pool"),
    *("prob_exp_softmax", "prob_linear_softmax", "prob_max", "prob_mean"),
}
ONE_COLUMN = {
    *("abmil", "attentive_statistics", "clam_sb", "class_attention", "dsmil", "dtfd", "mhim", "midam"),
    *("prob_attention", "psa", "rrt", "simpool", "smabmil"),
}
"""Of attention, with two classes and the settings that a method comes with."""
OF_GATED_ATTENTION = {"abmil", "acmil", "attentive_statistics", "clam_mb", "clam_sb", "differential_attention", "dtfd"}
ON_SCORES = {
    "changes the scores of gated attention": set(model_names()) - OF_GATED_ATTENTION,
    "needs a score for every tile": {"dtfd"},
}
REFUSED = {
    "aem": {"needs attention": WITHOUT_ATTENTION},
    "anchor": {"needs attention": WITHOUT_ATTENTION},
    "attention_diversity": {"needs attention": WITHOUT_ATTENTION, "this method has one": ONE_COLUMN},
    "mammoth": {"slots lie nowhere": {"psa", "smabmil"}},
    "neighbour_smoothing": ON_SCORES,
    "rectified_attention": ON_SCORES,
}
"""Plug-in -> what a refusal says -> the methods that it refuses; all others train with it."""


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
    """Every law for two methods, a training step of all; those that do not go with it are refused for its reason."""
    subject = Subject(cls=find_model(method), wrap=find_regulariser(regulariser))
    reasons = [reason for reason, methods in REFUSED.get(regulariser, {}).items() if method in methods]
    if reasons:
        with pytest.raises(ConfigError, match=reasons[0]):
            one_loss(subject)
        return
    model, loss = one_loss(subject)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    if method in THOROUGH:
        results = [check_law(law, subject) for law in LAWS]
        assert [result for result in results if not result.passed] == []


def one_loss(subject):
    model = subject.model(subject.cls.binary_outputs, training=True)
    return model, subject.loss(model, subject.batch())


def test_the_named_methods_are_there():
    assert {"mean_pool", "max_pool", "abmil", "acmil", "focusmil"} <= set(model_names())
    assert "aem" in regulariser_names()


def test_one_result_a_law():
    results = check_model(find_model("mean_pool"))
    assert [result.name for result in results] == [law_name(law) for law in LAWS]
    assert next(r for r in results if r.name == "attention sums to one").message == "does not apply: no attention"
