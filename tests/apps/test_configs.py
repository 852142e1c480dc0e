"""The example configurations are accepted as they are, and say how to run them."""

from pathlib import Path

import pytest

from apps.arguments import parse, parser_for
from wsi_mil.methods import resolve_methods
from wsi_mil.stages.crossval import crossval

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").rglob("*.yaml"))


def test_there_are_examples() -> None:
    assert len(CONFIGS) >= 2


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_an_example_is_accepted_and_documents_itself(path: Path) -> None:
    first, *rest = path.read_text().splitlines()
    assert first.startswith("# wsi-mil crossval")
    assert any(line.startswith("# expect") for line in rest[:3])
    words = ("labels.csv", "--config", str(path), "--bags", "b", "--out", "r", "--target", "label")
    values = parse(parser_for("crossval", crossval), words)
    values["train"].check()
    assert resolve_methods(values["methods"])
