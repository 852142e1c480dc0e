import dataclasses
import math
import sys
import types

import numpy as np
import pandas as pd
import pytest
import torch

from wsi_mil.errors import ConfigError
from wsi_mil.fitting.datasets import BagDataset, BagReader, Item
from wsi_mil.fitting.evaluation import answer_each, class_logits, probabilities
from wsi_mil.fitting.spec import TrainSpec
from wsi_mil.methods import MethodSpec, build, parse_method
from wsi_mil.models._base import BagObjective
from wsi_mil.statistics.ranking import auc
from wsi_mil.store import BagStore
from wsi_mil.tasks import class_task
from wsi_mil.training import FitFiles, fit, weights_seed, why_fixed

TASK = class_task("label", ("normal", "tumour"))
SPEC = TrainSpec(epochs=4, lr=1e-2, device="cpu", selection="none", checkpoint_seconds=1e9)
CPU = torch.device("cpu")


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def items(make_study, tmp_path_factory):
    """24 slides to train on and 24 to validate on, of 48 patients."""
    _, bags = make_study(tmp_path_factory.mktemp("study"), patients=48, signal=5.0)
    store = BagStore(bags)
    named = [Item(id=s, patient=s[:3], slide_ids=(s,), values=(float(i % 2),)) for i, s in enumerate(store.ids())]
    reader = BagReader(store, cache="ram")
    return BagDataset(reader, named[:24]), BagDataset(reader, named[24:])


@pytest.fixture(scope="module")
def contrary(items):
    """A validation part with all labels wrong: the longer one trains the worse it looks."""
    flipped = [dataclasses.replace(item, values=(1 - item.values[0],)) for item in items[1].items]
    return BagDataset(items[1].reader, flipped)


@pytest.fixture
def train(items, tmp_path):
    """Train a method and return (model, selection, log)."""

    def run(spec=SPEC, *, method="abmil", seed=0, train=items[0], validation=None, wrap=None, name="a", **options):
        method = parse_method(method) if isinstance(method, str) else method
        model, objective = build(method, in_dim=16, task=TASK, seed=weights_seed(seed))
        objective = objective if wrap is None else wrap(objective)
        files = FitFiles(resume=tmp_path / name / "resume.ckpt", log=tmp_path / name / "log.csv")
        validation = BagDataset(train.reader, ()) if validation is None else validation
        settings = {"balance": "none", "seed": seed, "files": files} | options
        selection = fit(model, objective, task=TASK, train=train, validation=validation, spec=spec, **settings)
        return model, selection, pd.read_csv(settings["files"].log)

    return run


class Wrapped(BagObjective):
    """The objective of another one, with an eye on it."""

    def __init__(self, inner, *, on_loss=None, on_update=None, both=False, tiles=None):
        super().__init__(inner.criterion)
        self.inner, self.on_loss, self.on_update = inner, on_loss, on_update
        self.needs_both_classes, self.tiles_per_bag = both, tiles

    def loss(self, model, batch, target, progress):
        if self.on_loss:
            self.on_loss(model, batch, target, progress)
        return self.inner.loss(model, batch, target, progress)

    def after_optimizer_step(self, model, batch, lr):
        if self.on_update:
            self.on_update(lr)


def same(one, two):
    one, two = one.state_dict(), two.state_dict()
    return all(torch.equal(one[name], two[name]) for name in one)


def auc_of(model, dataset):
    answers = [found for _, found in answer_each(model, dataset, device=CPU)]
    return auc(dataset.values[:, 0] == 1, probabilities(answers, TASK)[:, 1])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_planted_signal_is_learned_on_unseen_bags(train, items, precision):
    model, _, log = train(dataclasses.replace(SPEC, epochs=8, precision=precision))
    assert auc_of(model, items[1]) > 0.95
    assert log["loss"].iloc[-1] < 0.5 * log["loss"].iloc[0]


def test_the_same_seed_gives_the_same_weights_and_another_one_others(train):
    assert same(train(name="a")[0], train(name="b")[0])
    assert not same(train(name="c")[0], train(seed=1, name="d")[0])


def test_global_randomness_and_settings_are_left_as_they_were(train):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    train()
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory is True


def test_accumulated_gradients_are_those_of_the_large_step(train):
    def gradients(bags, passes):
        seen = []

        def watch(model, batch, target, progress):
            if progress.step == 0:
                bias = model.head.bias
                bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))

        spec = dataclasses.replace(SPEC, clip_norm=None, bags_per_step=bags, accumulate=passes, epochs=2)
        log = train(spec, name=f"{bags}x{passes}", wrap=lambda o: Wrapped(o, on_loss=watch))[2]
        return torch.stack(seen[passes - 1 :: passes]), log["loss"]

    (large, large_loss), (small, small_loss) = gradients(6, 1), gradients(2, 3)
    assert large.shape == small.shape == (8, 2)
    torch.testing.assert_close(small, large, rtol=0.01, atol=1e-4)
    np.testing.assert_allclose(small_loss, large_loss, rtol=0.01)


