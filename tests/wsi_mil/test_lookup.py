import importlib

import pytest

from wsi_mil.errors import ConfigError
from wsi_mil.lookup import find_model, find_regulariser, model_names, regulariser_names
from wsi_mil.models._base import MILModel, Regulariser

METHOD = '''
"""A user's method."""
import torch
from torch import nn
from wsi_mil.bags import segment_mean
from wsi_mil.models._base import MILModel, MILOutput
from wsi_mil.models.abmil import Abmil   # imported, not defined here


class Mine(MILModel):
    summary, family, paper, score_kinds = "mine", "pooling", "none", ("probability",)

    def __init__(self, *, in_dim: int, n_outputs: int) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        self.head = nn.Linear(in_dim, n_outputs)

    def forward(self, batch, *, generator=None):
        logits = self.head(segment_mean(batch.features, batch.offsets))
        return MILOutput(logits=logits, offsets=batch.offsets, instance_logits=self.head(batch.features))
'''


def test_every_name_is_found_and_is_its_file():
    for name in model_names():
        cls = find_model(name)
        assert issubclass(cls, MILModel)
        assert cls.__module__ == f"wsi_mil.models.{name}"
    for name in regulariser_names():
        assert issubclass(find_regulariser(name), Regulariser)


def test_private_files_are_no_names():
    assert not any(name.startswith("_") for name in model_names())


@pytest.mark.parametrize(
    ("wrong", "meant"), [("abmill", "abmil"), ("Focus-MIL", "focusmil"), ("meanpool", "mean_pool")]
)
def test_an_unknown_name_gets_the_nearest_one(wrong, meant):
    with pytest.raises(ConfigError, match=f"Did you mean '{meant}'"):
        find_model(wrong)


def test_a_far_name_gets_the_list():
    with pytest.raises(ConfigError, match="There are abmil"):
        find_model("qqqq")
    with pytest.raises(ConfigError, match="There are aem"):
        find_regulariser("qqqq")


def test_a_file_by_path_gives_the_same_class_twice(tmp_path):
    path = tmp_path / "my_method.py"
    path.write_text(METHOD)
    cls = find_model(str(path))
    assert cls.__name__ == "Mine"
    assert find_model(path) is cls
    path.write_text(METHOD.replace("Mine", "Other"))
    assert find_model(path).__name__ == "Other"


def test_a_file_obeys_the_laws(tmp_path):
    from wsi_mil.contracts import check_model

    path = tmp_path / "my_method.py"
    path.write_text(METHOD)
    assert [result for result in check_model(find_model(path)) if not result.passed] == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\n", "defines none"),
        (METHOD + "\n\nclass Second(Mine):\n    pass\n", "Mine, Second"),
        ("import nowhere_to_be_found\n", "ModuleNotFoundError"),
        ("def (:\n", "SyntaxError"),
    ],
)
def test_a_file_without_exactly_one_method_is_refused(tmp_path, text, says):
    path = tmp_path / "my_method.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        find_model(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        find_model(tmp_path / "absent.py")


def test_an_entry_point_of_another_package_is_listed_and_found(tmp_path, monkeypatch):
    (tmp_path / "their_method.py").write_text(METHOD)
    info = tmp_path / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[wsi_mil.models]\ntheirs = their_method:Mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert "theirs" in model_names()
    assert find_model("theirs").__name__ == "Mine"
