"""Freed memory stays with the process, so that the next batch does not ask the system for it again."""

import subprocess
import sys

import pytest

from wsi_mil.malloc import keep_freed_memory

CODE = """
import resource, sys
from wsi_mil.malloc import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit(0)
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def once():
    block = libc.malloc(100 << 20)
    ctypes.memset(block, 1, 100 << 20)
    libc.free(block)
once()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    once()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    result = subprocess.run([sys.executable, "-c", CODE, how], capture_output=True, text=True, check=True)
    return int(result.stdout or 0)


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_it_does_nothing_where_there_is_no_glibc(monkeypatch, platform):
    monkeypatch.setattr(sys, "platform", platform)
    assert keep_freed_memory() is False


def test_a_large_block_is_used_again_without_page_faults():
    assert faults("keep") < faults("default") / 4 or not sys.platform.startswith("linux")
