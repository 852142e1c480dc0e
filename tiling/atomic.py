"""The one way in which this project writes a file: temporary name, flush, rename."""

import hashlib
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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
    """Remove temporary files that killed writers of this project left in and below `folder`, and return their paths.

    Only those of this machine whose process is gone: the others may be another run's work in progress, on a share
    perhaps another machine's.
    """
    removed = []
    for path in sorted(folder.rglob(".*.tmp")):
        found = _TEMPORARY.search(path.name)
        if found and not _alive(int(found.group(1))):
            path.unlink(missing_ok=True)
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
