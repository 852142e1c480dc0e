from dataclasses import replace

import pytest
import torch

from wsi_mil.bags import Bag, pack, split
from wsi_mil.errors import ConfigError
from wsi_mil.lookup import find_model
from wsi_mil.models._spatial import Smoothing, adjacency, nearest_tiles, tile_edges

FILES = {
    "smabmil_early": {"where": "early"},
    "smabmil_late_exact": {"where": "late", "mode": "exact"},
    "smabmil_mid_sn": {"where": "mid", "alpha": 0.5},
}


def at(batch, coords):
    """The same tiles at these places of the grid."""
    return replace(batch, grid_xy=torch.as_tensor(coords).long())


def square(side, width=3, seed=0):
    rows = torch.arange(side * side)
    features = torch.randn(side * side, width, generator=torch.Generator().manual_seed(seed))
    grid_xy = torch.stack([rows % side, rows // side], dim=1)
    zero = torch.zeros_like(rows)
    return Bag(
        features=features, coords_l0=grid_xy, grid_xy=grid_xy, slide_index=zero, slide_ids=("a",), id=f"bag{seed}"
    )


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
def test_operator_as_published_as_released_and_exact(alpha, vectors, batch_of, close):
    v = vectors("sm_operator")
    u = v["U"][0]
    batch = at(batch_of(u), v["coords"])
    weights = adjacency(batch, 1.5)
    close(weights.to_dense(), v["adj"][0])

    def smooth(**settings):
        return Smoothing(alpha=alpha, **settings)(u, weights, batch.offsets)

    close(smooth(), v[f"paper_alpha{alpha}_T10"])
    close(smooth(mode="exact"), v[f"exact_alpha{alpha}"])
    close(smooth(legacy_torchmil_alpha=True), v[f"approx_alpha{alpha}_T10"])
    close(smooth(legacy_torchmil_alpha=True, steps=200), v[f"approx_alpha{alpha}_T200"])
    close(smooth(steps=200), v[f"exact_alpha{alpha}"])
    close(Smoothing()(u, weights, batch.offsets), v["approx_trainable_init"])


@pytest.mark.parametrize("name", FILES)
def test_released_model_and_all_gradients(name, vectors, batch_of, criterion, close, terms_of, same_gradients):
    v = vectors(name)
    model = find_model("smabmil").from_official(v.under("w/"), **FILES[name])
    batch = at(batch_of(v["x"][0]), v["coords"])
    output = model(batch)
    close(output.attention_logits[:, 0], v["attention_logits"][0])
    close(output.attention[:, 0], v["attention"][0])
    close(output.logits[0], v["logits"])
    close(model(batch, forced_adjacency=v["adj"][0].to_sparse()).logits[0], v["logits"])
    terms = terms_of(model.objective(criterion(1)), model, batch, v["label"].long())
    close(terms["bag"], v["loss"])
    gradients = {key: value for key, value in v.under("w/").items() if key.endswith(("_u", "_v"))} | v.under("g/")
    same_gradients(model, find_model("smabmil").from_official(gradients, **FILES[name]))


def test_the_paper_s_coefficient_is_the_default(vectors, batch_of):
    v = vectors("smabmil_early")
    batch = at(batch_of(v["x"][0]), v["coords"])
    ours, theirs = (
        find_model("smabmil").from_official(v.under("w/"), where="early", legacy_torchmil_alpha=legacy)
        for legacy in (False, True)
    )
    assert ours.smooth.effective_alpha.item() == pytest.approx(1.7 / 2.7)
    assert theirs.smooth.effective_alpha.item() == pytest.approx(1 / 2.7)
    assert not torch.allclose(ours(batch).logits, v["logits"], atol=1e-4)


def test_spectrum_energy_linearity_and_limits():
    batch = pack([square(5)])
    weights = adjacency(batch, 1.5).to_dense()
    values = torch.linalg.eigvalsh(weights)
    assert values.min() >= -1 - 1e-6
    assert values.max() <= 1 + 1e-6
    u, w = batch.features, torch.randn(25, 3)

    def energy(g):
        return (g * (g - weights @ g)).sum()

    for mode in ("iterative", "exact"):
        smooth = Smoothing(alpha=0.7, mode=mode)
        assert energy(smooth(u, weights, batch.offsets)) < energy(u)
        both = smooth(2 * u + w, weights, batch.offsets)
        torch.testing.assert_close(
            both, 2 * smooth(u, weights, batch.offsets) + smooth(w, weights, batch.offsets), rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(Smoothing(alpha=0.0, mode=mode)(u, weights, batch.offsets), u)


def test_constants_stay_on_a_ring_and_lone_tiles_stay_always():
    ring = torch.tensor([[0, 0], [1, 0], [1, 1], [0, 1], [9, 9]])
    bag = replace(square(5).take(torch.arange(5)), grid_xy=ring)
    batch = pack([bag])
    weights = adjacency(batch, 1.0)
    ones = torch.tensor([[1.0], [1.0], [1.0], [1.0], [5.0]])
    for mode in ("iterative", "exact"):
        torch.testing.assert_close(Smoothing(alpha=0.8, mode=mode)(ones, weights, batch.offsets), ones)


def test_bags_and_slides_do_not_touch():
    one, other = square(4, seed=1), square(3, seed=2)
    both = pack([one, other])
    for mode in ("iterative", "exact"):
        smooth = Smoothing(alpha=0.9, mode=mode)
        apart = [smooth(b.features, adjacency(pack([b]), 1.5), pack([b]).offsets) for b in (one, other)]
        torch.testing.assert_close(smooth(both.features, adjacency(both, 1.5), both.offsets), torch.cat(apart))
    patient = replace(one, slide_index=(torch.arange(16) >= 8).long(), slide_ids=("a", "b"))
    crossing = one.grid_xy[:, 1]
    edges = tile_edges(pack([patient]), 1.5)
    assert not ((crossing[edges[0]] < 2) != (crossing[edges[1]] < 2)).any()
    assert edges.shape[1] < tile_edges(pack([one]), 1.5).shape[1]


@pytest.mark.parametrize("radius", [1.0, 1.5, 2.3])
def test_edges_are_those_of_all_distances(radius):
    bag = square(6).take(torch.randperm(36, generator=torch.Generator().manual_seed(1))[:23])
    batch = pack([bag])
    distance = torch.cdist(bag.grid_xy.double(), bag.grid_xy.double())
    wanted = ((distance <= radius) & (distance > 0)).nonzero().T
    found = tile_edges(batch, radius)
    assert {*map(tuple, found.T.tolist())} == {*map(tuple, wanted.T.tolist())}
    assert found.shape == wanted.shape


def test_exact_gradients_are_those_of_the_inverse():
    batch = pack([square(4).take(torch.tensor([0, 1, 2, 5, 6, 11, 15]))])
    weights = adjacency(batch, 1.5)
    smooth = Smoothing(mode="exact")
    u = batch.features.double().requires_grad_()
    smooth.double()
    target = torch.randn(7, 3, dtype=torch.float64)
    (smooth(u, weights, batch.offsets) * target).sum().backward()
    v, gamma = u.detach().clone().requires_grad_(), torch.ones((), dtype=torch.float64, requires_grad=True)
    eye = torch.eye(7, dtype=torch.float64)
    (torch.linalg.solve((1 + gamma) * eye - gamma * weights.to_dense().double(), v) * target).sum().backward()
    torch.testing.assert_close(u.grad, v.grad)
    torch.testing.assert_close(smooth.coefficient.grad, gamma.grad)


def test_nearest_tiles_on_the_grid_are_those_of_all_distances():
    generator = torch.Generator().manual_seed(3)
    bag = square(20)
    keep = (torch.rand(400, generator=generator) < 0.4) & ~((bag.grid_xy[:, 0] > 4) & (bag.grid_xy[:, 1] < 9))
    rows = keep.nonzero()[:, 0]
    shuffled = rows[torch.randperm(len(rows), generator=generator)]
    batch = pack([square(2, seed=9), bag.take(shuffled)])
    places = bag.grid_xy[shuffled]
    raster = (places[:, 1] * 20 + places[:, 0]).argsort().argsort()
    squares = (places[:, None] - places).square().sum(dim=-1)
    for k in (1, 6, 40, len(rows)):
        wanted = (squares * len(rows) + raster).argsort(dim=1)[:, :k] + 4
        assert torch.equal(nearest_tiles(batch, k)[4:], wanted)
        by_file = (squares * len(rows) + torch.arange(len(rows))).argsort(dim=1)[:, :k] + 4
        assert torch.equal(nearest_tiles(batch, k, ties="file")[4:], by_file)
    assert (nearest_tiles(batch, 6)[:4, 4:] == -1).all()


@pytest.mark.parametrize("wrong", [{"alpha": 1.0}, {"steps": 0}, {"mode": "fast"}, {"where": "never"}])
def test_wrong_settings_are_refused(wrong, refused):
    refused("smabmil", next(iter(wrong)), params=wrong)


def test_weights_without_a_coefficient_need_the_alpha(vectors):
    with pytest.raises(ConfigError, match="alpha"):
        find_model("smabmil").from_official(vectors("smabmil_mid_sn").under("w/"), where="mid")


def test_bags_are_smoothed_each_for_itself_and_their_gradients_add_up(batch_of):
    places = [(i % 4, i // 4) for n in (9, 1, 14) for i in range(n)]
    batch = at(batch_of(torch.randn(9, 6), torch.randn(1, 6), torch.randn(14, 6)), places)
    smooth = Smoothing(alpha=None).double()
    values = batch.features.double().requires_grad_()
    together = smooth(values, adjacency(batch, 1), batch.offsets)
    alone = [
        smooth(rows.double(), adjacency(pack([bag]), 1), torch.tensor([0, len(rows)]))
        for bag, rows in zip(batch.bags(), split(batch.features, batch.offsets), strict=True)
    ]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-12, atol=1e-12)
    (whole,) = torch.autograd.grad(together.square().sum(), smooth.coefficient)
    parts = [torch.autograd.grad(rows.square().sum(), smooth.coefficient)[0] for rows in alone]
    torch.testing.assert_close(whole, torch.stack(parts).sum(), rtol=1e-12, atol=1e-12)
    assert whole.abs() > 1e-3
