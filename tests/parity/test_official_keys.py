"""Every published weight is needed, is named when it is missing, and nothing else is taken."""

import pytest
import torch

from wsi_mil.errors import ConfigError
from wsi_mil.lookup import find_model
from wsi_mil.models._mammoth import MammothLayer

FILES = {
    "asmil": ("asmil", {}),
    "mammoth_slots": ("mammoth", {}),
    "mammoth_rms": ("mammoth", {}),
    "smabmil_early": ("smabmil", {}),
    "smabmil_mid_sn": ("smabmil", {"where": "mid", "alpha": 0.5}),
    "psa": ("psa", {}),
    "psa_exponential": ("psa", {"decay": "exponential"}),
    "abmilx": ("abmilx", {}),
    "abmilx_ln_ffn_bias": ("abmilx", {}),
    "abmilx_mhla_only": ("abmilx", {}),
    "rrt": ("rrt", {"cross_heads": 4}),
    "rrt_mlp_shortcut": ("rrt", {"cross_heads": 4}),
    "ilra": ("ilra", {"heads": 4}),
}
UNUSED = ("dimreduction.bn.weight", "dimreduction.bn.bias")


@pytest.fixture(params=FILES)
def published(request, vectors):
    """What loads the weights, and the weights."""
    method, settings = FILES[request.param]
    read = MammothLayer.from_official if method == "mammoth" else find_model(method).from_official
    return (lambda weights, **more: read(weights, **settings, **more)), vectors(request.param).under("w/")


def test_a_missing_weight_is_named(published):
    load, weights = published
    for missing in weights.keys() - set(UNUSED):
        with pytest.raises(ConfigError) as error:
            load({name: value for name, value in weights.items() if name != missing})
        assert missing in str(error.value)


def test_a_weight_without_a_place_is_named_and_can_be_left_out(published):
    load, weights = published
    for extra in ("encoder.weight", "blocks.9.norm1.weight", "classifier.9.fc.weight"):
        with pytest.raises(ConfigError, match=extra):
            load(weights | {extra: torch.zeros(2)})
        load(weights | {extra: torch.zeros(2)}, ignore=(extra,))


@pytest.mark.parametrize("prefix", ["module.", "model.", "module.model."])
def test_what_wrappers_put_in_front_is_stripped(published, prefix):
    load, weights = published
    wanted = load(weights).state_dict()
    found = load({"state_dict": {prefix + name: value for name, value in weights.items()}}).state_dict()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_the_head_that_later_releases_of_smabmil_name_twice(vectors):
    weights = vectors("smabmil_early").under("w/")
    twice = {f"classifier.{kind}": weights[f"last_layer.{kind}"] for kind in ("weight", "bias")}
    model = find_model("smabmil").from_official(weights | twice)
    assert torch.equal(model.head.weight, weights["last_layer.weight"])
