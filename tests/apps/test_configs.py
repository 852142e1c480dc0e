"""The example configurations are accepted as they are, say how to run them."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from apps.arguments import parse, parser_for
from wsi_mil.fitting.spec import TrainSpec
from wsi_mil.folding.folds import FoldSpec
from wsi_mil.lookup import model_names, regulariser_names
from wsi_mil.methods import rehearse, resolve_methods
from wsi_mil.settings import override
from wsi_mil.splits import make_folds
from wsi_mil.stages.crossval import crossval
from wsi_mil.tasks import class_task

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
OF_METHODS = {path.stem: path for path in sorted((ROOT / "configs" / "methods").glob("*.yaml"))}
TASK = class_task("label", ("normal", "tumour"))


FEW = (
    "# Below about 62 patients in the rarest class validation chooses nothing (under 10 a fold): add --selection none."
)


def parsed(path: Path) -> dict[str, Any]:
    words = ("labels.csv", "--config", str(path), "--bags", "b", "--out", "r", "--target", "label")
    return parse(parser_for("crossval", crossval), words)


def test_there_are_examples() -> None:
    assert len(CONFIGS) >= 2


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_an_example_is_accepted_and_documents_itself(path: Path) -> None:
    first, *rest = path.read_text().splitlines()
    assert first.startswith("# wsi-mil crossval")
    assert f"--config {path.relative_to(ROOT).as_posix()} " in first
    assert any(line.startswith("# expect") for line in rest[:3])
    values = parsed(path)
    values["train"].check()
    assert resolve_methods(values["methods"])
    assert (FEW in rest) == (values["train"].selection == "validation")


def test_the_number_of_patients_below_which_validation_chooses_nothing_is_that_of_the_folds() -> None:
    def fewest(patients: int) -> int:
        labels = {f"{name}{i}": name for name in "xy" for i in range(patients)}
        folds = make_folds(labels)
        assert (len(folds), FoldSpec().n_folds) == (5, 5)
        return min(sum(labels[p] == name for p in fold.validation) for fold in folds for name in "xy")

    (least,) = map(int, re.findall(r"about (\d+) patients", FEW))
    assert fewest(least) == 10
    assert fewest(least - 2) < 10


def test_every_example_is_of_a_method_or_plug_in_that_exists() -> None:
    assert set(OF_METHODS) <= {*model_names(), *regulariser_names()}
    assert len(OF_METHODS) >= 49


@pytest.mark.parametrize("name", OF_METHODS)
def test_a_methods_example_takes_a_first_step_and_names_its_sources(name: str) -> None:
    values = parsed(OF_METHODS[name])
    (spec,) = resolve_methods(values["methods"])
    assert name in (spec.name, *spec.regularisers)
    rehearse(spec, in_dim=384, task=TASK, bags_per_step=values["train"].bags_per_step)
    written = yaml.safe_load(OF_METHODS[name].read_text())
    assert override(values["train"], written["train"], where="train") == values["train"]
    assert values["task"].balance == written.get("task", {}).get("balance", "none")
    lines = OF_METHODS[name].read_text().splitlines()
    comments = " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))
    if "this project's defaults" in comments:
        assert values["train"] == TrainSpec()
    else:
        assert "training: " in comments, "say where the training settings come from"
