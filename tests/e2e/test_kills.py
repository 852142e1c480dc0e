"""A study that is killed again and again ends with the same bytes as one that nobody disturbed."""

import random
from pathlib import Path

import pytest

N_KILLS = 20


def files_in(folder: Path) -> int:
    return sum(1 for path in folder.rglob("*") if path.is_file())


def finished_bags(out: Path) -> dict[str, tuple[int, int]]:
    """Bags that stand under their final name, with what changes when a file is written again."""
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_ino) for path in out.rglob("bags_*/[!.]*.h5")}


@pytest.mark.long
def test_twenty_kills_change_no_byte_and_no_slide_is_encoded_twice(mini_demo: Path, commands, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    total, chance = files_in(mini_demo), random.Random(7)
    words = ("demo", "--size", "mini", "--out", str(out))
    seen: dict[str, tuple[int, int]] = {}
    kills = 0
    for i in range(N_KILLS):
        after = total * (i + chance.random()) / (N_KILLS + 1)
        kills += commands.run(*words, kill_when=lambda after=after: files_in(out) >= after) is None
        seen = finished_bags(out) | seen
    assert kills == N_KILLS
    assert commands.run(*words) == 0
    assert len(seen) >= 8
    now = finished_bags(out)
    assert {name: now[name] for name in seen} == seen
    names = ["run/predictions.csv", "run/folds.csv", "outside/prediction/predictions.csv"]
    for name in names:
        assert (out / name).read_bytes() == (mini_demo / name).read_bytes(), name
    scores = sorted(path.relative_to(out) for path in (out / "run" / "instance_scores").rglob("*.h5"))
    assert len(scores) == 16
    for path in scores:
        assert (out / path).read_bytes() == (mini_demo / path).read_bytes(), path
    assert not list(out.rglob("*.tmp"))
