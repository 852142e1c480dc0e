import math
from dataclasses import replace

import pytest
import torch

from wsi_mil.bags import pack
from wsi_mil.lookup import find_model
from wsi_mil.models import psa
from wsi_mil.models._base import Progress
from wsi_mil.models._spatial import nearest_tiles

FILES = {"psa": "gaussian", "psa_exponential": "exponential"}


@pytest.fixture
def placed(vectors, batch_of):
    """A file of vectors, and its bag at its places."""

    def make(name):
        v = vectors(name)
        return v, replace(batch_of(v["x"][0]), grid_xy=v["coords"].long())

    return make


@pytest.mark.parametrize("name", FILES)
def test_logits_neighbours_diversity_and_all_gradients(name, placed, criterion, close, terms_of, same_gradients):
    v, batch = placed(name)
    model = find_model("psa").from_official(v.under("w/"), decay=FILES[name])
    assert model.ties == "file"
    first = model.blocks[0].decay
    close(first.radii(), v["local_k"])
    assert first.counts() == v["neighbours"].tolist()
    n = len(batch.features)
    assert torch.equal(nearest_tiles(batch, n, ties="file"), v["order"][0].long())
    output = model(batch)
    close(output.logits, v["logits"])
    close(model(batch, forced_neighbours=v["order"][0].long()).logits, v["logits"])
    close(output.auxiliary["diversity"], v["diversity_entropy"])
    objective = model.objective(criterion(model.n_outputs), diversity_weight=0.0)
    terms = terms_of(objective, model, batch, v["label"].long())
    close(terms["bag"], v["loss"])
    same_gradients(model, find_model("psa").from_official(v.under("g/")))
    full = model.objective(criterion(model.n_outputs))
    terms = terms_of(full, model, batch, v["label"].long())
    close(terms["diversity"], -0.001 * v["diversity_entropy"])


@pytest.mark.parametrize("decay", ["gaussian", "exponential", "inverse_quadratic"])
def test_the_radius_is_where_the_prior_is_a_thousandth(decay):
    part = psa._Decay(3, decay)
    part.lambdas.data = torch.tensor([0.0, 0.4, 1.0])
    for radius, rate in zip(part.radii(), part.rates(), strict=True):
        prior = part.log_prior(radius.square(), rate).exp() - 1e-6
        assert prior.item() == pytest.approx(1e-3, rel=1e-3)
    assert {round(part.radii().min().item(), 3), round(part.radii().max().item(), 3)} == {1.0, 25.0}


