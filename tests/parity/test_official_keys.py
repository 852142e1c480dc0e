"""Every published weight is needed, is named when it is missing, and nothing else is taken."""

import pytest
import torch

from wsi_mil.errors import ConfigError
from wsi_mil.lookup import find_model
from wsi_mil.models._mammoth import MammothLayer


def under(prefix):
    return lambda v: v.under(prefix)


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
    "abmil_gated_amlab": ("abmil", under("w/"), {}),
    "abmil_plain_amlab": ("abmil", under("w/"), {}),
    "abmil_gated_feat": ("abmil", under("w/"), {}),
    "aem_mha": ("abmil_mha", under("w/"), {}),
    "acmil_ga_eval": ("acmil", under("w/"), {}),
    "acmil_mha_eval": ("acmil", under("w/"), {}),
    "clam_sb": ("clam_sb", under("w_c2/"), {}),
    "clam_mb": ("clam_mb", under("w_c3/"), {}),
    "dsmil": ("dsmil", under("t3_w/"), {}),
    "aem_dsmil": ("dsmil", under("w/"), {}),
    "transmil": ("transmil", under("w/"), {}),
    "mhim_v1": ("mhim", under("stu_w/"), {}),
    "mhim_v2": ("mhim", under("stu_w/"), {}),
    "focusmil_derivative_arch": ("focusmil", under("w_"), {}),
    "asmil": ("asmil", under("w/"), {}),
    "mammoth_slots": ("mammoth", under("w/"), {}),
    "mammoth_rms": ("mammoth", under("w/"), {}),
    "smabmil_early": ("smabmil", under("w/"), {}),
    "smabmil_mid_sn": ("smabmil", under("w/"), {"where": "mid", "alpha": 0.5}),
    "psa": ("psa", under("w/"), {}),
    "psa_exponential": ("psa", under("w/"), {"decay": "exponential"}),
    "abmilx": ("abmilx", under("w/"), {}),
    "abmilx_ln_ffn_bias": ("abmilx", under("w/"), {}),
    "abmilx_mhla_only": ("abmilx", under("w/"), {}),
    "rrt": ("rrt", under("w/"), {"cross_heads": 4}),
    "rrt_mlp_shortcut": ("rrt", under("w/"), {"cross_heads": 4}),
    "ilra": ("ilra", under("w/"), {"heads": 4}),
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
    "ins": ("ins", under("w0."), {}),
}
"""File of vectors -> the method, how its weights come out of the file, and what the shapes do not tell."""
CAN_BE_MISSING = ("encoder_k.", "dimreduction.bn.")
"""The momentum network of INS, and a layer that ASMIL's published code never calls."""
ROWS_THAT_NOTHING_ELSE_TELLS = {
    *("merge.global_q", "norm.beta", "slot_norm.beta"),  # not read: told twice, or buffers of zeros
    *("classifier.weight", "online_encoder.cr_msa.attn.phi.2.weight"),  # layers without a bias, of any number of rows
}
EXTRA = (
    *("encoder.weight", "patch_embed.weight", "blocks_token_only.1.gamma_1", "dec.9.S"),
    *("blocks.9.norm1.weight", "classifier.9.fc.weight"),
)


@pytest.fixture(params=PUBLISHED)
def published(request, vectors):
    """What loads the weights, and the weights."""
    method, weights, settings = PUBLISHED[request.param]
    read = MammothLayer.from_official if method == "mammoth" else find_model(method).from_official
    return (lambda tensors, **more: read(tensors, **settings, **more)), weights(vectors(request.param))


def test_a_missing_weight_is_named(published):
    load, weights = published
    for missing in weights:
        if missing.startswith(CAN_BE_MISSING):
            continue
        with pytest.raises(ConfigError) as error:
            load({name: value for name, value in weights.items() if name != missing})
        assert missing in str(error.value).split("; they have")[0]


def test_a_weight_without_a_place_is_named_and_can_be_left_out(published):
    load, weights = published
    for extra in EXTRA:
        with pytest.raises(ConfigError, match=extra):
            load(weights | {extra: torch.zeros(2)})
        load(weights | {extra: torch.zeros(2)}, ignore=(extra,))


def test_a_weight_of_another_form_is_refused(published):
    load, weights = published
    for name, values in weights.items():
        if name.startswith(CAN_BE_MISSING) or name in ROWS_THAT_NOTHING_ELSE_TELLS or values.ndim == 0:
            continue
        axis = -1 if values.ndim == 3 and len(values) == 1 else 0  # a first axis that is that of bags
        with pytest.raises(ConfigError):
            load(weights | {name: torch.cat([values, values.narrow(axis, 0, 1)], dim=axis)})


@pytest.mark.parametrize("prefix", ["module.", "model.", "module.model.", "model.module.", "spatial_mil."])
def test_what_wrappers_put_in_front_is_stripped(published, prefix):
    load, weights = published
    wanted = load(weights).state_dict()
    found = load({"state_dict": {prefix + name: value for name, value in weights.items()}}).state_dict()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def loose(**beside):
    """Weights of a mean pooling as a wrapper keeps them, and what stands beside."""
    return {"state_dict": {"model.W": torch.ones(2, 3), "model.b": torch.zeros(2)} | beside}


def test_what_stands_beside_the_model_can_be_left_out():
    read = find_model("mean_pool").from_official
    beside = {"loss.weight": torch.ones(2), "model.aux.weight": torch.ones(2)}
    with pytest.raises(ConfigError, match=r"loss\.weight"):
        read(loose(**beside))
    for ignore in (("loss.*", "aux.*"), ("loss.weight", "model.aux.*")):
        assert torch.equal(read(loose(**beside), ignore=ignore).head.weight, torch.ones(2, 3))
    with pytest.raises(ConfigError, match="aux"):
        read(loose(**beside), ignore=("loss.*",))


def test_what_is_no_tensor_is_named_with_what_is_expected():
    read = find_model("mean_pool").from_official
    weights = loose()["state_dict"]
    with pytest.raises(ConfigError, match=r"'state' holds a dict.*'model' or 'state_dict'"):
        read({"state": weights})
    with pytest.raises(ConfigError, match="'config' holds a str"):
        read(weights | {"config": "a.yaml"})
    read(weights | {"config": "a.yaml"}, ignore=("config",))
    with pytest.raises(ConfigError, match="empty"):
        read({"state_dict": {}})


@pytest.mark.parametrize(
    ("given", "kept"), [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.float16, torch.float32)]
)
def test_only_double_precision_is_kept(given, kept):
    weights = {"W": torch.rand(2, 3).to(given), "b": torch.zeros(2)}
    model = find_model("mean_pool").from_official(weights)
    assert model.head.weight.dtype == model.head.bias.dtype == kept
    assert torch.equal(model.head.weight, weights["W"].to(kept))
