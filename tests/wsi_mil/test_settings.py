"""Settings from files: types, ranges, and the words of a refusal."""

from typing import Literal

import numpy as np
import pytest

from wsi_mil.errors import ConfigError
from wsi_mil.lookup import find_model, find_regulariser
from wsi_mil.models._base import BagObjective
from wsi_mil.settings import Amount, Count, Finite, Positive, Rate, Share, Weight, typed
from wsi_mil.tasks import class_task


@pytest.mark.parametrize(
    ("value", "wanted", "result"),
    [
        ("1e-4", float, 1e-4),
        (3, float, 3.0),
        (3, int, 3),
        (None, int | None, None),
        (5, int | None, 5),
        ([1, 2], tuple[int, ...], (1, 2)),
        ("cosine", Literal["constant", "cosine"], "cosine"),
    ],
)
def test_a_setting_from_a_file_gets_its_declared_type(value, wanted, result):
    def method(setting: wanted):
        return setting

    assert typed(method, {"setting": value}, where="x") == {"setting": result}


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (True, int),
        (1, bool),
        ("many", float),
        ("x", int | None),
        (1.5, int),
        ("1", int),
        (0, Count),
        (-1, Amount),
        (1.0, Rate),
        (-0.1, Rate),
        (1.1, Share),
        (-1e-9, Weight),
        (0, Positive),
        (float("nan"), Weight),
        ("inf", Finite),
        (0, Count | None),
        ([4, 0], tuple[Count, ...]),
        ([0.1], tuple[float, float]),
    ],
)
def test_a_setting_of_another_type_or_out_of_its_range_is_refused(value, wanted):
    def method(setting: wanted):
        return setting

    with pytest.raises(ConfigError, match="x: setting is"):
        typed(method, {"setting": value}, where="x")


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(1, Count), (0, Amount), (0.0, Rate), (1, Share), (0, Weight), ("1e-9", Positive), (-3, Finite)],
)
def test_the_ends_of_a_range_are_allowed(value, wanted):
    def method(setting: wanted):
        return setting

    assert typed(method, {"setting": value}, where="x") == {"setting": float(value) if wanted is not Count else value}


@pytest.mark.parametrize(
    ("name", "settings"),
    [("abmil", {"dropout": 1.5}), ("acmil", {"mask_drop": -0.1}), ("focusmil", {"hidden": (8, 0)})],
)
def test_a_method_built_in_python_is_held_to_its_ranges_too(name, settings):
    with pytest.raises(ConfigError, match=rf"{next(iter(settings))} is .*it must be"):
        find_model(name)(in_dim=8, n_outputs=2, **settings)


def test_numbers_of_numpy_are_numbers():
    assert typed(ranged, {"width": np.int64(3), "rate": np.float32(0.5)}, where="x") == {"width": 3, "rate": 0.5}
    with pytest.raises(ConfigError, match="dropout is"):
        find_model("abmil")(in_dim=8, n_outputs=2, dropout=np.float32(1.5))


def test_types_for_type_checkers_alone_leave_the_others_in_force():
    with pytest.raises(ConfigError, match=r"rate is 1\.5"):
        typed(ranged, {"rate": 1.5}, where="x")
    assert typed(ranged, {"other": 1}, where="x") == {"other": 1}


def ranged(rate: Rate = 0.0, width: Count = 1, other: "Unknown" = 0):  # noqa: F821
    return rate, width, other


def test_a_plug_in_built_in_python_is_held_to_its_ranges_too():
    objective = BagObjective(class_task("label", ("no", "yes")).criterion(2))
    with pytest.raises(ConfigError, match="weight is -3"):
        find_regulariser("aem")(objective, weight=-3)


def test_a_refusal_says_the_range():
    def method(rate: Rate = 0.0, width: Count | None = None):
        return rate, width

    with pytest.raises(ConfigError, match=r"rate is 1.5; it must be float, at least 0 and below 1\."):
        typed(method, {"rate": 1.5}, where="x")
    with pytest.raises(ConfigError, match=r"width is 0; it must be None or int, at least 1\."):
        typed(method, {"width": 0}, where="x")

    def choice(mode: Literal["one", "two"] = "one"):
        return mode

    with pytest.raises(ConfigError, match="mode is 'three'; it must be one of 'one', 'two'"):
        typed(choice, {"mode": "three"}, where="x")
    with pytest.raises(ConfigError, match=r"there is no setting 'rat'.*Did you mean 'rate'"):
        typed(method, {"rat": 1}, where="x")
