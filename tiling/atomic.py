"""The one way in which this project writes a file: temporary name, flush, rename."""

import hashlib
import io
import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_HOST = hashlib.sha256(platform.node().encode()).hexdigest()[:8]
_TEMPORARY = re.compile(rf"\.wsi-mil-{_HOST}-(\d+)\.tmp$")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it to `path` when the block ends well, remove it when it does not.

    A reader therefore meets the old file, or the whole new one, or none. Raises OSError as the disk does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path, os.getpid())
    try:
        yield temporary
        _flush(temporary)
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """As `atomic_path`, for a folder that is written whole: it appears under its name when all is in it.

    Raises OSError as the disk does, and where `path` exists already.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path, os.getpid())
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


class SteadyFile(io.FileIO):
    """A file whose writer hears of a full disk at the end only; `failure` holds the error. See `atomic_file`."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of `data`, or nothing more after the first failure."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        while len(rest) and self.failure is None:
            try:
                rest = rest[super().write(rest) :]
            except OSError as error:
                self.failure = error
        return size

    def truncate(self, size: int | None = None) -> int:
        """Set the file's size, unless something failed before."""
        try:
            return super().truncate(size) if self.failure is None else size or 0
        except OSError as error:
            self.failure = error
            return size or 0


@contextmanager
def atomic_file(path: Path) -> Iterator[SteadyFile]:
    """As `atomic_path`, but yield an open file, for a library that falls apart on a disk that is full.

    HDF5 cannot even close a file then: it keeps it open and complains until the process ends. It is told that all went
    well, and the error is raised at the end of the block.
    """
    with atomic_path(path) as temporary, SteadyFile(temporary, "w+") as file:
        try:
            yield file
        finally:
            if file.failure is not None:
                raise file.failure


def temporary_path(path: Path, pid: int) -> Path:
    """What process `pid` of this machine calls `path` while it writes it."""
    return path.with_name(f".{path.name}.wsi-mil-{_HOST}-{pid}.tmp")


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically; newlines are kept as they are, so bytes are the same on every system."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write bytes atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove temporary files and folders that killed writers of this project left in and below `folder`.

    Returns their paths.

    Only those of this machine whose process is gone: the others may be another run's work in progress, on a share
    perhaps another machine's.
    """
    removed = []
    for path in sorted(folder.rglob(".*.tmp")):
        found = _TEMPORARY.search(path.name)
        if found and not _alive(int(found.group(1))):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def _flush(path: Path) -> None:
    with open(path, "rb+") as handle:
        os.fsync(handle.fileno())


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True
