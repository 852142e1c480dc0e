from dataclasses import replace

import pytest
import torch

from wsi_mil.errors import ConfigError
from wsi_mil.methods import build, parse_method
from wsi_mil.models import _mammoth
from wsi_mil.models._anchor import Anchor
from wsi_mil.models._base import Progress
from wsi_mil.models._mammoth import MammothLayer, low_rank
from wsi_mil.models.mhim import MhimObjective
from wsi_mil.tasks import class_task

FILES = ["mammoth_slots", "mammoth_tiles", "mammoth_rms"]
TASK = class_task("y", ("a", "b"))


def layer(**settings):
    torch.manual_seed(0)
    sizes = {"experts": 3, "slots": 2, "heads": 2, "slot_dim": 8}
    return MammothLayer(12, 16, **sizes | settings).eval()


@pytest.mark.parametrize("name", FILES)
def test_routing_output_and_all_gradients(name, vectors, close):
    v = vectors(name)
    ours = MammothLayer.from_official(v.under("w/"))
    b, n, _ = v["x"].shape
    features, offsets = v["x"].flatten(0, 1), torch.arange(b + 1) * n
    logits = ours.routing_logits(features).reshape(v["routing_logits"].shape)
    close(logits, v["routing_logits"])
    close(logits.softmax(dim=1), v["dispatch"])
    close(logits.transpose(2, 3).flatten(3).softmax(dim=-1), v["combine"])
    out = ours(features, offsets)
    if name == "mammoth_tiles":
        out = ours.to_tiles(features, out, offsets)
    out = out.reshape(v["out"].shape)
    close(out, v["out"])
    loss = (out * v["R"]).mean()
    close(loss, v["loss"])
    loss.backward()
    buffers = {key: value for key, value in v.under("w/").items() if key.endswith("beta")}
    wanted = MammothLayer.from_official(v.under("g/") | buffers)
    for name, parameter in wanted.named_parameters():
        close(ours.get_parameter(name).grad, parameter.detach())


def test_weights_may_come_in_a_container_and_none_is_lost(vectors):
    weights = vectors("mammoth_slots").under("w/")
    wrapped = MammothLayer.from_official({"model": {f"module.{name}": value for name, value in weights.items()}})
    assert wrapped.layer_norm
    assert not MammothLayer.from_official(vectors("mammoth_rms").under("w/")).layer_norm
    with pytest.raises(ConfigError, match="extra"):
        MammothLayer.from_official(weights | {"extra": torch.zeros(1)})


@pytest.mark.parametrize(("sizes", "rank"), [((1024, 512, 256, 30), 17), ((32, 24, 16, 3), 3), ((16, 32, 31, 500), 1)])
def test_rank_keeps_the_number_of_weights(sizes, rank):
    assert low_rank(*sizes) == rank


def test_published_size():
    full = MammothLayer(1024, 512, experts=30, slots=10, heads=16, slot_dim=256)
    assert sum(parameter.numel() for parameter in full.parameters()) == 635_936


def test_slots_as_wide_as_the_layer_leave_no_rank():
    with pytest.raises(ConfigError, match="slot_dim=256"):
        low_rank(1024, 256, 256, 30)
    assert layer(slot_dim=16, rank=2).rank == 2


def test_order_copies_and_one_tile():
    ours, features = layer(), torch.randn(9, 12)
    slots = ours(features, torch.tensor([0, 9]))
    torch.testing.assert_close(ours(features[torch.randperm(9)], torch.tensor([0, 9])), slots, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours(features.repeat(3, 1), torch.tensor([0, 27])), slots, rtol=1e-4, atol=1e-6)
    one = ours(features[:1], torch.tensor([0, 1])).reshape(3, 2, 16)
    torch.testing.assert_close(one[:, 0], one[:, 1])


