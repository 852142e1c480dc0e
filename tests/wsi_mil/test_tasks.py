import json
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from wsi_mil.errors import CohortError, ConfigError
from wsi_mil.lookup import find_model
from wsi_mil.table.labels import resolve_task
from wsi_mil.targets import CoxTarget, TargetSpec
from wsi_mil.tasks import Task, TaskSpec, check_training, class_task


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
    assert [task.encode({"grade": label}) for label in ("normal", "tumour")] == [(0.0,), (1.0,)]


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


BINARY = class_task("y", ("no", "yes"))
THREE = class_task("y", ("a", "b", "c"))


def test_an_unknown_label_is_refused():
    with pytest.raises(CohortError, match="'maybe' is not one of the classes no, yes"):
        BINARY.encode({"y": "maybe"})


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


def several():
    columns = {
        "er": ["pos", "neg", "pos", None],
        "grade": ["1", "2", "3", "2"],
        "ki67": ["10", "20", None, "40"],
        "months": ["5", "6", "7", "8"],
        "dead": ["1", "0", "1", "1"],
    }
    records = [Row(f"s{i}", f"p{i}", {name: cells[i] for name, cells in columns.items()}) for i in range(4)]
    spec = TaskSpec(
        target="er",
        others=(
            TargetSpec(target="grade", kind="ordinal"),
            TargetSpec(target="ki67", kind="regression"),
            TargetSpec(target="months", kind="survival", event="dead"),
        ),
    )
    return resolve_task(spec, records), records


def test_several_targets_share_one_head():
    task, records = several()
    assert (task.kind, task.target, task.n_values) == ("several", "er+grade+ki67+months", 5)
    assert task.n_outputs(find_model("abmil")) == 2 + 2 + 1 + 4
    assert task.n_outputs(find_model("focusmil")) == 1 + 2 + 1 + 4
    names = task.output_names(9)
    assert names[:3] == ("er: neg", "er: pos", "grade: above 1")
    assert len(names) == 9
    values = np.array([task.encode(record.values) for record in records])
    assert np.isnan(values[3, 0])
    assert np.isnan(values[2, 2])
    assert task.strata(values)[3] >= {"grade: 2"}
    assert not any(name.startswith("er:") for name in task.strata(values)[3])
    assert task.essential(values) == {"er: pos", "er: neg", "grade: 1", "grade: 2", "grade: 3"}


def test_a_missing_label_adds_nothing_to_the_loss():
    task, records = several()
    values = np.array([task.encode(record.values) for record in records])
    task = task.fitted(values)
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    loss = task.criterion(9)(logits, task.tensor(values))
    parts = []
    for (target, own), (_, own_logits) in zip(task.split(values), task.own_logits(logits), strict=True):
        there = ~np.isnan(own).any(axis=1)
        rows = torch.from_numpy(own[there])
        parts.append(target.criterion(own_logits.shape[1])(own_logits[torch.from_numpy(there)], rows))
    torch.testing.assert_close(loss, torch.stack(parts).mean(), check_dtype=False)
    changed = logits.clone()
    changed[3, :2] += 5  # the row without an er label
    torch.testing.assert_close(task.criterion(9)(changed, task.tensor(values)), loss)


def test_a_step_without_any_label_of_a_target_has_a_gradient_of_nothing():
    task, _ = several()
    values = np.array([[np.nan, 0.0, np.nan, np.nan, np.nan]])
    logits = torch.zeros(1, 9, requires_grad=True)
    task.criterion(9)(logits, task.tensor(values)).backward()
    assert logits.grad[0, [0, 1, 4, 5, 6, 7, 8]].abs().sum() == 0
    assert logits.grad[0, 2] != 0


@pytest.mark.parametrize("spec", [{}, {"kind": "ordinal", "classes": ("a", "b", "c")}])
def test_a_task_comes_back_from_its_configuration(spec):
    task = resolve(rows("a", "b", "c"), **spec)
    assert Task.from_config(json.loads(json.dumps(task.as_config()))) == task
    whole, records = several()
    whole = whole.fitted(np.array([whole.encode(record.values) for record in records]))
    assert Task.from_config(json.loads(json.dumps(whole.as_config()))) == whole


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"kind": "survival"}, "needs it"),
        ({"event": "dead"}, "belongs to kind survival"),
        ({"kind": "regression", "classes": ("a", "b")}, "has no classes"),
        ({"kind": "ordinal"}, "two classes, which have no order"),
        ({"others": ("grade",)}, "grade is a target twice"),
    ],
)
def test_settings_that_make_no_target_are_refused(spec, says):
    with pytest.raises(ConfigError, match=says):
        resolve(rows("1", "2"), **spec)


def test_coxs_likelihood_needs_a_risk_set_and_balance_needs_classes():
    task, _ = several()
    cox = Task(level="slide", targets=(CoxTarget(name="months", event="dead"),))
    with pytest.raises(ConfigError, match="give 8 or more"):
        check_training(cox, bags_per_step=4, balance="none")
    check_training(cox, bags_per_step=8, balance="none")
    with pytest.raises(ConfigError, match="needs classes"):
        check_training(task, bags_per_step=4, balance="sampler")


def test_ordered_classes_that_are_words_need_their_order():
    with pytest.raises(ConfigError, match=r"from low to high: task\.classes"):
        resolve(rows("low", "mid", "high"), kind="ordinal")
    assert resolve(rows("low", "mid", "high"), kind="ordinal", classes=("low", "mid", "high")).classes[0] == "low"


def test_one_number_written_in_two_ways_is_no_conflict():
    records = rows("10", "10.0", "7", patients=["p", "p", "q"])
    assert resolve(records, kind="regression", level="patient").kind == "regression"
    with pytest.raises(CohortError, match=r"p \(1 slide 10, 1 slide 11\)"):
        resolve(rows("10", "11", "7", patients=["p", "p", "q"]), kind="regression", level="patient")


@pytest.mark.parametrize("cell", ["1_000", "１２", "0x1f", "1,5", "nan", "½", ""])
def test_digits_are_not_guessed(cell):
    with pytest.raises(CohortError, match="is no number"):
        resolve(rows("1", cell, "3"), kind="regression")


@pytest.mark.parametrize("spec", [{"loss": "cox"}, {"kind": "survival", "event": "grade"}])
def test_a_loss_or_an_event_that_does_not_fit_is_refused(spec):
    with pytest.raises(ConfigError, match=r"task\.event is another column, and task\.loss is of kind survival"):
        resolve(rows("1", "2"), **spec)
