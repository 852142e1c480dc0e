import inspect
from pathlib import Path

import pytest
import torch

from wsi_mil.errors import ConfigError
from wsi_mil.fitting.spec import TrainSpec
from wsi_mil.lookup import find_regulariser
from wsi_mil.methods import MethodSpec, build, parse_method, rehearse, resolve_methods
from wsi_mil.settings import override
from wsi_mil.tasks import class_task

TASK = class_task("label", ("no", "yes"))


@pytest.mark.parametrize(
    ("text", "name", "regularisers", "shown"),
    [
        ("abmil", "abmil", [], "abmil"),
        ("abmil+aem", "abmil", ["aem"], "abmil+aem"),
        ("dir/a+b/my_method.py+aem", "dir/a+b/my_method.py", ["aem"], "my_method+aem"),
    ],
)
def test_a_word_names_method_and_regularisers(text, name, regularisers, shown):
    spec = parse_method(text)
    assert (spec.name, list(spec.regularisers), spec.shown) == (name, regularisers, shown)


@pytest.mark.parametrize("text", ["", "abmil+", "{name: abmil}"])
def test_what_is_no_method_is_refused_with_the_form_to_write(text):
    with pytest.raises(ConfigError, match=r"abmil\+aem"):
        parse_method(text)


def test_a_regulariser_is_named_once():
    with pytest.raises(ConfigError, match="names aem twice"):
        parse_method("abmil+aem+aem")


def test_the_same_label_twice_is_refused_whatever_its_case():
    with pytest.raises(ConfigError, match="twice"):
        resolve_methods(["abmil", MethodSpec(name="mean_pool", label="ABMIL")])


def test_a_label_that_would_leave_the_run_folder_is_refused():
    with pytest.raises(ConfigError, match="folder's name"):
        resolve_methods([MethodSpec(name="abmil", label="../abmil")])


def test_an_unknown_setting_is_refused_with_the_nearest_spelling():
    with pytest.raises(ConfigError, match="Did you mean 'gated'"):
        resolve_methods([MethodSpec(name="abmil", params={"gatde": True})])


def test_a_setting_of_the_wrong_type_is_refused_with_its_place():
    with pytest.raises(ConfigError, match="method abmil, params"):
        resolve_methods([MethodSpec(name="abmil", params={"gated": "perhaps"})])


def test_the_feature_width_cannot_be_typed_by_hand():
    with pytest.raises(ConfigError, match="in_dim"):
        resolve_methods([MethodSpec(name="abmil", params={"in_dim": 3})])


def test_settings_reach_the_model_and_the_regulariser():
    (spec,) = resolve_methods(
        [MethodSpec(name="abmil", params={"gated": False}, regularisers={"aem": {"weight": 0.25}})]
    )
    model, objective = build(spec, in_dim=8, task=TASK, seed=0)
    assert model.gated is False
    assert objective.weight == 0.25


def test_weights_depend_on_the_seed_alone_and_global_randomness_is_untouched():
    spec = parse_method("abmil")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = build(spec, in_dim=8, task=TASK, seed=1)[0].state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    second, other = (build(spec, in_dim=8, task=TASK, seed=s)[0].state_dict() for s in (1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_a_regulariser_that_makes_no_sense_on_a_method_fails_before_training():
    with pytest.raises(ConfigError, match=r"mean_pool\+aem"):
        rehearse(parse_method("mean_pool+aem"), in_dim=8, task=TASK, bags_per_step=4)


LATE = """
from wsi_mil.models._base import BagObjective
from wsi_mil.models.mean_pool import MeanPool


class Late(MeanPool):
    def objective(self, criterion):
        return Grows(criterion)


class Grows(BagObjective):
    def loss(self, model, batch, target, progress):
        return {"bag": super().loss(model, batch, target, progress)["bag"] / float(progress.step < 5 or "nan")}
"""


def test_a_loss_that_breaks_late_in_training_is_seen_before_it(tmp_path):
    path = tmp_path / "late.py"
    path.write_text(LATE)
    with pytest.raises(ConfigError, match="not finite on made-up bags"):
        rehearse(MethodSpec(name=str(path)), in_dim=8, task=TASK, bags_per_step=4)


def test_training_settings_of_one_method_are_checked():
    assert override(TrainSpec(), {"epochs": 3, "lr": 1}, where="x") == TrainSpec(epochs=3, lr=1.0)
    with pytest.raises(ConfigError, match="Did you mean 'epochs'"):
        override(TrainSpec(), {"epoch": 3}, where="x")
    with pytest.raises(ConfigError, match="epochs"):
        override(TrainSpec(), {"epochs": "many"}, where="x")


def test_two_files_of_one_name_are_both_held_to_what_they_were(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "twin.py").write_text(folder)
    first, second = (str(tmp_path / folder / "twin.py") for folder in ("x", "y"))
    digests = MethodSpec(name=first, regularisers={second: {}}).files_sha256()
    assert set(digests) == {first, second}
    assert digests[first] != digests[second]


def test_own_files_have_their_whole_path_whatever_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reg.py").write_text(Path(inspect.getfile(find_regulariser("aem"))).read_text())
    (spec,) = resolve_methods([MethodSpec(name="abmil", regularisers={"reg.py": {}})])
    assert list(spec.regularisers) == [str(tmp_path / "reg.py")]
    assert spec.shown == "abmil+reg.py"
