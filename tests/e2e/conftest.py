"""The mini-demo, run once a session, and a way to run commands that can be killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


class Commands:
    """Runs command lines in children of one process that has everything loaded."""

    def __init__(self, log: Path) -> None:
        self._log = log.open("ab")
        words = [sys.executable, str(Path(__file__).with_name("zygote.py"))]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        assert self._answer() == "ready"

    def run(self, *words: str, kill_when: Callable[[], bool] | None = None) -> int | None:
        """Exit code of the command, or None when `kill_when` came true first and it was killed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        pid = int(self._answer())
        killed = False
        while kill_when is not None and _running(pid):
            if kill_when():
                os.killpg(pid, signal.SIGKILL)
                killed = True
                break
            time.sleep(0.01)
        status = int(self._answer())
        return None if killed and os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    running = Commands(tmp_path_factory.mktemp("zygote") / "log.txt")
    yield running
    running.close()


@pytest.fixture(scope="session")
def mini_demo(tmp_path_factory: pytest.TempPathFactory, commands: Commands) -> Path:
    """Folder of a mini-demo that nobody disturbed. Read only."""
    out = tmp_path_factory.mktemp("mini") / "demo"
    assert commands.run("demo", "--size", "mini", "--out", str(out)) == 0
    return out
