"""What the tests of slides share."""

from collections.abc import Callable

import pytest

from tiling.grid import ReadPlan
from tiling.readers.raw_tiff import RawTiff
from tiling.slide import Slide


def _plan(slide: Slide, level: int, tile_size_l0: tuple[int, int], tile_px: int = 224) -> ReadPlan:
    return ReadPlan(
        level=level,
        level_downsample=slide.level_downsamples[level],
        tile_size_l0=tile_size_l0,
        stride_l0=tile_size_l0,
        origin_l0=(0, 0),
        grid_size=(1, 1),
        tile_px=tile_px,
        mpp_effective=(0.5, 0.5),
    )


@pytest.fixture(scope="session")
def plan_of() -> Callable[..., ReadPlan]:
    """The function that makes a plan for one slide: plan_of(slide, level, tile_size_l0, tile_px=224)."""
    return _plan


@pytest.fixture
def by_openslide(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The function that switches the fast path off for the slides that are opened after it was called."""
    return lambda: monkeypatch.setattr(RawTiff, "can_read", lambda self, level: False)