def test_the_learning_rate_falls_along_half_a_cosine(train):
    rates = []
    train(dataclasses.replace(SPEC, bags_per_step=8), wrap=lambda o: Wrapped(o, on_update=rates.append))
    steps = 4 * 3
    assert rates == pytest.approx([1e-2 * 0.5 * (1 + math.cos(math.pi * i / steps)) for i in range(steps)])


def test_objectives_hear_of_each_optimiser_step_once(train):
    rates, losses = [], []
    spec = dataclasses.replace(SPEC, epochs=1, bags_per_step=4, accumulate=4)
    train(spec, wrap=lambda o: Wrapped(o, on_update=rates.append, on_loss=lambda *_: losses.append(1)))
    assert (len(losses), len(rates)) == (6, 2)


def test_progress_counts_forward_passes_and_gives_each_its_own_randomness(train):
    seen = []

    def look(model, batch, target, progress):
        seen.append((progress.step, progress.total_steps, torch.rand(1, generator=progress.generator).item()))

    train(dataclasses.replace(SPEC, epochs=2, bags_per_step=12), wrap=lambda o: Wrapped(o, on_loss=look))
    assert [(step, total) for step, total, _ in seen] == [(i, 4) for i in range(4)]
    assert len({drawn for *_, drawn in seen}) == 4


@pytest.mark.parametrize(("cap", "own"), [(3, None), (None, 3), (3, 9)])
def test_the_cap_holds_in_training_and_never_in_evaluation(train, items, cap, own):
    longest = []
    spec = dataclasses.replace(SPEC, epochs=1, tile_cap=cap)
    look = lambda model, batch, target, progress: longest.append(max(batch.lengths))  # noqa: E731
    model, *_ = train(spec, wrap=lambda o: Wrapped(o, on_loss=look, tiles=own))
    assert max(longest) == 3
    sizes = [len(bag) for bag, _ in answer_each(model, items[1], device=CPU)]
    assert max(sizes) > 9


def test_a_method_that_compares_classes_gets_both_in_each_step(train):
    seen = []
    look = lambda model, batch, target, progress: seen.append(set(target.tolist()))  # noqa: E731
    train(dataclasses.replace(SPEC, bags_per_step=2), wrap=lambda o: Wrapped(o, on_loss=look, both=True))
    assert all(classes == {0, 1} for classes in seen)
    with pytest.raises(ConfigError, match="at least 2"):
        train(dataclasses.replace(SPEC, bags_per_step=1), wrap=lambda o: Wrapped(o, both=True))


def test_validation_chooses_the_epoch_with_the_least_loss_and_its_weights_are_kept(train, contrary):
    spec = dataclasses.replace(SPEC, selection="validation", epochs=6, patience=None)
    model, selection, log = train(spec, validation=contrary)
    assert selection.epoch == log["epoch"][log["val_loss"].argmin()] < 6
    assert (selection.chosen_by, selection.value) == ("validation loss", log["val_loss"].min())
    answers = [found for _, found in answer_each(model, contrary, device=CPU)]
    chosen = probabilities(answers, TASK)[np.arange(24), contrary.values[:, 0].astype(int)]
    assert -np.log(chosen).mean() == pytest.approx(selection.value, abs=1e-6)


def test_validation_can_choose_by_auc(train, contrary):
    spec = dataclasses.replace(SPEC, selection="validation", epochs=6, patience=None, metric="auc")
    _, selection, log = train(spec, validation=contrary)
    assert (selection.chosen_by, selection.value) == ("validation auc", log["val_auc"].max())


def test_training_stops_when_validation_does_not_improve(train, contrary):
    spec = dataclasses.replace(SPEC, selection="validation", epochs=60, patience=3)
    _, selection, log = train(spec, validation=contrary)
    assert selection.epochs_run == selection.epoch + 3 == len(log) < 60


def test_a_small_validation_part_chooses_nothing(items, train):
    few = BagDataset(items[1].reader, items[1].items[:19])
    spec = dataclasses.replace(SPEC, selection="validation")
    assert why_fixed(items[1].items, TASK, spec) is None
    assert "9 of tumour" in why_fixed(few.items, TASK, spec)
    _, selection, log = train(spec, validation=few)
    assert (selection.epoch, selection.metric) == (4, None)
    assert "fewer than 10" in selection.chosen_by
    assert log["val_loss"].notna().all()


