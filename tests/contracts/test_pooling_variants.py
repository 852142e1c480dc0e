"""The laws hold for the poolings' other settings too."""

import pytest

from wsi_mil.contracts import check_model
from wsi_mil.lookup import find_model

VARIANTS = [
    ("set_transformer", {"hidden": 16, "per_class": True, "inducing": 4}),
    ("set_transformer", {"hidden": 16, "seeds": 2, "decoder_depth": 2, "depth": 1, "dropout": 0.0}),
    ("set_transformer", {"hidden": 16, "decoder_depth": 1, "norm": False, "depth": 0}),
    ("set_transformer", {"hidden": None, "width": 16, "block": "sab", "depth": 1}),
    ("efficient_probing", {"norm": "l2", "d_out": 2, "value_bias": True}),
    ("efficient_probing", {"norm": "none", "head_norm": False, "queries": 4}),
    ("class_attention", {"hidden": 16, "heads": 4, "dropout": 0.2}),
    ("class_attention", {"hidden": None, "per_class": True, "heads": 2, "final_norm": False, "qkv_bias": False}),
    ("simpool", {"gamma": 2.0, "heads": 4, "qkv_bias": True}),
    ("adaptive_attention", {"hidden": 16, "query": "max_norm", "dropout": 0.2}),
    ("adaptive_attention", {"hidden": None, "heads": 1}),
    ("attentive_statistics", {"channel_wise": True, "context": True, "hidden": 8}),
    ("attentive_statistics", {"feature_layer": False, "dropout": 0.2}),
    ("class_queries", {"hidden": 16, "depth": 1, "heads": 2, "dropout": 0.0}),
    ("latent_attention", {"hidden": 16, "latents": 5, "heads": 2, "mlp_ratio": 2.0, "dropout": 0.2}),
    ("mixed_pool", {"per_channel": True, "feature_layer": False, "mix": 0.2}),
    ("gated_pool", {"per_channel": True, "dropout": 0.2}),
    ("tree_pool", {"per_channel": True, "top": 0.4, "sharpness": 3.0, "feature_layer": False}),
    ("softpool", {"learn_temperature": False, "feature_layer": False}),
    ("adapool", {"feature_layer": False, "beta": 0.9}),
    ("gem", {"p": 5.0, "feature_layer": False}),
    ("ggem", {"groups": 3, "hidden": 8}),
    ("lse_pool", {"hidden": 16, "r": 4.0, "dropout": 0.2}),
    ("prob_attention", {"hidden": None, "dropout": 0.2}),
    ("prob_linear_softmax", {"hidden": None, "prior": 0.3}),
]


@pytest.mark.parametrize(("method", "params"), VARIANTS, ids=[f"{m}-{'-'.join(p)}" for m, p in VARIANTS])
def test_variant(method, params):
    results = check_model(find_model(method), params=params)
    assert [result for result in results if not result.passed] == []
