"""Set attention, poolings, INS and MIDAM: every published weight is named when it is missing, nothing else is taken."""

import pytest
import torch

from wsi_mil.errors import ConfigError
from wsi_mil.lookup import find_model


def with_bias(weights, *names):
    return weights | {f"{name}.bias": torch.zeros(8) for name in names}


def blocks(v):
    found = {f"{b}.{name}": t for b in ("isab", "pma", "sab") for name, t in v.under(f"{b}.").items()}
    places = {"isab": "enc.0", "pma": "dec.0", "sab": "dec.1"}
    whole = {places[name.split(".")[0]] + name[name.index(".") :]: t for name, t in found.items()}
    return whole | {"dec.2.weight": torch.zeros(3, 8), "dec.2.bias": torch.zeros(3)}


def network(v, classes=None):
    """The block as part of a whole network, with the head of one token, or of one for each class."""
    found = {f"blocks_token_only.0.{name}": t for name, t in v.under("w.").items()} | {"cls_token": v["cls"][:1]}
    found |= {"norm.weight": torch.ones(8), "norm.bias": torch.zeros(8)}
    heads = ["head"] if classes is None else [f"head.{c}" for c in range(classes)]
    return found | {f"{h}.{p}": torch.zeros((1, 8) if p == "weight" else 1) for h in heads for p in ("weight", "bias")}


def head(weights, width):
    return weights | {"head.weight": torch.zeros(2, width), "head.bias": torch.zeros(2)}


def deeper(v):
    """The two-layer network of MIDAM with a third layer."""
    return v.under("w0.") | {"layers.0.weight": torch.zeros(4, 4), "layers.0.bias": torch.zeros(4)}


PROBABILITY = {
    f"{name}.{p}": torch.zeros((2, 5) if p == "weight" else 2)
    for name in ("fc_prob", "fc_att")
    for p in ("weight", "bias")
}
PUBLISHED = {
    "set_transformer": ("set_transformer", blocks, {"heads": 2}),
    "set_transformer_ln": ("set_transformer", blocks, {"heads": 2}),
    "ep_q4": ("efficient_probing", lambda v: head(v.under("w."), 8), {}),
    "patchconvnet_agg": ("class_attention", network, {}),
    "patchconvnet_agg_multi": ("class_attention", lambda v: network(v, classes=3), {}),
    "simpool_none": ("simpool", lambda v: head(with_bias(v.under("w."), "wq", "wk"), 8), {}),
    "adapool_brothers_mean": ("adaptive_attention", lambda v: head(v.under("w."), 8), {}),
    "instance_pooling": ("prob_attention", lambda v: PROBABILITY, {}),
    "midam_softmax": ("midam", deeper, {}),
    "midam_attention": ("midam", deeper, {}),
    "ins": ("ins", lambda v: v.under("w0."), {}),
}


@pytest.fixture(params=PUBLISHED)
def published(request, vectors):
    """What loads the weights, and the weights."""
    method, weights, settings = PUBLISHED[request.param]

    def load(tensors, **more):
        return find_model(method).from_official(tensors, **settings, **more)

    return load, weights(vectors(request.param))


def test_a_missing_weight_is_named(published):
    load, weights = published
    for missing in weights:
        if missing.startswith("encoder_k."):
            continue  # the momentum network of INS, which the model can do without
        with pytest.raises(ConfigError) as error:
            load({name: value for name, value in weights.items() if name != missing})
        assert missing in str(error.value).split("; they have")[0]


def test_a_weight_without_a_place_is_named_and_can_be_left_out(published):
    load, weights = published
    for extra in ("patch_embed.weight", "blocks_token_only.1.gamma_1", "dec.9.S"):
        with pytest.raises(ConfigError, match=extra):
            load(weights | {extra: torch.zeros(2)})
        load(weights | {extra: torch.zeros(2)}, ignore=(extra,))


@pytest.mark.parametrize("prefix", ["module.", "model.", "module.model."])
def test_what_wrappers_put_in_front_is_stripped(published, prefix):
    load, weights = published
    wanted = load(weights).state_dict()
    found = load({"state_dict": {prefix + name: value for name, value in weights.items()}}).state_dict()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
