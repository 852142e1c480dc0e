from pathlib import Path

import pytest

from tiling.errors import MissingPixelSize, SlideError
from tiling.readers.header import SlideHeader, choose_mpp, decide


def header(**facts) -> SlideHeader:
    known = {
        "slide_id": "s",
        "path": Path("s.svs"),
        "vendor": "aperio",
        "size_l0": (1000, 800),
        "level_sizes": ((1000, 800),),
        "level_downsamples": ((1.0, 1.0),),
        "mpp_metadata": None,
        "mpp_tags": None,
        "objective_power": None,
        "bounds_l0": (0, 0, 1000, 800),
        "icc_profile": False,
        "fingerprint": "f",
        "file_tile_size": None,
    }
    return SlideHeader(**(known | facts))


def test_the_cohort_goes_before_metadata_before_tags_before_the_user():
    everything = header(mpp_metadata=(0.25, 0.25), mpp_tags=(0.26, 0.26))
    assert choose_mpp(everything, cohort_mpp=0.24, default_mpp=1.0).source == "cohort"
    assert choose_mpp(everything, default_mpp=1.0).mpp == (0.25, 0.25)
    assert choose_mpp(header(mpp_tags=(0.26, 0.26)), default_mpp=1.0).source == "tags"
    assert choose_mpp(header(), default_mpp=1.0).mpp == (1.0, 1.0)
    assert choose_mpp(header(), default_mpp=1.0).source == "user"


def test_both_axes_are_kept():
    assert choose_mpp(header(mpp_metadata=(0.25, 0.5))).mpp == (0.25, 0.5)
    assert choose_mpp(header(), cohort_mpp=(0.25, 0.5)).mpp == (0.25, 0.5)


@pytest.mark.parametrize(("mpp", "flagged"), [(0.25, False), (0.261, False), (0.27, True), (0.23, True)])
def test_metadata_more_than_five_percent_off_is_flagged(mpp, flagged):
    warnings = choose_mpp(header(mpp_metadata=(0.25, 0.25)), cohort_mpp=mpp).warnings
    assert bool(warnings) == flagged
    assert all("0.25" in warning and f"{mpp}" in warning and "metadata" in warning for warning in warnings)


def test_one_axis_that_disagrees_is_enough():
    assert choose_mpp(header(mpp_metadata=(0.25, 0.25), mpp_tags=(0.25, 0.5))).warnings


@pytest.mark.parametrize(("mpp", "power", "flagged"), [(0.25, 40, False), (0.3, 40, False), (0.5, 40, True)])
def test_an_objective_more_than_a_quarter_off_is_flagged(mpp, power, flagged):
    warnings = choose_mpp(header(mpp_metadata=(mpp, mpp), objective_power=power)).warnings
    assert bool(warnings) == flagged
    assert all(f"{power}x" in warning for warning in warnings)


def test_no_source_at_all_names_every_cure():
    with pytest.raises(MissingPixelSize, match=r"s\.svs.*slide_mpp.*fixes\.csv.*--slide-mpp"):
        choose_mpp(header())


@pytest.mark.parametrize("mpp", [0.0, -0.5, float("nan"), float("inf")])
def test_a_given_number_that_is_no_pixel_size_is_refused(mpp):
    with pytest.raises(SlideError, match="positive"):
        choose_mpp(header(mpp_metadata=(0.25, 0.25)), cohort_mpp=mpp)


def test_the_kept_record_has_the_warnings_of_header_and_decision():
    facts = header(mpp_metadata=(0.5, 0.5), objective_power=40.0, warnings=("grey",))
    info = decide(facts, choose_mpp(facts))
    assert info.warnings[0] == "grey"
    assert "40x" in info.warnings[1]
    assert (info.mpp, info.mpp_source) == ((0.5, 0.5), "metadata")