@pytest.mark.parametrize("bags_per_step", [1, 5])
def test_validation_figures_are_those_of_the_whole_part_and_not_means_over_batches(train, items, bags_per_step):
    spec = dataclasses.replace(SPEC, epochs=1, lr=1e-3, bags_per_step=bags_per_step)
    model, _, log = train(spec, validation=items[1])
    assert log["val_auc"].iloc[-1] == auc_of(model, items[1])


def test_the_validation_part_never_trains(train, items):
    with_part = train(validation=items[1], name="a")[0]
    assert same(with_part, train(name="b")[0])


def jitter(model, *_):
    """Global randomness, as a careless method would use it."""
    weights = next(model.parameters())
    weights.data += 0.01 * torch.randn_like(weights)


@pytest.mark.parametrize("stop_at", [1, 5, 9, 12])
def test_a_training_killed_at_any_step_ends_with_the_same_bytes(train, items, stop_at):
    spec = dataclasses.replace(SPEC, epochs=2, selection="validation", accumulate=2, tile_cap=4)
    method = MethodSpec(name="abmil", params={"dropout": 0.25})
    options = {"validation": items[1], "method": method}
    whole = train(spec, **options, name="whole", wrap=lambda o: Wrapped(o, on_loss=jitter))
    calls, resumed = [], []

    def die(*_):
        calls.append(1)
        if len(calls) == stop_at:
            raise Killed
        jitter(*_)

    def go_on(*_):
        resumed.append(1)
        jitter(*_)

    spec = dataclasses.replace(spec, checkpoint_seconds=0.0)
    with pytest.raises(Killed):
        train(spec, **options, wrap=lambda o: Wrapped(o, on_loss=die))
    torch.rand(100)
    model, selection, log = train(spec, **options, wrap=lambda o: Wrapped(o, on_loss=go_on))
    assert same(model, whole[0])
    assert selection == whole[1]
    pd.testing.assert_frame_equal(log, whole[2], check_exact=True)
    assert stop_at - 2 <= 12 - len(resumed) <= stop_at


def test_a_loss_that_is_not_finite_stops_with_the_cure(train):
    def spoil(model, batch, target, progress):
        if progress.step == 3:
            next(model.parameters()).data.fill_(float("nan"))

    with pytest.raises(ConfigError, match=r"epoch 1, step 4.*train\.lr"):
        train(wrap=lambda o: Wrapped(o, on_loss=spoil))


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"epochs": 0}, "epochs"),
        ({"seeds": ()}, "seeds"),
        ({"seeds": (1, 1)}, "seeds"),
        ({"lr": 0.0}, "lr"),
        ({"precision": "fp16", "device": "cpu"}, "bf16"),
    ],
)
def test_settings_that_no_training_can_have_are_refused(setting, told):
    with pytest.raises(ConfigError, match=told):
        TrainSpec(**setting).check()


def test_a_missing_tensorboard_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"wsi-mil\[track\]"):
        TrainSpec(tensorboard=True).check()


def test_curves_are_written_once_an_epoch_also_after_a_restart(train, tmp_path, monkeypatch):
    written, opened = [], []

    class Writer:
        def __init__(self, log_dir, purge_step):
            opened.append((log_dir, purge_step))

        def add_scalar(self, name, value, global_step):
            written.append((name, global_step))

        def close(self):
            written.append("closed")

    def die(model, batch, target, progress):
        if progress.step == 14:
            raise Killed

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    spec = dataclasses.replace(SPEC, tensorboard=True, checkpoint_seconds=0.0)
    spec.check()
    files = FitFiles(resume=tmp_path / "b/resume.ckpt", log=tmp_path / "b/log.csv", tensorboard=tmp_path / "boards")
    with pytest.raises(Killed):
        train(spec, files=files, wrap=lambda o: Wrapped(o, on_loss=die))
    train(spec, files=files, wrap=Wrapped)
    assert opened == [(str(tmp_path / "boards"), 1), (str(tmp_path / "boards"), 3)]
    assert [entry for entry in written if entry[0] == "loss"] == [("loss", epoch) for epoch in (1, 2, 3, 4)]
    assert written[-1] == "closed"


def test_files_of_a_method_with_one_output_hold_a_column_a_class(train, items):
    model, *_ = train(method="focusmil")
    answers = [found for _, found in answer_each(model, items[1], device=CPU)]
    assert answers[0].logits.shape == (1,)
    shares = probabilities(answers, TASK)
    assert shares.shape == (24, 2)
    np.testing.assert_allclose(shares.sum(1), 1)
    np.testing.assert_allclose(class_logits(answers, TASK)[:, 1], [float(a.logits[0]) for a in answers])
