"""Stage encode: from slides and grids to bags; resumes, isolates failures, and enforces the encoder's contract."""

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tiling.atomic import temporary_path
from tiling.errors import SlideError
from tiling.grid import TileSpec
from tiling.slide import Slide
from tiling.store import read_grid
from wsi_mil import encode_settings
from wsi_mil.encoders import EncodeSpec, open_encoder
from wsi_mil.encoding import encode_slides
from wsi_mil.errors import ConfigError
from wsi_mil.stages import encode as stage
from wsi_mil.stages.encode import encode
from wsi_mil.stages.tile import tile
from wsi_mil.store import BagStore, check_one_contract, read_bag_header, read_failed

SPEC = EncodeSpec(batch_size=8, readers=2)


@pytest.fixture(scope="module")
def cohort(tmp_path_factory, make_pyramid, tissue_rgb) -> tuple[Path, Path]:
    """Three slides in two folders, tiled at 128 px."""
    root = tmp_path_factory.mktemp("cohort")
    for i, name in enumerate(("a/S01.block1", "a/S01.block2", "b/plain")):
        make_pyramid(root / "slides" / f"{name}.tif", tissue_rgb(900, 700, seed=i))
    summary = tile(root / "slides", out=root, tiles=TileSpec(tile_px=128), workers=1)
    assert summary.exit_code == 0
    return root / "slides", summary.out


@pytest.fixture(scope="module")
def encoded(cohort, tmp_path_factory):
    slides, grids = cohort
    return encode(slides, grids=grids, out=tmp_path_factory.mktemp("bags"), encoding=SPEC)


IDS = ("a__S01.block1", "a__S01.block2", "b__plain")


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.h5"))}


def test_each_slide_becomes_a_bag_that_says_where_it_came_from(cohort, encoded):
    assert encoded.exit_code == 0
    assert encoded.done == IDS
    store = BagStore(encoded.out)
    assert store.ids() == list(IDS)
    header = store.header(IDS[0])
    assert (header.encoder, header.tile_px, header.tile_um) == ("tf_efficientnet_lite0", 128, 64.0)
    assert header.mpp == pytest.approx((0.5, 0.5))
    assert header.weights_sha256 == open_encoder().weights_sha256
    assert not header.pathology
    assert "no crop" in header.transform
    check_one_contract([store.header(slide_id) for slide_id in IDS])
    assert any("not a pathology one" in note for note in encoded.notes)


def test_the_table_has_a_row_for_each_slide(encoded):
    table = pd.read_csv(encoded.out / "bags.csv", dtype=str, keep_default_na=False)
    assert tuple(table["slide"]) == IDS
    assert set(table["outcome"]) == {"encoded"}
    assert int(table["tiles"][0]) == len(BagStore(encoded.out).bag(IDS[0]))


def test_features_are_those_of_the_tiles_at_the_coordinates(cohort, encoded):
    import torch

    slides, grids = cohort
    bag, grid = BagStore(encoded.out).bag(IDS[1]), read_grid(grids / "grids" / f"{IDS[1]}.h5")
    with Slide(slides / "a" / "S01.block2.tif") as slide:
        tiles = np.stack([slide.read_tile(int(x), int(y), grid.plan) for x, y in bag.coords_l0])
    expected = open_encoder().encode_batch(torch.from_numpy(tiles))
    torch.testing.assert_close(bag.features, expected, rtol=2e-3, atol=1e-4)


def test_a_second_run_encodes_nothing_and_touches_nothing(cohort, encoded, monkeypatch):
    slides, grids = cohort
    before = {path: path.stat().st_mtime_ns for path in encoded.out.glob("*.h5")}
    monkeypatch.setattr(stage, "encode_slides", lambda *_, **__: pytest.fail("encoded again"))
    again = encode(slides, grids=grids, out=encoded.out.parent, encoding=SPEC)
    assert again.reused == IDS
    assert again.done == ()
    assert {path: path.stat().st_mtime_ns for path in encoded.out.glob("*.h5")} == before


