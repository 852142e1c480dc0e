"""predict on slides: tiled and encoded as the bundle demands; resumes, isolates failures, refuses another encoder."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from safetensors.torch import save_file

from tiling.grid import TileSpec
from wsi_mil.bundle import open_bundle
from wsi_mil.encoders import EncodeSpec, open_encoder
from wsi_mil.errors import ConfigError
from wsi_mil.fitting.spec import TrainSpec
from wsi_mil.runs import RunDir, write_frame
from wsi_mil.splits import FoldSpec
from wsi_mil.stages.crossval import crossval
from wsi_mil.stages.encode import encode
from wsi_mil.stages.export_bundle import export_bundle
from wsi_mil.stages.predict import predict
from wsi_mil.stages.tile import tile
from wsi_mil.store import BagStore
from wsi_mil.tasks import TaskSpec


def rows_of(out: Path) -> pd.DataFrame:
    return RunDir(out).predictions()


@pytest.fixture(scope="module")
def world(tmp_path_factory, make_pyramid, tissue_rgb):
    root = tmp_path_factory.mktemp("slides")
    for i in range(6):
        make_pyramid(root / "train" / f"t{i}.tif", tissue_rgb(600, 500, seed=i))
    for i in range(2):
        make_pyramid(root / "new" / f"n{i}.tif", tissue_rgb(600, 500, seed=10 + i))
    rows = [{"slide": f"t{i}", "patient": f"p{i}", "label": ("normal", "tumour")[i % 2]} for i in range(6)]
    write_frame(root / "table.csv", pd.DataFrame(rows))
    spec = TileSpec(tile_px=128, min_tissue=0.5)
    tiled = tile(root / "train", out=root, tiles=spec, workers=1)
    encoded = encode(root / "train", grids=tiled.out, out=root, encoding=EncodeSpec(batch_size=8, readers=2))
    crossval(
        root / "table.csv",
        bags=encoded.out,
        out=root / "run",
        task=TaskSpec(target="label"),
        methods=["abmil"],
        folds=FoldSpec(n_folds=2),
        train=TrainSpec(epochs=1, selection="none", device="cpu"),
        slides=root / "train",
    )
    export_bundle(root / "run", out=root / "bundle")
    return root


def test_the_bundle_knows_how_its_slides_were_tiled(world):
    bundle = open_bundle(world / "bundle")
    assert bundle.tiles == TileSpec(tile_px=128, min_tissue=0.5)
    assert bundle.training.stain is not None


def test_slides_are_tiled_encoded_scored_and_drawn(world, make_pyramid, tmp_path):
    slides = shutil.copytree(world / "new", tmp_path / "new")
    make_pyramid(slides / "glass.tif", np.full((300, 300, 3), 244, np.uint8))
    (slides / "broken.svs").write_bytes(b"no slide")
    summary = predict(world / "bundle", slides, out=tmp_path / "out", device="cpu", workers=1)
    assert summary.done == ("n0", "n1")
    assert summary.exit_code == 3
    assert sorted(failure.item for failure in summary.failures) == ["broken", "glass"]
    ours = next((tmp_path / "out" / "bags").iterdir())
    theirs = RunDir(world / "run").config()["bags"]
    assert BagStore(ours).header("n0").contract == BagStore(Path(theirs)).header("t0").contract
    assert json.loads(BagStore(ours).header("n0").tiles)["min_tissue"] == 0.5
    found = pd.read_csv(tmp_path / "out" / "domain_shift.csv")
    assert found["stain_distance"].notna().all()
    for name in ("n0", "n1"):
        assert (RunDir(tmp_path / "out").heatmaps_dir / "abmil" / f"{name}.png").is_file()
    by_bags = predict(world / "bundle", ours, out=tmp_path / "by_bags", device="cpu")
    assert by_bags.exit_code == 0
    pd.testing.assert_frame_equal(rows_of(tmp_path / "out"), rows_of(tmp_path / "by_bags"))


def test_the_same_command_goes_on_and_takes_up_what_failed(world, make_pyramid, tissue_rgb, tmp_path):
    slides = shutil.copytree(world / "new", tmp_path / "new")
    (slides / "late.tif").write_bytes(b"still copying")
    assert predict(world / "bundle", slides, out=tmp_path / "out", device="cpu", workers=1).exit_code == 3
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "bags").rglob("*.h5")}
    make_pyramid(slides / "late.tif", tissue_rgb(600, 500, seed=20))
    summary = predict(world / "bundle", slides, out=tmp_path / "out", device="cpu", workers=1)
    assert summary.done == ("late", "n0", "n1")
    assert {path: path.stat().st_mtime_ns for path in made} == made


def test_one_slide_can_be_given(world, tmp_path):
    summary = predict(world / "bundle", world / "new" / "n1.tif", out=tmp_path / "out", device="cpu")
    assert (summary.done, summary.exit_code) == (("n1",), 0)
    assert (RunDir(tmp_path / "out").heatmaps_dir / "abmil" / "n1.png").is_file()


def test_nothing_is_written_before_the_encoder_is_the_right_one(world, tmp_path):
    weights = open_encoder().module.state_dict()
    weights["conv_stem.weight"] = weights["conv_stem.weight"] + 1
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match=r"is not the one that the models were trained with: weights_sha256"):
        predict(world / "bundle", world / "new", out=tmp_path / "out", weights=tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match="inside the slides' folder"):
        predict(world / "bundle", world / "new", out=world / "new" / "out")
    with pytest.raises(ConfigError, match="wsi-mil export-bundle"):
        predict(world / "run", world / "new", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert len(list((world / "new").iterdir())) == 2


def test_older_bags_are_told_their_grids(world, tmp_path):
    grids = next(world.glob("tiles_*"))
    export_bundle(world / "run", out=tmp_path / "b", grids=grids)
    assert open_bundle(tmp_path / "b").digest == open_bundle(world / "bundle").digest
    other = tile(world / "train", out=tmp_path, tiles=TileSpec(tile_px=96), workers=1)
    with pytest.raises(ConfigError, match="was not made from its grid"):
        export_bundle(world / "run", out=tmp_path / "c", grids=other.out)