@pytest.mark.parametrize(
    ("decay", "radii", "single"),
    [
        ("gaussian", [6.5, 7.0, 7.5], 7.0),
        ("exponential", [7.3846, 6.8571, 6.4], 6.8571),
        ("inverse_quadratic", [6.5, 7.0, 7.5], 7.0),
    ],
)
def test_heads_start_evenly_around_seven_grid_steps(decay, radii, single):
    torch.testing.assert_close(psa._Decay(3, decay).radii(), torch.tensor(radii), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(psa._Decay(1, decay).radii(), torch.tensor([single]), rtol=1e-4, atol=1e-4)


def test_residual_blocks_of_the_adapter_by_their_published_names(placed):
    v, batch = placed("psa")
    first, second = torch.randn(2, 18, 18, generator=torch.Generator().manual_seed(0)) / 4
    residual = {"adapter.resBlocks.0.block.0.weight": first, "adapter.resBlocks.0.block.2.weight": second}
    plain, deeper = (find_model("psa").from_official(v.under("w/") | more) for more in ({}, residual))
    assert deeper.adapter_layers == 2
    tiles = plain.features(batch.features).relu()
    tiles = tiles + ((tiles @ first.T).relu() @ second.T).relu()
    seen = []
    deeper.blocks[0].register_forward_pre_hook(lambda _block, arguments: seen.append(arguments[0]))
    deeper(batch)
    torch.testing.assert_close(seen[0], tiles)


def test_counts_entropy_and_the_reach_of_lambda():
    part = psa._Decay(3, "gaussian")
    part.lambdas.data = torch.tensor([0.05, 0.175, 0.3])
    assert part.counts() == [15, 85, 211]
    part.lambdas.data = torch.zeros(3)
    assert part.diversity().item() == pytest.approx(0, abs=1e-4)
    part.lambdas.data = torch.tensor([0.0, 0.5, 1.0])
    assert part.diversity().item() == pytest.approx(math.log2(3), abs=1e-4)
    part.lambdas.data = torch.tensor([-0.2, 0.5, 1.3])
    (part.rates().sum() + part.diversity()).backward()
    assert part.lambdas.grad[[0, 2]].tolist() == [0, 0]
    assert part.lambdas.grad[1] != 0


def test_moving_and_turning_the_slide_changes_nothing_but_scaling_does(placed):
    v, batch = placed("psa")
    model = find_model("psa").from_official(v.under("w/"))
    model.blocks[0].decay.lambdas.data = torch.tensor([0.3, 0.4, 0.5])  # all 40 tiles, so no ties are cut
    logits = model(batch).logits

    def answer(grid_xy):
        return model(replace(batch, grid_xy=grid_xy)).logits

    torch.testing.assert_close(answer(batch.grid_xy + torch.tensor([100, -7])), logits)
    turned = torch.stack([-batch.grid_xy[:, 1], batch.grid_xy[:, 0]], dim=1)
    torch.testing.assert_close(answer(turned), logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(answer(3 * batch.grid_xy), logits, atol=1e-3)


def test_a_flat_prior_over_all_tiles_is_a_gaussian_kernel(placed):
    v, batch = placed("psa")
    model = find_model("psa").from_official(v.under("w/"))
    block = model.blocks[0]
    tiles = torch.randn(40, 18, generator=torch.Generator().manual_seed(0))
    block.decay.log_prior = lambda squares, rate: torch.zeros_like(squares)
    block.decay.counts = lambda: [40] * 3
    ours = block(tiles, nearest_tiles(batch, 40), batch.grid_xy)
    query, key, value = block.qkv(block.norm1(tiles)).reshape(40, 3, 3, 6).permute(1, 2, 0, 3)
    kernel = (-torch.cdist(query, key).square() / (2 * math.sqrt(6))).softmax(dim=-1) @ value
    wanted = tiles + block.proj(kernel.transpose(0, 1).flatten(1))
    torch.testing.assert_close(ours, wanted + block.mlp(block.norm2(wanted)), rtol=1e-4, atol=1e-5)


def test_chunks_change_neither_answer_nor_gradient(monkeypatch, placed):
    v, batch = placed("psa")
    model, answers = find_model("psa").from_official(v.under("w/")), []
    for held in (2**24, 900):
        monkeypatch.setattr(psa, "_HELD_VALUES", held)
        model.zero_grad()
        logits = model(batch).logits
        logits.square().sum().backward()
        answers.append([logits.detach(), *(p.grad.clone() for p in model.parameters())])
    for whole, parts in zip(*answers, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-5)


def test_slides_of_a_patient_stay_apart(placed):
    v, batch = placed("psa")
    model = find_model("psa").from_official(v.under("w/"))
    bag = next(iter(batch.bags()))
    one, other = bag.take(torch.arange(25)), bag.take(torch.arange(25, 40))
    joined = replace(batch, slide_index=(torch.arange(40) >= 25).long())
    apart = torch.cat([model(pack([part])).attention_logits for part in (one, other)])
    torch.testing.assert_close(model(joined).attention_logits, apart, rtol=1e-4, atol=1e-5)


def test_radii_have_a_learning_rate_of_their_own(criterion):
    model = find_model("psa")(in_dim=6, n_outputs=2, depth=2)
    others, ranges = model.objective(criterion(2), decay_lr=0.02).parameter_groups(model)
    assert ranges["lr"] == 0.02
    assert [p.shape for p in ranges["params"]] == [(3,), (3,)]
    assert len(others["params"]) + 2 == len(list(model.parameters()))


def test_one_training_step_moves_the_radii(placed, criterion):
    v, batch = placed("psa")
    model = find_model("psa").from_official(v.under("w/")).train()
    before = model.radii()
    objective = model.objective(criterion(3))
    optimizer = torch.optim.AdamW(objective.parameter_groups(model), lr=1e-4)
    progress = Progress(step=0, total_steps=1, generator=torch.Generator())
    sum(objective.loss(model, batch, v["label"].long(), progress).values()).backward()
    optimizer.step()
    moved = (model.radii() - before).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.24), rtol=1e-2, atol=1e-3)  # 24 steps a unit of lambda


@pytest.mark.parametrize("wrong", [{"decay": "linear"}, {"ties": "random"}, {"depth": 0}])
def test_wrong_settings_are_refused(wrong, refused):
    refused("psa", next(iter(wrong)), params=wrong)
