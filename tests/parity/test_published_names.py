"""Each published weight is needed, is named when it is missing, and nothing else is taken."""

import pytest
import torch

from wsi_mil.errors import ConfigError
from wsi_mil.lookup import find_model

FILES = {
    "abmil_gated_amlab": ("abmil", "w/"),
    "abmil_plain_amlab": ("abmil", "w/"),
    "abmil_gated_feat": ("abmil", "w/"),
    "aem_mha": ("abmil_mha", "w/"),
    "acmil_ga_eval": ("acmil", "w/"),
    "acmil_mha_eval": ("acmil", "w/"),
    "clam_sb": ("clam_sb", "w_c2/"),
    "clam_mb": ("clam_mb", "w_c3/"),
    "dsmil": ("dsmil", "t3_w/"),
    "aem_dsmil": ("dsmil", "w/"),
    "transmil": ("transmil", "w/"),
    "mhim_v1": ("mhim", "stu_w/"),
    "mhim_v2": ("mhim", "stu_w/"),
    "focusmil_derivative_arch": ("focusmil", "w_"),
}


@pytest.fixture(params=FILES)
def published(request, vectors):
    """What loads the weights, and the weights."""
    method, prefix = FILES[request.param]
    return find_model(method).from_official, vectors(request.param).under(prefix)


def test_a_missing_weight_is_named(published):
    load, weights = published
    for missing in weights:
        with pytest.raises(ConfigError) as error:
            load({name: value for name, value in weights.items() if name != missing})
        assert f"no {missing!r}" in str(error.value)


def test_a_weight_without_a_place_is_named_and_can_be_left_out(published):
    load, weights = published
    with pytest.raises(ConfigError, match=r"extra\.weight"):
        load(weights | {"extra.weight": torch.zeros(2)})
    load(weights | {"extra.weight": torch.zeros(2)}, ignore=("extra.*",))


def test_a_weight_of_another_form_is_refused(published):
    load, weights = published
    for name in weights.keys() - {"merge.global_q"}:  # which nothing reads
        with pytest.raises(ConfigError):
            load(weights | {name: torch.cat([weights[name], weights[name][:1]])})
