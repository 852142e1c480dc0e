"""A file is whole or not there, also on a disk that is full, and nobody is shown how a library falls apart."""

import subprocess
import sys
from pathlib import Path

import pytest

from tiling.atomic import atomic_file, write_text

FULL_DISK = """
import resource, signal, sys
from pathlib import Path
import h5py, numpy
from tiling.atomic import atomic_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
try:
    with atomic_file(Path(sys.argv[1])) as handle, h5py.File(handle, "w") as file:
        file.create_dataset("features", data=numpy.ones((1000, 64)))
        file.attrs["kind"] = "bag"
except OSError as error:
    print(error)
"""


@pytest.mark.parametrize("room", [0, 100, 3000, 300_000])
def test_hdf5_on_a_full_disk_gives_one_error_and_no_file(tmp_path: Path, room: int) -> None:
    path = tmp_path / "bag.h5"
    words = [sys.executable, "-c", FULL_DISK, str(path), str(room)]
    done = subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("[Errno 27] File too large")
    assert path.name in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_what_was_there_before_stays_when_writing_fails(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "old")

    def fail_halfway() -> None:
        with atomic_file(tmp_path / "a.txt") as handle:
            handle.write(b"new")
            raise KeyError

    with pytest.raises(KeyError):
        fail_halfway()
    assert (tmp_path / "a.txt").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_all_that_is_written_is_there(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "a.bin") as handle:
        handle.write(b"0123456789")
        handle.truncate(4)
    assert (tmp_path / "a.bin").read_bytes() == b"0123"
