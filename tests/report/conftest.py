"""Fabricated runs for the report's tests."""

import importlib.util
import sys
from pathlib import Path

import pytest

_PATH = Path(__file__).with_name("fabricated.py")
_SPEC = importlib.util.spec_from_file_location("fabricated_run", _PATH)
fabricated = importlib.util.module_from_spec(_SPEC)
sys.modules["fabricated_run"] = fabricated
_SPEC.loader.exec_module(fabricated)


@pytest.fixture
def make_run(tmp_path):
    """make_run(**wishes) -> RunDir of a finished, fabricated run in tmp_path/run."""
    return lambda **wishes: fabricated.fabricate(tmp_path, fabricated.Wish(**wishes))
