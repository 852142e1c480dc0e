"""A process that dies costs its own job, not the run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from wsi_mil.workers import run_in_processes


@pytest.fixture(autouse=True)
def spawned_processes_find_this_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])


def square(number: int) -> int:
    return number * number


def square_but_die_on_3(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
    return number * number


def die_the_first_time(marker: Path) -> str:
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


def fail(number: int) -> int:
    raise ValueError(f"bad {number}")


def test_every_job_comes_back_with_its_result() -> None:
    assert dict(run_in_processes(square, range(9), workers=2)) == {n: n * n for n in range(9)}


def test_a_job_that_kills_its_process_is_lost_alone() -> None:
    results = dict(run_in_processes(square_but_die_on_3, range(8), workers=2))
    assert results == {n: None if n == 3 else n * n for n in range(8)}


def test_a_job_that_was_killed_by_chance_is_done_again(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    assert list(run_in_processes(die_the_first_time, [marker], workers=2)) == [(marker, "done")]


def test_an_exception_is_raised_here() -> None:
    with pytest.raises(ValueError, match="bad 5"):
        list(run_in_processes(fail, [5], workers=1))


def test_a_killed_parent_leaves_no_process_behind(tmp_path: Path) -> None:
    code = (
        "import sys, time, pathlib\n"
        "from wsi_mil.workers import run_in_processes\n"
        "from tests_of_workers import stay\n"
        "list(run_in_processes(stay, [pathlib.Path(sys.argv[1])], workers=1))\n"
    )
    (tmp_path / "tests_of_workers.py").write_text(
        "import os, time\ndef stay(path):\n    path.write_text(str(os.getpid()))\n    time.sleep(60)\n"
    )
    (tmp_path / "run.py").write_text(
        "if __name__ == '__main__':\n" + "".join(f"    {line}\n" for line in code.splitlines())
    )
    note = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, str(tmp_path / "run.py"), str(note)])
    while not (note.exists() and note.read_text()):
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    child = Path("/proc") / note.read_text() / "stat"
    for _ in range(100):
        if not child.exists() or child.read_text().rsplit(")", 1)[1].split()[0] in "ZX":
            return
        time.sleep(0.05)
    pytest.fail("the worker lives on")
