"""The pipeline: results do not depend on how the work was spread, and one bad slide harms no other."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from tiling.errors import SlideError
from tiling.grid import ReadPlan, TileGrid, TileSpec
from tiling.slide import SlideInfo
from wsi_mil.encoders import open_encoder
from wsi_mil.encoding import Advance, EncodedSlide, Plan, encode_slides, make_plan
from wsi_mil.outcomes import Failure
from wsi_mil.reading import ReadAhead, SlideJob

PX = 32
PLAN = Plan(batch_size=8, encoders=2, readers=2)


class FakeSlide:
    """Tiles that tell slide and place; some cannot be read."""

    open_now = 0
    most_open = 0
    lock = threading.Lock()

    def __init__(self, seed: int, bad: frozenset[int] = frozenset()) -> None:
        self.seed, self.bad = seed, bad
        with FakeSlide.lock:
            FakeSlide.open_now += 1
            FakeSlide.most_open = max(FakeSlide.most_open, FakeSlide.open_now)

    def read_tile(self, x_l0, y_l0, plan):
        if x_l0 // PX in self.bad:
            raise SlideError(f"tile at ({x_l0}, {y_l0}) is damaged")
        rng = np.random.default_rng([self.seed, x_l0, y_l0])
        return rng.integers(0, 256, (plan.tile_px, plan.tile_px, 3), dtype=np.uint8)

    def close(self):
        with FakeSlide.lock:
            FakeSlide.open_now -= 1


def grid_of(slide_id: str, n: int) -> TileGrid:
    size = (PX * n, PX)
    info = SlideInfo(
        slide_id=slide_id,
        fingerprint=slide_id,
        vendor="fake",
        size_l0=size,
        mpp=(0.5, 0.5),
        mpp_source="user",
        bounds_l0=(0, 0, *size),
        level_downsamples=((1.0, 1.0),),
    )
    plan = ReadPlan(
        level=0,
        level_downsample=(1.0, 1.0),
        tile_size_l0=(PX, PX),
        stride_l0=(PX, PX),
        origin_l0=(0, 0),
        grid_size=(n, 1),
        tile_px=PX,
        mpp_effective=(0.5, 0.5),
    )
    grid_xy = np.stack([np.arange(n), np.zeros(n, np.int64)], axis=1)
    ones = np.ones(n, np.float32)
    return TileGrid(slide=info, spec=TileSpec(tile_px=PX), plan=plan, grid_xy=grid_xy, tissue_fraction=ones)


def job(number: int, n: int, bad=frozenset(), open_slide=None) -> SlideJob:
    slide_id = f"s{number}"
    opener = open_slide or (lambda grid: FakeSlide(number, frozenset(bad)))
    return SlideJob(slide_id=slide_id, n=n, grid=lambda: grid_of(slide_id, n), open_slide=opener)


@pytest.fixture(scope="module")
def encoder():
    return open_encoder()


def run(jobs, encoder, plan=PLAN):
    found, failures, tiles = {}, {}, 0
    for event in encode_slides(jobs, encoder, plan=plan, tile_px=PX):
        if isinstance(event, EncodedSlide):
            found[event.slide_id] = event
        elif isinstance(event, Failure):
            failures[event.item] = event
        else:
            assert isinstance(event, Advance)
            tiles += event.tiles
    assert tiles == sum(item.n for item in jobs)
    return found, failures


SIZES = (5, 21, 1, 8, 13)


@pytest.fixture(scope="module")
def expected(encoder):
    """Each slide alone, one thread each: as plain as it gets."""
    plan = Plan(batch_size=8, encoders=1, readers=1)
    return {i: run([job(i, n)], encoder, plan)[0][f"s{i}"].features for i, n in enumerate(SIZES)}


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 2, 0, 3, 1), (3, 1)])
@pytest.mark.parametrize(("encoders", "readers"), [(1, 1), (2, 3), (3, 1)])
def test_features_are_byte_equal_whatever_the_order_the_threads_and_the_neighbours(
    encoder, expected, order, encoders, readers
):
    plan = Plan(batch_size=8, encoders=encoders, readers=readers)
    found, failures = run([job(i, SIZES[i]) for i in order], encoder, plan)
    assert not failures
    for i in order:
        assert found[f"s{i}"].features.tobytes() == expected[i].tobytes()
        assert found[f"s{i}"].rows.tolist() == list(range(SIZES[i]))


def test_features_are_those_of_the_encoder_and_rows_are_not_mixed_up(encoder, expected):
    slide, plan = FakeSlide(1), grid_of("s1", 21).plan
    tiles = torch.from_numpy(np.stack([slide.read_tile(x * PX, 0, plan) for x in range(21)]))
    slide.close()
    direct = encoder.encode_batch(tiles).numpy()
    np.testing.assert_allclose(expected[1].astype(np.float32), direct, rtol=1e-3, atol=1e-4)
    assert len(np.unique(expected[1], axis=0)) == 21


@pytest.mark.parametrize("batch_size", [1, 3, 33])
def test_another_batch_size_changes_features_by_no_more_than_rounding(encoder, expected, batch_size):
    found, _ = run([job(1, 21)], encoder, replace(PLAN, batch_size=batch_size))
    np.testing.assert_allclose(
        found["s1"].features.astype(np.float32), expected[1].astype(np.float32), rtol=1e-3, atol=1e-5
    )


def test_the_last_batch_is_filled_up_and_cut(encoder):
    found, _ = run([job(0, 33)], encoder, replace(PLAN, batch_size=32))
    assert found["s0"].features.shape == (33, 1280)
    assert found["s0"].features.dtype == np.float16


def test_a_tile_that_cannot_be_read_is_no_row(encoder, expected):
    found, failures = run([job(1, 21, bad={4, 9})], encoder, replace(PLAN, max_failed_tiles=0.1))
    assert not failures
    kept = [row for row in range(21) if row not in (4, 9)]
    assert found["s1"].rows.tolist() == kept
    assert found["s1"].features.tobytes() == expected[1][kept].tobytes()
    assert [tile.coords_l0 for tile in found["s1"].failed] == [(4 * PX, 0), (9 * PX, 0)]
    assert "damaged" in found["s1"].failed[0].reason


def test_too_many_of_them_degrade_the_slide_and_no_other(encoder, expected):
    found, failures = run([job(0, 5), job(1, 21, bad={4, 9}), job(4, 13)], encoder)
    assert set(found) == {"s0", "s4"}
    assert failures["s1"].outcome == "degraded"
    assert "tile at (128, 0) is damaged" in failures["s1"].reason
    assert found["s4"].features.tobytes() == expected[4].tobytes()


@pytest.mark.parametrize("error", [SlideError("gone"), OSError("share is away"), ZeroDivisionError("a bug")])
def test_a_slide_that_does_not_open_stops_no_other(encoder, expected, error):
    def opener(grid):
        raise error

    found, failures = run([job(0, 5), job(1, 21, open_slide=opener), job(4, 13)], encoder)
    assert set(found) == {"s0", "s4"}
    assert str(error) in failures["s1"].reason
    assert found["s0"].features.tobytes() == expected[0].tobytes()


def test_features_beyond_fp16_fail_the_slide_and_name_the_tile(encoder):
    class Huge(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(1.0))

        def forward(self, images):
            return images.mean(dim=(2, 3)) * 1e9 * self.scale

    huge = replace(encoder, module=Huge(), dim=3)
    found, failures = run([job(0, 5)], huge)
    assert not found
    assert "not finite in fp16, the first at level-0 position (0, 0)" in failures["s0"].reason


def test_what_the_encoder_raises_ends_the_run_and_closes_everything(encoder):
    class Broken(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, images):
            raise RuntimeError("device lost")

    before, threads = threading.active_count(), torch.get_num_threads()
    with pytest.raises(RuntimeError, match="device lost"):
        run([job(0, 50), job(1, 50)], replace(encoder, module=Broken()))
    assert FakeSlide.open_now == 0
    assert threading.active_count() == before
    assert torch.get_num_threads() == threads


def test_an_interrupted_run_closes_everything_and_what_was_whole_is_right(encoder, expected):
    before = threading.active_count()
    events = encode_slides([job(i, n) for i, n in enumerate(SIZES)], encoder, plan=PLAN, tile_px=PX)
    first = next(event for event in events if isinstance(event, EncodedSlide))
    events.close()
    assert threading.active_count() == before
    assert FakeSlide.open_now == 0
    assert first.features.tobytes() == expected[int(first.slide_id[1:])].tobytes()


def test_a_cohort_of_many_slides_holds_few_of_them_open(encoder):
    FakeSlide.most_open = 0
    run([job(i, 4) for i in range(40)], encoder)
    assert FakeSlide.most_open <= PLAN.depth * PLAN.batch_size // 4 + 1
    assert FakeSlide.open_now == 0


def test_readers_run_ahead_of_the_encoder_across_slides_and_no_further_than_the_buffers():
    seen: set[str] = set()

    def opener(grid):
        seen.add(grid.slide.slide_id)
        return FakeSlide(0)

    jobs = [job(i, 4, open_slide=opener) for i in range(50)]
    with ReadAhead(jobs, tile_px=PX, batch_size=8, readers=2, depth=3) as ahead:
        while ahead.waiting < 3:
            pass
        assert len(seen) == 6  # three batches of two slides each, nothing taken yet
        batch = ahead.take()
        assert batch is not None
        assert batch.tiles.shape == (8, PX, PX, 3)
        assert batch.tiles.dtype == torch.uint8
    assert FakeSlide.open_now == 0


def test_the_plan_takes_what_is_given_and_finds_the_rest(encoder):
    plan = make_plan(encoder, batch_size=None, readers=None, tile_px=PX, precision="fp32")
    assert plan.batch_size == 16
    assert plan.encoders >= 1
    assert plan.readers >= 2
    assert make_plan(encoder, batch_size=5, readers=7, tile_px=PX, precision="bf16").readers == 7
    assert PLAN.buffer_bytes(PX) == 6 * 8 * PX * PX * 3


def test_what_stops_the_feeder_ends_the_run_and_is_told(encoder):
    class Jobs(list):
        def __iter__(self):
            yield self[0]
            raise ValueError("no next job")

    before = threading.active_count()
    with pytest.raises(ValueError, match="no next job"):
        list(encode_slides(Jobs([job(0, 20), job(1, 20)]), encoder, plan=PLAN, tile_px=PX))
    assert threading.active_count() == before
    assert FakeSlide.open_now == 0
