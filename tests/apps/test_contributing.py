"""The method that CONTRIBUTING.md shows is real: it obeys the laws as it stands."""

import re
from pathlib import Path

import pytest

from wsi_mil.contracts import check_model
from wsi_mil.errors import ConfigError
from wsi_mil.lookup import find_model
from wsi_mil.stages.listing import listing

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_obeys_every_law(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)
    assert code
    (tmp_path / "top_mean.py").write_text(code.group(1))
    results = check_model(find_model(str(tmp_path / "top_mean.py")))
    assert len(results) >= 12
    assert [result for result in results if not result.passed] == []


def test_the_example_is_listed_with_the_others(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)
    assert code
    own = tmp_path / "top_mean.py"
    own.write_text(code.group(1))
    lines = listing("models", also=[own]).notes
    assert len(lines) == len(listing("models").notes) + 1
    assert "Mean of the k highest tile logits" in lines[-2]  # the last one tells how to learn more
    with pytest.raises(ConfigError, match="--also"):
        listing("encoders", also=[own])
