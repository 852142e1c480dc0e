"""Keeps glibc from handing large activations back to the system after every layer.

By default each of them is mapped, zeroed page by page and unmapped again, which costs as much as the arithmetic. With
these settings freed memory stays with the process and is used again, by all threads.
"""

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_MIB = 1024 * 1024


def keep_freed_memory() -> bool:
    """Set it for this process, best before the first large allocation. Returns False where there is no glibc."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    settings = (
        (_M_ARENA_MAX, 1),  # another arena holds 64 MiB at most, so larger activations would be mapped after all
        (_M_MMAP_THRESHOLD, 1024 * _MIB),
        (_M_TRIM_THRESHOLD, 2**31 - 1),
        (_M_TOP_PAD, 64 * _MIB),
    )
    taken = [mallopt(key, value) == 1 for key, value in settings]
    return all(taken)
