"""Long bags are worked off in pieces and computed again for the gradient; neither answer nor gradient may tell."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from wsi_mil.bags import pack
from wsi_mil.lookup import find_model
from wsi_mil.measuring.costs import made_up_bag
from wsi_mil.models import _recompute, _spatial, ilra, rrt, transmil
from wsi_mil.models._spatial import Smoothing, adjacency

METHODS = {
    "ilra": {"hidden": 16, "heads": 2, "latents": 3},
    "transmil": {"hidden": 16, "heads": 2, "landmarks": 4, "dropout": 0.4},
    "psa": {"heads": 2, "head_dim": 8},
    "rrt": {"hidden": 16, "heads": 2, "cross_heads": 2, "regions": 2, "dropout": 0.4},
}
KEPT = {"ilra": 3000, "transmil": 7000, "psa": 4000, "rrt": 5000, "smabmil": 1300}
"""More numbers a tile than a method keeps for the gradient on a long bag, and less than it would keep of everything."""


def answer_and_gradients(model, batch):
    """With dropout, drawn anew from the same seed."""
    model.zero_grad()
    output = model.train()(batch, generator=torch.Generator().manual_seed(5))
    (output.logits.square().sum() + output.attention_logits.sin().sum()).backward()
    return [output.logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("name", METHODS)
def test_pieces_change_neither_answer_nor_gradient(name, monkeypatch):
    """In fp64: pieces are summed in another order, and fp32 rounds by the size of the terms, not of a small sum."""
    torch.manual_seed(0)
    model = find_model(name)(in_dim=6, n_outputs=2, **METHODS[name]).double()
    batch = pack([made_up_bag(n, 6, seed=n) for n in (30, 1, 47)])
    batch = replace(batch, features=batch.features.double())
    whole = answer_and_gradients(model, batch)
    for room, constant, value in (
        *((room, "LONG", 20) for room in (_recompute, ilra, transmil)),
        (_recompute, "_ROWS", 7),
        (rrt, "_HELD_LOGITS", 900),
    ):
        monkeypatch.setattr(room, constant, value)
    torch.testing.assert_close(answer_and_gradients(model, batch), whole, rtol=1e-10, atol=1e-12)


def test_pieces_are_of_half_precision_both_times_where_the_forward_pass_was():
    torch.manual_seed(0)
    layer, gradients, seen = nn.Linear(5, 5), [], []

    def answer(some, _):
        seen.append(layer(some).dtype)
        return layer(some)

    for pieces in (False, True):
        layer.zero_grad()
        rows = torch.randn(9, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            first = _recompute.in_pieces(answer, rows, 4, learned=layer.parameters()) if pieces else layer(rows)
            total = (first * layer(rows)).float().sum()
        total.backward()
        gradients.append([rows.grad, layer.weight.grad.clone(), layer.bias.grad.clone()])
    assert seen == [torch.bfloat16] * 6  # three pieces, twice
    torch.testing.assert_close(gradients[1], gradients[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("mode", ["iterative", "exact"])
@pytest.mark.parametrize("held", [2**24, 40])
def test_gradients_of_smoothing_are_those_of_the_steps_written_out(held, mode, monkeypatch):
    monkeypatch.setattr(_spatial, "_SMOOTHED", held)
    batch = pack([made_up_bag(n, 5, seed=n) for n in (11, 6)])
    weights = adjacency(batch, 1.5, normalise="row" if mode == "iterative" else "symmetric")
    smooth = Smoothing(mode=mode, steps=4).double()
    wanted = torch.randn(17, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours = [batch.features.double().requires_grad_(), smooth.coefficient]
    answer = smooth(ours[0], weights, batch.offsets)
    (answer * wanted).sum().backward()
    values, gamma = batch.features.double().requires_grad_(), torch.ones((), dtype=torch.float64, requires_grad=True)
    dense = weights.to_dense().double()
    if mode == "exact":
        plain = torch.linalg.solve((1 + gamma) * torch.eye(17, dtype=torch.float64) - gamma * dense, values)
    else:
        alpha, plain = gamma / (1 + gamma), values
        for _ in range(4):
            plain = alpha * dense @ plain + (1 - alpha) * values
    (plain * wanted).sum().backward()
    torch.testing.assert_close(answer, plain)
    torch.testing.assert_close([part.grad for part in ours], [values.grad, gamma.grad])


@pytest.mark.parametrize("name", KEPT)
def test_a_long_bag_keeps_few_numbers_a_tile(name):
    tiles = _recompute.LONG + 500
    batch = pack([made_up_bag(tiles, 16, seed=0)])
    params = {"where": "early", "hidden": 256} if name == "smabmil" else {}
    if name == "transmil":
        params = {"hidden": 512}
    model = find_model(name)(in_dim=16, n_outputs=2, **params).train()
    kept: dict[int, int] = {}

    def note(tensor):
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(batch, generator=torch.Generator().manual_seed(0))
    assert output.logits.requires_grad
    assert 0 < sum(kept.values()) / tiles < KEPT[name]
