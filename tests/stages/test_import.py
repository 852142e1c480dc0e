"""`wsi-mil import`: what the file holds is what the study gets."""

import numpy as np
import pandas as pd
import pytest

from wsi_mil.errors import StoreError
from wsi_mil.fitting.spec import TrainSpec
from wsi_mil.runs import RunDir
from wsi_mil.splits import FoldSpec
from wsi_mil.stages.crossval import crossval
from wsi_mil.stages.import_bags import import_bags
from wsi_mil.store import BagStore
from wsi_mil.tasks import TaskSpec


@pytest.fixture
def classic(tmp_path):
    rng = np.random.default_rng(0)
    bag_id = np.repeat(np.arange(12), rng.integers(2, 5, size=12))
    mask = np.ones((2, 3, 12), dtype=bool)
    for repeat in range(2):
        for fold in range(3):
            mask[repeat, fold, (fold * 4 + repeat + np.arange(4)) % 12] = False
    arrays = {"features": rng.normal(size=(len(bag_id), 5)), "bag_id": bag_id, "bag_label": np.arange(12) % 2}
    np.savez(tmp_path / "toy.npz", train_mask=mask, **arrays)
    return tmp_path / "toy.npz", arrays, mask


def test_bags_labels_and_folds_come_over_as_they_are(classic, tmp_path):
    source, arrays, mask = classic
    summary = import_bags(source, out=tmp_path / "work")
    assert (len(summary.done), summary.exit_code) == (12, 0)
    store = BagStore(tmp_path / "work" / "bags")
    for i, name in enumerate(sorted(store.ids())):
        wanted = arrays["features"][arrays["bag_id"] == i].astype(np.float32)
        np.testing.assert_array_equal(store.bag(name).features.numpy(), wanted)
    table = pd.read_csv(tmp_path / "work" / "labels.csv")
    assert table["label"].tolist() == arrays["bag_label"].tolist()
    folds = pd.read_csv(tmp_path / "work" / "folds.csv")
    tested = folds[(folds["repeat"] == 1) & (folds["fold"] == 2) & (folds["part"] == "test")]["patient"]
    assert tested.tolist() == [f"toy_{i:04d}" for i in np.flatnonzero(~mask[1, 2])]


def test_again_nothing_is_written_twice(classic, tmp_path):
    import_bags(classic[0], out=tmp_path / "work")
    (tmp_path / "work" / "bags" / "toy_0003.h5").unlink()
    again = import_bags(classic[0], out=tmp_path / "work")
    assert (again.done, len(again.reused)) == (("toy_0003",), 11)


def test_bags_of_the_same_names_from_another_source_are_never_written_over(classic, tmp_path):
    source, arrays, mask = classic
    import_bags(source, out=tmp_path / "work")
    (tmp_path / "work" / "bags" / "toy_0000.h5").unlink()
    before = {path: path.read_bytes() for path in (tmp_path / "work").rglob("*") if path.is_file()}
    np.savez(source, train_mask=mask, **arrays | {"features": arrays["features"] + 1})
    with pytest.raises(StoreError, match=r"toy_0001\.h5 is there already and comes from another source.*--out"):
        import_bags(source, out=tmp_path / "work")
    assert {path: path.read_bytes() for path in (tmp_path / "work").rglob("*") if path.is_file()} == before
    assert len(import_bags(source, out=tmp_path / "other").done) == 12


def test_the_next_command_works_with_the_stored_folds(classic, tmp_path):
    work = tmp_path / "work"
    import_bags(classic[0], out=work)
    summary = crossval(
        work / "labels.csv",
        bags=work / "bags",
        out=tmp_path / "run",
        task=TaskSpec(target="label"),
        methods=["mean_pool"],
        folds=FoldSpec(file=work / "folds.csv"),
        train=TrainSpec(epochs=1, selection="none", device="cpu"),
    )
    assert summary.exit_code == 0
    run = RunDir(tmp_path / "run")
    assert len(run.predictions()) == 24
    assert "pathology" not in run.config()["encoder"], "nobody knows on what the features were trained"


@pytest.mark.parametrize("content", [b"", b"PK no zip", None])
def test_a_file_of_another_form_is_refused_with_the_forms(tmp_path, content):
    path = tmp_path / ("x.npz" if content is not None else "x.zarr")
    path.write_bytes(content or b"")
    with pytest.raises(StoreError, match=r"cannot be read as npz|Known: classic"):
        import_bags(path, out=tmp_path / "work")
    assert not (tmp_path / "work").exists()
