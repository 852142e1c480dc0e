"""The method that CONTRIBUTING.md shows is real: it obeys the laws as it stands."""

import re
from pathlib import Path

from wsi_mil.contracts import check_model
from wsi_mil.lookup import find_model

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_obeys_every_law(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)
    assert code
    (tmp_path / "top_mean.py").write_text(code.group(1))
    results = check_model(find_model(str(tmp_path / "top_mean.py")))
    assert len(results) >= 12
    assert [result for result in results if not result.passed] == []
