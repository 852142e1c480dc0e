"""A file is there whole or not at all."""

import os
from pathlib import Path

import pytest

from tiling.atomic import atomic_path, remove_leftovers, temporary_path, write_bytes, write_text


def test_a_block_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a" / "x.txt"
    write_text(path, "old")

    def write_half() -> None:
        with atomic_path(path) as temporary:
            temporary.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert path.read_text() == "old"
    assert [entry.name for entry in path.parent.iterdir()] == ["x.txt"]


def test_newlines_are_kept_and_bytes_are_whole(tmp_path: Path) -> None:
    write_text(tmp_path / "t", "a\r\nb\nä")
    assert (tmp_path / "t").read_bytes() == b"a\r\nb\n\xc3\xa4"
    write_bytes(tmp_path / "t", b"\x00\x01")
    assert (tmp_path / "t").read_bytes() == b"\x00\x01"


def test_only_leftovers_of_dead_processes_of_this_machine_are_removed_however_deep(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    dead = temporary_path(tmp_path / "deep" / "x.h5", 999_999_999)
    alive = temporary_path(tmp_path / "y.h5", os.getpid())
    elsewhere = tmp_path / ".z.h5.wsi-mil-ffffffff-999999999.tmp"
    foreign = tmp_path / ".other.tmp"
    for path in (dead, alive, elsewhere, foreign):
        path.write_bytes(b"half")
    assert remove_leftovers(tmp_path) == [dead]
    assert not dead.exists()
    assert alive.exists()
    assert elsewhere.exists()
    assert foreign.exists()
