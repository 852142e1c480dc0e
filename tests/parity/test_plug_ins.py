"""Plug-ins that alter a model or add a term: the Sm operator, neighbour smoothing, rectified attention, diversity."""

from dataclasses import replace

import pytest
import torch

from wsi_mil.contracts import Subject, check_law, sees_no_label, trains_every_parameter
from wsi_mil.errors import ConfigError
from wsi_mil.fitting.checkpoints import load_model, save_model
from wsi_mil.lookup import find_model, find_regulariser
from wsi_mil.methods import MethodSpec, build, parse_method, rehearse
from wsi_mil.models._base import Progress
from wsi_mil.models._spatial import Smoothing, adjacency
from wsi_mil.tasks import class_task

TASK = class_task("y", ("a", "b"))


@pytest.fixture
def batch(batch_of):
    rows = torch.arange(16)
    made = batch_of(torch.randn(12, 8, generator=torch.Generator().manual_seed(0)), torch.ones(4, 8))
    return replace(made, grid_xy=torch.stack([rows % 4, rows // 4], dim=1))


def made(name, plug_in, **settings):
    spec = MethodSpec(name=name, regularisers={plug_in: settings})
    model, objective = build(spec, in_dim=8, task=TASK, seed=0)
    return model.eval(), objective


def plain(name):
    return build(MethodSpec(name=name), in_dim=8, task=TASK, seed=0)[0].eval()


@pytest.mark.parametrize("name", ["abmil", "mean_pool", "transmil", "dtfd"])
def test_early_smoothing_is_the_method_on_smoothed_features(name, batch):
    model, _ = made(name, "sm", alpha=0.6)
    smooth = Smoothing(alpha=0.6)(batch.features, adjacency(batch, 1.5), batch.offsets)
    wanted = plain(name)(replace(batch, features=smooth)).logits
    torch.testing.assert_close(model(batch).logits, wanted)
    assert not torch.allclose(wanted, plain(name)(batch).logits)


@pytest.mark.parametrize("name", ["abmil", "acmil", "clam_mb"])
def test_late_smoothing_is_on_the_scores(name, batch):
    model, _ = made(name, "sm", alpha=0.6, where="late", mode="exact")
    before = plain(name)(batch).attention_logits
    wanted = Smoothing(alpha=0.6, mode="exact")(before, adjacency(batch, 1.5), batch.offsets)
    torch.testing.assert_close(model(batch).attention_logits, wanted)


def test_neighbour_smoothing_starts_as_the_method_and_ends_as_the_mean(batch):
    model, _ = made("abmil", "neighbour_smoothing")
    before = plain("abmil")(batch)
    torch.testing.assert_close(model(batch).attention_logits, before.attention_logits)
    model.neighbour_smoothing.amount.data.fill_(20.0)
    near = (torch.cdist(batch.grid_xy[:12].double(), batch.grid_xy[:12].double()) < 1.6).float()
    near.fill_diagonal_(0)
    wanted = near @ before.attention_logits[:12] / near.sum(dim=1, keepdim=True)
    torch.testing.assert_close(model(batch).attention_logits[:12], wanted)


def test_rectified_attention_is_relu_over_its_sum(batch):
    model, _ = made("acmil", "rectified_attention")
    scores = plain("acmil")(batch).attention_logits[:12]
    attention = model(batch).attention[:12]
    positive = scores.relu()
    wanted = torch.where((positive > 0).any(dim=0), positive / positive.sum(dim=0).clamp(min=1e-30), 1 / 12)
    torch.testing.assert_close(attention, wanted)
    assert (attention == 0).any()
    assert (attention > 0).any()


def test_a_bag_without_positive_scores_is_averaged(batch):
    model, _ = made("abmil", "rectified_attention")
    torch.nn.init.zeros_(model.attention.weights.weight)
    torch.nn.init.constant_(model.attention.weights.bias, -1.0)
    torch.testing.assert_close(model(batch).attention[:12], torch.full((12, 1), 1 / 12))


def test_diversity_is_that_of_the_columns(batch, criterion):
    model = find_model("abmil_mha")(in_dim=8, n_outputs=2).eval()
    objective = find_regulariser("attention_diversity")(model.objective(criterion(2)), weight=0.5)
    progress = Progress(step=0, total_steps=1, generator=torch.Generator().manual_seed(0))
    value = objective.loss(model, batch, torch.tensor([0, 1]), progress)["attention_diversity"]
    pairs = []
    for rows in model(batch).attention.split([12, 4]):
        unit = rows / rows.norm(dim=0)
        similar = unit.T @ unit
        pairs.append(similar[torch.triu(torch.ones(8, 8), diagonal=1).bool()].mean())
    torch.testing.assert_close(value, 0.5 * torch.stack(pairs).mean())


@pytest.mark.parametrize(
    "methods",
    ["abmil+sm+aem", "acmil+neighbour_smoothing+anchor", "clam_sb+rectified_attention+sm", "acmil+attention_diversity"],
)
def test_plug_ins_add_up_and_come_back_from_disk(methods, batch, tmp_path):
    spec = parse_method(methods)
    rehearse(spec, in_dim=8, task=TASK, bags_per_step=2)
    model, _ = build(spec, in_dim=8, task=TASK, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    save_model(tmp_path / "model.ckpt", model, method=spec, task=TASK)
    loaded, _ = load_model(tmp_path / "model.ckpt", torch.device("cpu"))
    assert torch.equal(loaded(batch).logits, model.eval()(batch).logits)


@pytest.mark.parametrize("plug_in", ["sm", "neighbour_smoothing", "rectified_attention", "mammoth", "anchor"])
@pytest.mark.parametrize("law", [trains_every_parameter, sees_no_label])
def test_laws_hold_with_a_plug_in(plug_in, law):
    result = check_law(law, Subject(cls=find_model("acmil"), wrap=find_regulariser(plug_in)))
    assert result.passed, result.message


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        ("mean_pool+neighbour_smoothing", "gated attention"),
        ("psa+rectified_attention", "gated attention"),
        ("dtfd+neighbour_smoothing", "a score for every tile"),
        ("mean_pool+attention_diversity", "needs attention"),
        ("abmil+attention_diversity", "this method has one"),
        ("abmil+sm+mammoth", "keep_slots=False"),
    ],
)
def test_what_does_not_go_together_is_refused_at_configuration(methods, said):
    with pytest.raises(ConfigError, match=said):
        rehearse(parse_method(methods), in_dim=8, task=TASK, bags_per_step=2)


@pytest.mark.parametrize("plug_in", ["sm", "neighbour_smoothing", "rectified_attention", "mammoth"])
def test_an_unaltered_model_is_refused(plug_in, criterion):
    model = find_model("abmil")(in_dim=8, n_outputs=2)
    with pytest.raises(ConfigError, match="together"):
        find_regulariser(plug_in)(model.objective(criterion(2))).check(model)


def test_differential_weights_are_signed_and_sum_to_one_minus_lambda(batch):
    model = plain("differential_attention")
    output = model(batch)
    lam = model.balance.sigmoid()
    assert lam.item() == pytest.approx(0.5)
    weights = output.auxiliary["weights"]
    torch.testing.assert_close(weights[:12].sum(), 1 - lam)
    first, second = output.auxiliary["both_attentions"][:12].T
    torch.testing.assert_close(weights[:12, 0], first - lam * second)
    torch.testing.assert_close(output.bag_embedding[0, 0], weights[:12, 0] @ model.features(batch.features[:12]))
    torch.nn.init.constant_(model.attention.weights.weight, 0.0)
    model.attention.weights.weight.data[1, 0] = 30.0
    assert (model(batch).auxiliary["weights"] < 0).any()
