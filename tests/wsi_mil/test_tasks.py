from dataclasses import dataclass, field

import pytest
import torch

from wsi_mil.errors import CohortError, ConfigError
from wsi_mil.lookup import find_model
from wsi_mil.tasks import Task, TaskSpec, resolve_task


@dataclass(frozen=True)
class Row:
    slide_id: str
    patient: str
    values: dict = field(default_factory=dict)


def rows(*labels, column="grade", patients=None):
    patients = patients or [f"p{i}" for i in range(len(labels))]
    return [Row(f"s{i}", patients[i], {column: label}) for i, label in enumerate(labels)]


def resolve(records, **spec):
    return resolve_task(TaskSpec(target="grade", **spec), records)


def test_two_classes_are_binary_and_the_last_is_positive():
    task = resolve(rows("tumour", "normal", None, "normal"))
    assert (task.kind, task.level, task.classes, task.positive) == ("binary", "slide", ("normal", "tumour"), "tumour")
    assert [task.encode(label) for label in ("normal", "tumour")] == [0, 1]


def test_the_given_order_decides_the_positive_class():
    assert resolve(rows("a", "b"), classes=("b", "a")).positive == "a"


def test_three_classes_are_multiclass_and_numbers_sort_by_size():
    task = resolve(rows("10", "9", "2"))
    assert (task.kind, task.classes, task.positive) == ("multiclass", ("2", "9", "10"), None)


def test_several_slides_of_a_patient_need_a_level():
    records = rows("a", "b", "b", patients=["p", "q", "q"])
    with pytest.raises(CohortError, match=r"1 of 2 patients have several slides \(3 slides\)"):
        resolve(records)
    assert resolve(records, level="slide").level == "slide"
    assert resolve(records, level="patient").level == "patient"


def test_unlabelled_slides_ask_for_no_level():
    assert resolve(rows("a", "b", None, patients=["p", "q", "q"])).level == "slide"


def test_a_conflict_counts_only_at_level_patient():
    records = rows("a", "b", "a", patients=["p", "p", "q"])
    assert resolve(records, level="slide").classes == ("a", "b")
    with pytest.raises(CohortError, match=r"1 of 2 patients .* p \(1 slide a, 1 slide b\)"):
        resolve(records, level="patient")


@pytest.mark.parametrize(
    ("records", "spec", "says"),
    [
        (rows("a", "b", column="grades"), {}, r"no column 'grade'.*Did you mean 'grades'.*It has grades"),
        (rows(None, None), {}, "all of 2 slides are without a label"),
        (rows("a", "a", "a"), {}, r"\(3 slides a\): one class only"),
        (rows("Tumour", "tumour", "b"), {}, r"'Tumour' and 'tumour' are one class to people"),
        (rows("a", "a", patients=["p", "p"]), {"level": "patient"}, r"\(1 patient a\): one class only"),
        (rows("a", "b", "c", "c"), {"classes": ("a", "b")}, "2 slides c in none of the given classes a, b"),
        (rows("a", "b"), {"classes": ("a", "b", "z")}, "nothing of the given classes z"),
        (rows(*map(str, range(30))), {}, "30 different values in 30 slides"),
    ],
)
def test_what_cannot_be_a_task_is_told_with_counts(records, spec, says):
    with pytest.raises(CohortError, match=says):
        resolve(records, **spec)


def test_classes_named_twice_are_a_wrong_setting():
    with pytest.raises(ConfigError, match="named twice"):
        resolve(rows("a", "b"), classes=("a", "b", "a"))


BINARY = Task(target="y", level="slide", classes=("no", "yes"))
THREE = Task(target="y", level="slide", classes=("a", "b", "c"))


def test_an_unknown_label_is_refused():
    with pytest.raises(CohortError, match="'maybe' is not one of the classes no, yes"):
        BINARY.encode("maybe")


def test_the_method_decides_the_width_of_a_binary_head():
    assert BINARY.n_outputs(find_model("abmil")) == 2
    assert BINARY.n_outputs(find_model("focusmil")) == 1
    assert THREE.n_outputs(find_model("focusmil")) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_one_and_two_outputs_mean_the_same(dtype):
    one = torch.tensor([[0.7], [-2.0]], dtype=dtype)
    two = torch.cat([torch.zeros_like(one), one], dim=1)
    probabilities = BINARY.probabilities(one)
    assert probabilities.dtype == torch.float32
    torch.testing.assert_close(probabilities, BINARY.probabilities(two))
    torch.testing.assert_close(probabilities[:, 1], one.float().sigmoid()[:, 0])
    target = torch.tensor([1, 0])
    for weights in (None, [0.5, 3.0]):
        losses = [BINARY.criterion(k, weights)(logits, target) for k, logits in ((1, one), (2, two))]
        assert losses[0].dtype == torch.float32
        torch.testing.assert_close(losses[0], losses[1])


def test_class_weights_act_on_a_step_of_one_bag():
    logits, target = torch.tensor([[0.2, 0.1, 0.4]]), torch.tensor([2])
    plain = THREE.criterion(3)(logits, target)
    torch.testing.assert_close(THREE.criterion(3, [1.0, 1.0, 4.0])(logits, target), 4 * plain)


def test_extreme_logits_stay_finite():
    for task, logits in ((BINARY, torch.tensor([[1e4], [-1e4]])), (THREE, torch.tensor([[1e4, 0, 0], [-1e4, 0, 0]]))):
        assert task.probabilities(logits).isfinite().all()
        assert task.criterion(logits.shape[1])(logits, torch.tensor([0, 1])).isfinite()


def test_wrong_widths_are_refused():
    with pytest.raises(ConfigError, match="3 outputs for 2 classes"):
        BINARY.criterion(3)
    with pytest.raises(ConfigError, match="2 class weights for 3 classes"):
        THREE.criterion(3, [1.0, 2.0])
    with pytest.raises(ConfigError, match="1 outputs for 3 classes"):
        THREE.probabilities(torch.zeros(2, 1))
