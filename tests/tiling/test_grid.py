"""The wish is checked at the door, and its digest forgets no field."""

from dataclasses import fields, replace
from typing import Any

import pytest

from tiling.errors import UserError
from tiling.grid import TileSpec, TissueSpec

OTHER: dict[str, Any] = {
    "mpp": 0.6,
    "tile_px": 256,
    "stride_px": 100,
    "min_tissue": 0.3,
    "edge": "pad",
    "mpp_tolerance": 0.1,
    "allow_upsampling": True,
    "tissue": TissueSpec(mpp=10.0),
}
OTHER_TISSUE: dict[str, Any] = {"mpp": 4.0, "min_area_um2": 1.0, "max_hole_um2": 2.0, "exclude_pen": False}


@pytest.mark.parametrize("name", [field.name for field in fields(TileSpec)])
def test_every_field_changes_the_digest(name: str) -> None:
    assert replace(TileSpec(), **{name: OTHER[name]}).digest() != TileSpec().digest()


@pytest.mark.parametrize("name", [field.name for field in fields(TissueSpec)])
def test_every_field_of_the_tissue_changes_the_digest(name: str) -> None:
    changed = TileSpec(tissue=replace(TissueSpec(), **{name: OTHER_TISSUE[name]}))
    assert changed.digest() != TileSpec().digest()


def test_the_same_wish_in_other_words_has_the_same_digest() -> None:
    assert TileSpec(tile_px=200).digest() == TileSpec(tile_px=200, stride_px=200).digest()


@pytest.mark.parametrize(
    "wrong",
    [
        {"mpp": 0.0},
        {"mpp": float("nan")},
        {"tile_px": 0},
        {"stride_px": 0},
        {"min_tissue": 1.5},
        {"min_tissue": -0.1},
        {"edge": "wrap"},
        {"mpp_tolerance": 0.7},
    ],
)
def test_an_impossible_wish_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(wrong))} is .* it must be"):
        TileSpec(**wrong)


@pytest.mark.parametrize("wrong", [{"mpp": 0.0}, {"min_area_um2": -1.0}, {"max_hole_um2": -1.0}])
def test_an_impossible_wish_about_tissue_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"tissue.{next(iter(wrong))} is .* it must be"):
        TissueSpec(**wrong)
