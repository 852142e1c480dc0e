"""The stage: every slide has an outcome, nothing done is lost, and the files do not depend on how one got there."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pandas as pd
import pytest
import yaml

from tiling.grid import TileSpec
from tiling.store import grid_is_complete, read_grid
from wsi_mil.errors import ConfigError
from wsi_mil.outcomes import Summary
from wsi_mil.stages import tile as stage
from wsi_mil.stages.tile import tile
from wsi_mil.table.records import CohortSpec

SPEC = TileSpec(tile_px=128)
GOOD = ("a", "b", "c")


@pytest.fixture(scope="module")
def slides(
    tmp_path_factory: pytest.TempPathFactory, make_pyramid: Callable[..., Path], tissue_rgb: Callable[..., np.ndarray]
) -> Path:
    """Three good slides, and one each that is blank, tiny, damaged and without pixel size."""
    root = tmp_path_factory.mktemp("slides")
    for seed, name in enumerate(GOOD):
        make_pyramid(root / f"{name}.tif", tissue_rgb(900, 700, seed=seed))
    make_pyramid(root / "blank.tif", np.full((512, 512, 3), 243, np.uint8))
    make_pyramid(root / "tiny.tif", tissue_rgb(100, 80), levels=(1,))
    make_pyramid(root / "unsized.tif", tissue_rgb(600, 600), mpp=None)
    (root / "damaged.tif").write_bytes(b"II*\0" + bytes(100))
    return root


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def run(slides: Path, out: Path, *, workers: int = 1, tiles: TileSpec = SPEC, **options: object) -> Summary:
    return tile(slides, out=out, tiles=tiles, workers=workers, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def undisturbed(slides: Path, tmp_path_factory: pytest.TempPathFactory) -> Summary:
    return run(slides, tmp_path_factory.mktemp("undisturbed"))


def table(summary: Summary) -> pd.DataFrame:
    return pd.read_csv(summary.out / "tiles.csv", dtype=str, keep_default_na=False, index_col="slide")


def test_every_slide_has_an_outcome(undisturbed: Summary) -> None:
    outcomes = {failure.item: failure.outcome for failure in undisturbed.failures}
    assert undisturbed.done == GOOD
    assert outcomes == {
        "blank": "no tissue",
        "damaged": "failed",
        "tiny": "smaller than a tile",
        "unsized": "no pixel size",
    }
    assert undisturbed.exit_code == 3
    assert table(undisturbed)["outcome"].to_dict() == {**dict.fromkeys(GOOD, "tiled"), **outcomes}
    assert table(undisturbed).index.tolist() == sorted([*GOOD, *outcomes])


def test_the_folder_holds_what_the_next_stage_needs(undisturbed: Summary) -> None:
    out = undisturbed.out
    assert out.name == f"tiles_0.5mpp_128px_{SPEC.digest()}"
    assert sorted(p.name for p in (out / "grids").iterdir()) == [f"{name}.h5" for name in GOOD]
    assert sorted(p.name for p in (out / "qc").iterdir()) == ["a.jpg", "b.jpg", "blank.jpg", "c.jpg"]
    assert cv2.imread(str(out / "contact_sheet.jpg")).shape[1] > 600
    saved = yaml.safe_load((out / "tile_spec.yaml").read_text())
    assert (saved["digest"], saved["tile_px"], saved["tissue"]["mpp"]) == (SPEC.digest(), 128, 8.0)


def test_the_table_agrees_with_the_grids(undisturbed: Summary) -> None:
    for name in GOOD:
        grid, row = read_grid(undisturbed.out / "grids" / f"{name}.h5"), table(undisturbed).loc[name]
        assert int(row["tiles"]) == len(grid) > 5
        assert (float(row["mpp_x"]), row["mpp_source"], row["level"]) == (grid.slide.mpp[0], "tags", "0")
        assert row["tile_size_l0"] == "128x128"
        assert float(row["tissue_mm2"]) == pytest.approx(grid.tissue_mm2, abs=1e-4)


def test_reasons_say_the_cure(undisturbed: Summary) -> None:
    reasons = table(undisturbed)["reason"]
    assert "slide_mpp" in reasons["unsized"]
    assert "edge=pad" in reasons["tiny"]
    assert "mask" in reasons["blank"]
    assert "damaged.tif" in reasons["damaged"]
    assert (reasons[list(GOOD)] == "").all()


def test_the_bytes_do_not_depend_on_the_number_of_workers(undisturbed: Summary, slides: Path, tmp_path: Path) -> None:
    parallel = run(slides, tmp_path, workers=3)
    assert contents(parallel.out) == contents(undisturbed.out)
    assert parallel == replace(undisturbed, out=parallel.out, notes=parallel.notes)


def test_a_second_run_touches_no_grid_and_gives_the_same_table(slides: Path, tmp_path: Path) -> None:
    first = run(slides, tmp_path)
    before, times = contents(first.out), {p: p.stat().st_mtime_ns for p in first.out.glob("[gq]*/[abc].*")}
    second = run(slides, tmp_path)
    assert (second.done, second.reused) == ((), GOOD)
    assert {p: p.stat().st_mtime_ns for p in times} == times
    assert contents(second.out) == before


def test_what_is_missing_or_damaged_is_made_again_and_the_rest_is_left(slides: Path, tmp_path: Path) -> None:
    first = run(slides, tmp_path)
    before = contents(first.out)
    grid_a, grid_b = first.out / "grids/a.h5", first.out / "grids/b.h5"
    grid_a.write_bytes(grid_a.read_bytes()[:-500])
    (first.out / "qc/b.jpg").unlink()
    (first.out / "contact_sheet.jpg").unlink()
    kept = grid_b.stat().st_mtime_ns
    second = run(slides, tmp_path)
    assert (second.done, second.reused) == (("a",), ("b", "c"))
    assert grid_b.stat().st_mtime_ns == kept
    assert contents(second.out) == before


def test_a_changed_setting_gets_its_own_folder(undisturbed: Summary, slides: Path, tmp_path: Path) -> None:
    other = run(slides, tmp_path, tiles=replace(SPEC, min_tissue=0.5))
    assert other.out.name != undisturbed.out.name


def test_a_changed_pixel_size_or_mask_makes_a_new_grid(slides: Path, tmp_path: Path) -> None:
    cohort = tmp_path / "cohort.csv"
    cohort.write_text("slide,patient\na,1\n")
    assert run(slides, tmp_path, table=cohort).done == ("a",)
    cohort.write_text("slide,patient,slide_mpp\na,1,0.25\n")
    halved = run(slides, tmp_path, table=cohort)
    assert halved.done == ("a",)
    assert read_grid(halved.out / "grids/a.h5").plan.tile_size_l0 == (256, 256)
    mask = np.zeros((70, 90), np.uint8)
    mask[:, :45] = 1
    (tmp_path / "left.png").write_bytes(cv2.imencode(".png", mask)[1].tobytes())
    cohort.write_text(f"slide,patient,mask\na,1,{tmp_path / 'left.png'}\n")
    masked = run(slides, tmp_path, table=cohort)
    assert masked.done == ("a",)
    assert read_grid(masked.out / "grids/a.h5").grid_xy[:, 0].max() == 3
    assert run(slides, tmp_path, table=cohort).reused == ("a",)
    (tmp_path / "left.png").write_bytes(cv2.imencode(".png", mask[:, ::-1])[1].tobytes())
    again = run(slides, tmp_path, table=cohort)
    assert again.done == ("a",)
    assert read_grid(again.out / "grids/a.h5").grid_xy[:, 0].min() == 3


def test_a_slide_that_fails_now_leaves_no_grid_of_yesterday(slides: Path, tmp_path: Path) -> None:
    cohort = tmp_path / "cohort.csv"
    cohort.write_text("slide,patient\na,1\nb,2\n")
    run(slides, tmp_path, table=cohort)
    cohort.write_text("slide,patient,slide_mpp\na,1,4.0\nb,2,\n")
    second = run(slides, tmp_path, table=cohort)
    assert [failure.item for failure in second.failures] == ["a"]
    assert [p.name for p in (second.out / "grids").iterdir()] == ["b.h5"]


def test_slides_without_a_pixel_size_take_the_one_that_is_given(slides: Path, tmp_path: Path) -> None:
    summary = run(slides, tmp_path, cohort=CohortSpec(slide_mpp=0.5))
    assert "unsized" in summary.done
    assert table(summary).loc["unsized", "mpp_source"] == "user"
    assert table(summary).loc["a", "mpp_source"] == "tags"


def test_nothing_usable_is_exit_code_1(tmp_path: Path, make_pyramid: Callable[..., Path]) -> None:
    make_pyramid(tmp_path / "slides/blank.tif", np.full((512, 512, 3), 243, np.uint8))
    assert run(tmp_path / "slides", tmp_path / "out").exit_code == 1


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "slides").mkdir()
    with pytest.raises(ConfigError, match="no slide"):
        run(tmp_path / "slides", tmp_path / "out")


def test_results_never_go_into_the_slides_folder(slides: Path) -> None:
    before = sorted(slides.rglob("*"))
    with pytest.raises(ConfigError, match="inside the slides' folder"):
        run(slides, slides / "out")
    assert sorted(slides.rglob("*")) == before


def test_a_disk_that_is_full_fails_its_slide_and_nothing_else(
    slides: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: Summary,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write = stage.write_grid

    def full(path: Path, grid: object) -> None:
        if path.name == "b.h5":
            raise OSError(28, "No space left on device")
        write(path, grid)  # type: ignore[arg-type]

    monkeypatch.setattr(stage, "write_grid", full)
    summary = run(slides, tmp_path)
    assert summary.done == ("a", "c")
    assert "Traceback" not in caplog.text  # a full disk is no fault of the program
    assert "No space left" in next(f.reason for f in summary.failures if f.item == "b")
    monkeypatch.undo()
    assert run(slides, tmp_path).done == ("b",)
    assert contents(summary.out) == contents(undisturbed.out)


def kill_on_b(job: "stage._Job") -> "stage._Result":
    if job.source.slide_id == "b":
        os.kill(os.getpid(), signal.SIGKILL)
    return stage._tile_one(job)


def test_a_killed_worker_costs_its_own_slide(slides: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # spawned processes find this file by it
    run_in_processes = stage.run_in_processes
    monkeypatch.setattr(stage, "run_in_processes", lambda _, jobs, **rest: run_in_processes(kill_on_b, jobs, **rest))
    summary = run(slides, tmp_path, workers=2)
    # A slide whose grid was written just before its pool broke is found again as finished work.
    assert sorted((*summary.done, *summary.reused)) == ["a", "c"]
    assert "was killed" in next(failure.reason for failure in summary.failures if failure.item == "b")
    monkeypatch.undo()
    assert run(slides, tmp_path, workers=2).done == ("b",)


def test_ctrl_c_leaves_whole_files_only(slides: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(jobs: list["stage._Job"], workers: int) -> Iterator["stage._Result"]:
        yield stage._tile_one(jobs[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(stage, "_results", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(slides, tmp_path)
    folder = tmp_path / f"tiles_0.5mpp_128px_{SPEC.digest()}"
    assert grid_is_complete(folder / "grids/a.h5", spec_digest=SPEC.digest())
    assert not list(folder.rglob("*.tmp"))
    monkeypatch.undo()
    assert run(slides, tmp_path).reused == ("a",)
