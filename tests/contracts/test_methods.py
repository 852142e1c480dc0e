"""Every method that exists is held to every law because its file exists."""

import pytest

from wsi_mil.contracts import LAWS, Subject, check_law, check_model, law_name
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
]


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
@pytest.mark.parametrize("method", [name for name in model_names() if "attention" in find_model(name).score_kinds])
def test_regularised(method, regulariser):
    results = check_model(find_model(method), wrap=find_regulariser(regulariser))
    assert [result for result in results if not result.passed] == []


def test_the_named_methods_are_there():
    assert {"mean_pool", "max_pool", "abmil", "acmil", "focusmil"} <= set(model_names())
    assert "aem" in regulariser_names()


def test_one_result_a_law():
    results = check_model(find_model("mean_pool"))
    assert [result.name for result in results] == [law_name(law) for law in LAWS]
    assert next(r for r in results if r.name == "attention sums to one").message == "does not apply: no attention"