def test_a_neighbour_changes_nothing_in_either_form():
    ours, features = layer(), torch.randn(11, 12)
    both, offsets = torch.cat([features, 1e4 * torch.ones(5, 12)]), torch.tensor([0, 11, 16])
    slots, alone = ours(both, offsets), ours(features, offsets[:2])
    torch.testing.assert_close(slots[:1], alone)
    tiles = ours.to_tiles(both, slots, offsets)
    torch.testing.assert_close(tiles[:11], ours.to_tiles(features, alone, offsets[:2]))


def test_blocks_change_neither_tiles_nor_scores_nor_gradients(monkeypatch):
    ours, features, offsets = layer(), torch.randn(23, 12), torch.tensor([0, 20, 23])
    weights = torch.randn(2, 6, 2).softmax(dim=1)
    answers = []
    for block in (4096, 4):
        monkeypatch.setattr(_mammoth, "_BLOCK", block)
        monkeypatch.setattr(_mammoth, "_SMALL_BLOCK", block)
        ours.zero_grad()
        tiles = ours.to_tiles(features, ours(features, offsets), offsets)
        tiles.square().sum().backward()
        gradients = [parameter.grad.clone() for parameter in ours.parameters()]
        answers.append([tiles.detach(), ours.scores_of_tiles(features, weights, offsets), *gradients])
    for whole, parts in zip(*answers, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-5)


def test_scores_of_tiles_are_weights_times_mean_routing_and_sum_to_one():
    ours, features = layer(), torch.randn(7, 12)
    weights = torch.rand(1, 6, 2).softmax(dim=1)
    scores = ours.scores_of_tiles(features, weights, torch.tensor([0, 7]))
    dispatch = ours.routing_logits(features).softmax(dim=0).mean(dim=2).flatten(1)
    torch.testing.assert_close(scores, dispatch @ weights[0])
    torch.testing.assert_close(scores.sum(dim=0), torch.ones(2))


def progress():
    return Progress(step=0, total_steps=10, generator=torch.Generator().manual_seed(0))


def test_the_first_linear_layer_is_gone_and_the_method_sees_slots(batch_of):
    model, objective = build(parse_method("abmil+mammoth"), in_dim=32, task=TASK, seed=0)
    assert "features.linear.weight" not in dict(model.behind.named_parameters())
    batch, seen = batch_of(torch.randn(9, 32), torch.randn(4, 32)), []
    model.behind.register_forward_hook(lambda _model, arguments, _output: seen.append(arguments[0]))
    objective.loss(model.train(), batch, torch.tensor([0, 1]), progress())
    assert seen[0].lengths == [300, 300]
    assert seen[0].ids == batch.ids
    assert (seen[0].features >= 0).all()
    output = model.eval()(batch)
    assert output.attention.shape == (13, 1)
    torch.testing.assert_close(output.attention[:9].sum(dim=0), torch.ones(1))


def test_a_row_a_tile_keeps_the_method_s_own_scores(batch_of):
    spec = parse_method("abmil+mammoth")
    spec.regularisers["mammoth"]["keep_slots"] = False
    model, _ = build(spec, in_dim=32, task=TASK, seed=0)
    output = model.eval()(batch_of(torch.randn(9, 32)))
    scores = model.instance_scores(output, "contribution", 1)
    torch.testing.assert_close(scores.sum(), output.logits[0, 1])
    assert output.attention.shape == (9, 1)


@pytest.mark.parametrize("methods", ["acmil+mammoth+aem", "acmil+aem+mammoth"])
def test_other_terms_see_slots_wherever_they_stand(methods, batch_of):
    model, objective = build(parse_method(methods), in_dim=32, task=TASK, seed=0)
    batch = batch_of(torch.randn(1, 32))
    terms = objective.loss(model.train(), batch, torch.tensor([1]), progress())
    assert list(terms) == ["bag", "branches", "diversity", "aem"]
    assert terms["aem"].item() < -0.1  # one tile has no entropy, its 300 slots have
    groups = list(objective.parameter_groups(model))
    assert sorted(map(id, model.parameters())) == sorted(id(p) for group in groups for p in group["params"])