def test_a_broken_run_goes_on_where_it_stopped_with_the_same_bytes(cohort, encoded, tmp_path, monkeypatch):
    slides, grids = cohort

    def stops(jobs, *args, **kwargs):
        for number, event in enumerate(encode_slides(jobs, *args, **kwargs)):
            yield event
            if number == 4:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stage, "encode_slides", stops)
        with pytest.raises(KeyboardInterrupt):
            encode(slides, grids=grids, out=tmp_path, encoding=SPEC)
    folder = tmp_path / encoded.out.name
    damaged = folder / f"{IDS[2]}.h5"
    damaged.write_bytes(b"half")
    temporary_path(folder / "x.h5", 999999999).write_bytes(b"left over")
    again = encode(slides, grids=grids, out=tmp_path, encoding=SPEC)
    assert again.exit_code == 0
    assert IDS[2] in again.done
    assert bytes_of(folder) == bytes_of(encoded.out)
    assert not list(folder.glob(".*"))


def test_bytes_do_not_depend_on_readers_or_on_which_slides_are_left(cohort, encoded, tmp_path):
    slides, grids = cohort
    folder = tmp_path / encoded.out.name
    folder.mkdir()
    shutil.copy2(encoded.out / f"{IDS[0]}.h5", folder)
    encode(slides, grids=grids, out=tmp_path, encoding=EncodeSpec(batch_size=8, readers=5))
    assert bytes_of(folder) == bytes_of(encoded.out)


def test_a_slide_that_changed_since_it_was_tiled_fails_alone(cohort, tmp_path, make_pyramid, tissue_rgb):
    slides, grids = cohort
    copy = tmp_path / "slides"
    shutil.copytree(slides, copy)
    make_pyramid(copy / "b" / "plain.tif", tissue_rgb(900, 700, seed=9))
    summary = encode(copy, grids=grids, out=tmp_path, encoding=SPEC)
    assert summary.exit_code == 3
    assert [failure.item for failure in summary.failures] == [IDS[2]]
    assert "changed since it was tiled" in summary.failures[0].reason
    assert BagStore(summary.out).ids() == list(IDS[:2])


def test_a_slide_without_a_grid_is_listed_and_stops_no_other(cohort, tmp_path):
    slides, grids = cohort
    copy = tmp_path / "grids"
    shutil.copytree(grids, copy)
    (copy / "grids" / f"{IDS[0]}.h5").write_bytes(b"damaged")
    (copy / "grids" / f"{IDS[1]}.h5").unlink()
    summary = encode(slides, grids=copy, out=tmp_path, encoding=SPEC)
    assert summary.exit_code == 3
    assert summary.done == (IDS[2],)
    assert {failure.item: failure.outcome for failure in summary.failures} == {IDS[0]: "failed", IDS[1]: "not tiled"}


def test_a_full_disk_fails_the_slides_and_leaves_nothing_half_made(cohort, tmp_path, monkeypatch):
    slides, grids = cohort

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stage, "write_bag", full)
    summary = encode(slides, grids=grids, out=tmp_path, encoding=SPEC)
    assert summary.exit_code == 1
    assert all("No space left on device" in failure.reason for failure in summary.failures)
    assert not list(summary.out.glob("*.h5"))


@pytest.fixture
def strict(monkeypatch):
    """The bundled network with a contract that these tiles break."""

    def opened(*args, **kwargs):
        from dataclasses import replace

        return replace(open_encoder(), mpp=(1.0,), tile_px=224)

    monkeypatch.setattr(encode_settings, "open_encoder", opened)


def test_a_breach_of_contract_is_refused_before_any_slide_is_opened(cohort, tmp_path, strict, monkeypatch):
    slides, grids = cohort
    monkeypatch.setattr(stage, "Slide", lambda *_, **__: pytest.fail("a slide was opened"))
    with pytest.raises(ConfigError, match="trained on tiles of 224 px"):
        encode(slides, grids=grids, out=tmp_path, encoding=SPEC)
    with pytest.raises(ConfigError, match="trained at 1"):
        encode(slides, grids=grids, out=tmp_path, encoding=EncodeSpec(accept_contract_breach=("tile_px",)))
    assert list(tmp_path.iterdir()) == []


