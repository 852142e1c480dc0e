"""The one way in which this project writes a file: temporary name, flush, rename."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TEMPORARY = re.compile(r"\.wsi-mil-\d+\.tmp$")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it to `path` when the block ends well, remove it when it does not.

    A reader therefore meets the old file, or the whole new one, or none. Raises OSError as the disk does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.wsi-mil-{os.getpid()}.tmp")
    try:
        yield temporary
        _flush(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically; newlines are kept as they are, so bytes are the same on every system."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write bytes atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove temporary files that a killed writer of this project left in `folder`, and return their paths.

    A file whose process is still alive is another run's work in progress and stays.
    """
    removed = []
    for path in folder.glob(".*.tmp"):
        if _TEMPORARY.search(path.name) and not _alive(int(path.name.split("-")[-1].removesuffix(".tmp"))):
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def _flush(path: Path) -> None:
    with open(path, "rb+") as handle:
        os.fsync(handle.fileno())


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