def copy_kept_by(objective):
    """The tensors of the anchor or the teacher that an objective keeps, wherever it is wrapped."""
    for part in objective.modules():
        if isinstance(part, Anchor):
            return {name: tensor.clone() for name, tensor in part.tensors.items()}
        if isinstance(part, MhimObjective):
            return {name: tensor.clone() for name, tensor in part.teacher.state_dict().items()}
    raise AssertionError("no slow copy")


@pytest.mark.parametrize("methods", ["abmil+anchor+mammoth", "abmil+mammoth+anchor", "asmil+mammoth", "mhim+mammoth"])
def test_slow_copies_work_behind_the_layer(methods, batch_of):
    spec = parse_method(methods)
    spec.regularisers.get("anchor", spec.objective)["momentum"] = 0.5
    model, objective = build(spec, in_dim=32, task=TASK, seed=0)
    batch = batch_of(torch.randn(9, 32), torch.randn(4, 32))
    optimizer = torch.optim.SGD(objective.parameter_groups(model), lr=0.1)
    before = copy_kept_by(objective)
    for _ in range(2):
        optimizer.zero_grad()
        terms = objective.loss(model.train(), batch, torch.tensor([0, 1]), progress())
        torch.stack(list(terms.values())).sum().backward()
        optimizer.step()
        objective.after_optimizer_step(model, batch, 0.1)
    after = copy_kept_by(objective)
    whole = methods == "abmil+mammoth+anchor"  # which holds the layer too
    model_now = (model if whole else model.behind).state_dict()
    assert after.keys() == before.keys() == model_now.keys()
    far = {name for name, now in model_now.items() if (now - before[name]).abs().max() > 1e-3}
    assert any(name.endswith("head.weight") for name in far)
    for name in far:  # the copy began as the model and follows it
        assert not torch.equal(after[name], before[name]), name


def test_a_method_without_a_first_layer_gets_one_in_front(batch_of):
    model, _ = build(parse_method("mean_pool+mammoth"), in_dim=32, task=TASK, seed=0)
    assert (model.behind.in_dim, model.in_dim) == (16, 32)
    batch = batch_of(torch.randn(9, 32))
    attention = model.eval()(batch).attention[:, 0]
    dispatch = model.layer.routing_logits(batch.features).softmax(dim=0).mean(dim=(1, 2, 3))
    torch.testing.assert_close(attention, dispatch)


@pytest.mark.parametrize("methods", ["psa+mammoth", "smabmil+mammoth", "abmil+sm+mammoth", "abmil+mammoth+sm"])
def test_slots_have_no_places(methods):
    with pytest.raises(ConfigError, match="keep_slots=False"):
        build(parse_method(methods), in_dim=32, task=TASK, seed=0)


@pytest.mark.parametrize("wrong", [{"heads": 3}, {"experts": 0}, {"slot_dim": 7, "heads": 2}, {"rank": 0}])
def test_wrong_settings_are_refused(wrong, refused):
    refused("abmil", next(iter(wrong)), regularisers={"mammoth": wrong})


def test_an_optimiser_of_the_method_s_own_moves_the_layer_too():
    task = class_task("label", ("a", "b"))
    spec = replace(parse_method("midam+mammoth"), objective={"optimizer": "sgd"})
    model, objective = build(spec, in_dim=32, task=task, seed=0)
    optimizer = objective.optimizer(model, lr=0.5, weight_decay=0.0)
    assert isinstance(optimizer, torch.optim.SGD)
    moved = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in (*model.parameters(), *objective.parameters()) if p.requires_grad} == set(map(id, moved))
    assert len(moved) == len(set(map(id, moved)))
    assert optimizer.param_groups[-1]["lr"] == 0.5
    plain, own = build(parse_method("abmil+mammoth"), in_dim=32, task=task, seed=0)
    assert own.optimizer(plain, lr=0.5, weight_decay=0.0) is None