def test_an_accepted_breach_is_written_into_every_bag(cohort, tmp_path, strict):
    slides, grids = cohort
    summary = encode(
        slides, grids=grids, out=tmp_path, encoding=EncodeSpec(batch_size=8, accept_contract_breach=("tile_px", "mpp"))
    )
    breaches = read_bag_header(summary.out / f"{IDS[0]}.h5").contract_breach
    assert len(breaches) == 2
    assert any("128 px" in breach for breach in breaches)
    assert sum("Contract breach accepted" in note for note in summary.notes) == 2


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (EncodeSpec(accept_contract_breach=("size",)), "choose from mpp, tile_px"),
        (EncodeSpec(batch_size=0), "1 or more"),
        (EncodeSpec(max_failed_tiles=2), "fraction"),
        (EncodeSpec(encoder="conch"), "not supported"),
        (EncodeSpec(weights=Path("absent.pth")), "no such weights file"),
    ],
)
def test_a_wish_that_cannot_be_met_is_refused_first(cohort, tmp_path, spec, says):
    slides, grids = cohort
    with pytest.raises(ConfigError, match=says):
        encode(slides, grids=grids, out=tmp_path, encoding=spec)


def test_nothing_is_written_into_the_slides_folder(cohort):
    slides, grids = cohort
    before = sorted(slides.rglob("*"))
    with pytest.raises(ConfigError, match="inside the slides' folder"):
        encode(slides, grids=grids, out=slides / "a", encoding=SPEC)
    assert sorted(slides.rglob("*")) == before


def test_another_precision_goes_to_another_folder(cohort, encoded, tmp_path):
    slides, grids = cohort
    other = encode(slides, grids=grids, out=tmp_path, encoding=EncodeSpec(batch_size=8, precision="bf16"))
    assert other.out.name != encoded.out.name
    assert read_bag_header(other.out / f"{IDS[0]}.h5").precision == "bf16"


def test_a_stricter_limit_on_failed_tiles_holds_for_bags_that_are_there(cohort, tmp_path, monkeypatch):
    slides, grids = cohort
    read_tile = Slide.read_tile

    def damaged(self, x_l0, y_l0, plan):
        if self.path.stem == "plain" and (x_l0, y_l0) == first:
            raise SlideError("this tile is damaged")
        return read_tile(self, x_l0, y_l0, plan)

    first = tuple(read_grid(grids / "grids" / f"{IDS[2]}.h5").coords_l0[0].tolist())
    monkeypatch.setattr(Slide, "read_tile", damaged)
    lenient = EncodeSpec(batch_size=8, readers=2, max_failed_tiles=0.5)
    done = encode(slides, grids=grids, out=tmp_path, encoding=lenient)
    assert (done.exit_code, len(read_failed(done.out / f"{IDS[2]}.h5"))) == (0, 1)
    assert encode(slides, grids=grids, out=tmp_path, encoding=lenient).reused == IDS
    strict = encode(slides, grids=grids, out=tmp_path, encoding=EncodeSpec(batch_size=8, max_failed_tiles=0.0))
    assert (strict.reused, [(f.item, f.outcome) for f in strict.failures]) == (IDS[:2], [(IDS[2], "degraded")])
    assert BagStore(strict.out).ids() == list(IDS[:2])


def test_a_slide_of_which_nothing_is_heard_is_a_failure(cohort, tmp_path, monkeypatch):
    slides, grids = cohort

    def loses_one(jobs, *args, **kwargs):
        yield from encode_slides(jobs[:-1], *args, **kwargs)

    monkeypatch.setattr(stage, "encode_slides", loses_one)
    summary = encode(slides, grids=grids, out=tmp_path, encoding=SPEC)
    assert (summary.exit_code, summary.done) == (3, IDS[:2])
    assert [(f.item, f.outcome) for f in summary.failures] == [(IDS[2], "failed")]
