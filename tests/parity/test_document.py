import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "parity.md"


def test_the_examples_of_the_document_run():
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 26
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(DOCUMENT), "exec"), names)


def test_every_vector_file_is_in_the_table():
    files = {path.stem for path in (DOCUMENT.parents[1] / "tests" / "data" / "oracles").glob("*.npz")}
    told = set(re.findall(r"^\| ([\w.]+) \| `", DOCUMENT.read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert files == told
