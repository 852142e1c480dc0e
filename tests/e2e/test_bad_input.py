"""A user's mistakes through the command line: a clear sentence, the right exit code, and nothing lost."""

import csv
import errno
import io
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tifffile
import timm
import torch
from safetensors.torch import save_file

from apps.cli import main

Rows = list[dict[str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(*words: str | Path) -> tuple[int, str]:
        code = main([str(word) for word in words])
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return code, " ".join((printed.out + printed.err).split())

    return run


@pytest.fixture
def rows(mini_demo: Path) -> Rows:
    with (mini_demo / "cohort" / "labels.csv").open() as handle:
        return list(csv.DictReader(handle))


@pytest.fixture
def crossval(mini_demo: Path, tmp_path: Path, cli) -> Callable[..., tuple[int, str]]:
    """Cross-validate a table on the mini-demo's bags."""

    def run(rows: Sequence[dict[str, str]], *words: str | Path, bags: Path | None = None) -> tuple[int, str]:
        table = tmp_path / "labels.csv"
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        table.write_text(text.getvalue())
        options = [
            "--out",
            tmp_path / "run",
            "--target",
            "label",
            "--methods",
            "abmil",
            "--n-folds",
            "2",
            "--epochs",
            "1",
        ]
        return cli("crossval", table, "--bags", bags or bags_of(mini_demo), *options, *words)

    return run


def bags_of(demo: Path) -> Path:
    return next((demo / "work").glob("bags_*"))


def grids_of(demo: Path) -> Path:
    return next((demo / "work").glob("tiles_*"))


def without_annotation(rows: Rows) -> Rows:
    return [{key: value for key, value in row.items() if key != "annotation"} for row in rows]


def without_pixel_size(slide: Path, copy: Path) -> None:
    copy.parent.mkdir(parents=True, exist_ok=True)
    pixels = tifffile.imread(slide, key=0)
    tifffile.imwrite(copy, pixels, tile=(256, 256), photometric="rgb", compression="jpeg", metadata=None)


def test_a_good_table_works(crossval, rows: Rows, tmp_path: Path) -> None:
    code, said = crossval(without_annotation(rows), "--level", "patient")
    assert code == 0, said
    assert (tmp_path / "run" / "predictions.csv").exists()


def test_no_pixel_size(mini_demo: Path, cli, tmp_path: Path) -> None:
    without_pixel_size(mini_demo / "cohort" / "slides" / "site1" / "case01.tif", tmp_path / "slides" / "a.tif")
    code, said = cli("tile", tmp_path / "slides", "--out", tmp_path / "work")
    assert code == 1
    assert "no pixel size a:" in said
    assert "slide_mpp" in said
    code, said = cli("tile", tmp_path / "slides", "--out", tmp_path / "work", "--slide-mpp", "0.5")
    assert code == 0, said


def test_a_table_with_a_missing_slide(crossval, rows: Rows) -> None:
    extra = dict(rows[0], slide="site9/lost.tif", patient="p9")
    code, said = crossval(without_annotation([*rows, extra]))
    assert code == 1
    assert "lost" in said
    assert "allow" in said


def test_an_unknown_column(crossval, rows: Rows) -> None:
    renamed = [{("slid" if key == "slide" else key): value for key, value in row.items()} for row in rows]
    code, said = crossval(without_annotation(renamed))
    assert code == 1
    assert "slid" in said
    assert "columns" in said
    code, said = crossval(without_annotation(rows), "--target", "labl")
    assert code in (1, 2)
    assert "label" in said


def test_a_patient_with_two_labels(crossval, rows: Rows) -> None:
    for row in rows[:2]:
        row["patient"] = "twins"
    rows[0]["label"], rows[1]["label"] = "normal", "tumour"
    code, said = crossval(without_annotation(rows), "--level", "patient")
    assert code == 1
    assert "twins" in said


def test_one_class_only(crossval, rows: Rows) -> None:
    for row in rows:
        row["label"] = "tumour"
    code, said = crossval(without_annotation(rows), "--level", "patient")
    assert code == 1
    assert "one class" in said


def test_ids_that_lost_their_zeros_are_proposed_and_not_applied(
    mini_demo: Path, crossval, rows: Rows, tmp_path: Path
) -> None:
    bags = tmp_path / "bags"
    bags.mkdir()
    for i, path in enumerate(sorted(bags_of(mini_demo).glob("[!.]*.h5"))):
        shutil.copy(path, bags / f"{i:04d}.h5")
    for i, row in enumerate(rows):
        row["slide"] = str(i)
    code, said = crossval(without_annotation(rows), bags=bags)
    assert code == 1
    assert "0001" in said


def test_a_weights_file_of_another_architecture(mini_demo: Path, cli, tmp_path: Path) -> None:
    weights = tmp_path / "other.pt"
    torch.save({"fc.weight": torch.zeros(3, 4)}, weights)
    slides = mini_demo / "cohort" / "slides"
    options = ["--grids", grids_of(mini_demo), "--out", tmp_path, "--encoder", "timm:resnet18", "--weights", weights]
    code, said = cli("encode", slides, *options)
    assert code in (1, 2)
    assert "other.pt" in said
    assert "another architecture" in said
    assert "conv1.weight" in said
    assert not list(tmp_path.glob("bags_*/*.h5"))


def test_a_bag_made_with_another_encoder(mini_demo: Path, cli, crossval, rows: Rows, tmp_path: Path) -> None:
    weights = tmp_path / "tiny.safetensors"
    save_file(timm.create_model("test_efficientnet", num_classes=0).state_dict(), weights)
    slides = mini_demo / "cohort" / "slides"
    options = ["--grids", grids_of(mini_demo), "--out", tmp_path, "--encoder", "timm:test_efficientnet"]
    code, said = cli("encode", slides, *options, "--weights", weights)
    assert code == 0, said
    bags = tmp_path / "bags"
    shutil.copytree(bags_of(mini_demo), bags)
    shutil.copy(next(tmp_path.glob("bags_*/site1__case01.h5")), bags)
    code, said = crossval(without_annotation(rows), "--level", "patient", bags=bags)
    assert code == 1
    assert "site1__case01" in said
    assert "encoder" in said
    assert not (tmp_path / "run" / "predictions.csv").exists()


def test_a_full_disk_stops_with_the_cure_and_the_next_run_goes_on(
    mini_demo: Path, cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    slides, options = mini_demo / "cohort" / "slides", ["--grids", grids_of(mini_demo), "--out", tmp_path]
    real, calls = os.fsync, []

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    code, said = cli("encode", slides, *options)
    assert code in (1, 3)
    assert "No space left" in said
    finished = sorted(tmp_path.glob("bags_*/[!.]*.h5"))
    before = {path: path.stat().st_mtime_ns for path in finished}
    assert 0 < len(finished) < 8
    assert not list(tmp_path.rglob("*.tmp"))
    monkeypatch.undo()
    code, said = cli("encode", slides, *options)
    assert code == 0, said
    assert len(list(tmp_path.glob("bags_*/[!.]*.h5"))) == 8
    assert {path: path.stat().st_mtime_ns for path in finished} == before


def test_an_unknown_configuration_key(mini_demo: Path, cli, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("tiles: {mpp: 0.5, tile_pixels: 224}\n")
    code, said = cli("tile", mini_demo / "cohort" / "slides", "--out", tmp_path, "--config", config)
    assert code == 2
    assert "tile_pixels" in said
    assert "tiles.tile_px" in said
    assert not list(tmp_path.glob("tiles_*"))
