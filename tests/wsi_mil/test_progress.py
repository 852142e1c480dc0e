"""Where there is no terminal, progress is plain lines."""

import pytest

from wsi_mil.progress import progress


def test_a_plain_line_tells_how_far_and_how_fast(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("encode", 4, "tiles") as bar:
        bar.advance(3, "bottleneck: reading")
        bar.advance(1)
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("encode: 4/4 tiles, ")
    assert line.endswith("0 s left")


def test_nothing_done_yet_is_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("tile", 2):
        pass
    assert "time left not known yet" in capsys.readouterr().err
