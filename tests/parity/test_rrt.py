import math
from dataclasses import replace

import pytest
import torch

from wsi_mil.bags import pack
from wsi_mil.errors import ConfigError
from wsi_mil.lookup import find_model
from wsi_mil.models import rrt

FILES = {
    "rrt": {"regions": 2, "cross_heads": 4},
    "rrt_mlp_shortcut": {"regions": 4, "cross_heads": 1, "shortcut": True},
}


@pytest.mark.parametrize("name", FILES)
def test_each_block_and_all_gradients(name, vectors, batch_of, criterion, close, terms_of, same_gradients):
    v = vectors(name)
    settings = FILES[name] | {"pool_activation": "relu"}
    model = find_model("rrt").from_official(v.under("w/"), **settings)
    after = []
    for block in (*model.regional, model.across):
        block.register_forward_hook(lambda _block, arguments, change: after.append(arguments[0] + change))
    batch = batch_of(v["x"][0])
    output = model(batch)
    close(output.auxiliary["embedded"], v["embedded"])
    close(after[0], v["after_rmsa"])
    close(after[1], v["after_crmsa"])
    close(output.auxiliary["reembedded"], v["reembedded"])
    close(output.attention_logits[:, 0], v["attention_logits"])
    close(output.attention[:, 0], v["attention"])
    close(output.bag_embedding[0], v["bag"])
    close(output.logits, v["logits"])
    terms = terms_of(model.objective(criterion(model.n_outputs)), model, batch, v["label"].long())
    close(terms["bag"], v["loss"])
    same_gradients(model, find_model("rrt").from_official(v.under("g/"), **settings))


@pytest.mark.parametrize("order", ["file", "coords"])
def test_dropout_of_attention_is_that_of_the_published_layers(order, batch_of):
    torch.manual_seed(0)
    settings = {"heads": 2, "cross_heads": 2, "regions": 2, "cross_regions": 2, "epeg": 3, "representatives": 2}
    model = find_model("rrt")(in_dim=8, n_outputs=2, hidden=16, order=order, dropout=0.0, **settings).train()
    batch = batch_of(torch.randn(9, 8), torch.randn(5, 8))
    batch = replace(batch, grid_xy=torch.arange(13, -1, -1)[:, None].repeat(1, 2))
    rows = torch.arange(14).flip(0) if order == "coords" else torch.arange(14)  # the order in which tiles are embedded
    rows = torch.cat([rows[rows < 9], rows[rows >= 9]])
    regional, cross = torch.rand(1, 14, 16) < 0.1, torch.rand(2, 2, 4, 16) < 0.1
    ours = model(batch, forced_regional_mask=regional, forced_cross_mask=cross).auxiliary["reembedded"]
    first, wanted = model.features(batch.features).relu(), torch.empty(14, 16)
    answers = []
    model.across.attention.register_forward_hook(
        lambda _layer, _arguments, found: found.masked_fill(answers.pop(), 0) / 0.9
    )
    model.regional[0].drop.rate = model.across.drop.rate = 0.0
    for own, mask in zip((rows[:9], rows[9:]), cross, strict=True):
        tiles = first[own]
        tiles = tiles + model.regional[0](tiles).masked_fill(regional[0, own], 0) / 0.9
        answers.append(mask)
        wanted[own] = model.norm(tiles + model.across(tiles))
    torch.testing.assert_close(ours, wanted)


def test_dropout_is_drawn_in_training_and_only_there(batch_of):
    torch.manual_seed(0)
    model = find_model("rrt")(in_dim=8, n_outputs=2, hidden=16, regions=2, cross_regions=2, dropout=0.0)
    batch = batch_of(torch.randn(9, 8))
    assert model.random_in_training

    def answer(seed):
        return model(batch, generator=torch.Generator().manual_seed(seed)).logits

    assert not torch.equal(model.train() and answer(0), answer(1))
    assert torch.equal(answer(0), answer(0))
    assert torch.equal(model.eval() and answer(0), answer(1))
    assert torch.equal(model.train()(batch).logits, model.eval()(batch).logits)


@pytest.mark.parametrize(("n", "regions", "window", "filling"), [(64, 4, 2, 0), (65, 8, 2, 191), (1, 8, 1, 63)])
def test_squares_are_filled_as_stated(n, regions, window, filling):
    square = rrt._Square(n, regions)
    assert (square.window, square.filling) == (window, filling)
    rows = torch.arange(1.0, n + 1)[:, None]
    cut = square.cut(rows)
    assert cut.shape == (regions**2, window**2, 1)
    assert torch.equal(square.join(cut), rows)
    if n == 64:
        assert cut[1, :, 0].tolist() == [3, 4, 11, 12]


def test_without_epeg_order_within_a_window_does_not_matter():
    torch.manual_seed(0)
    block = rrt._Regional(8, 2, 2, 0, 4096, False)
    tiles, swapped = torch.randn(16, 8), torch.arange(16)
    swapped[[0, 5]] = torch.tensor([5, 0])  # both in the first window of 2 x 2
    torch.testing.assert_close(block(tiles[swapped])[swapped], block(tiles))
    with_epeg = rrt._Regional(8, 2, 2, 3, 4096, False)
    assert not torch.allclose(with_epeg(tiles[swapped])[swapped], with_epeg(tiles))


def test_epeg_of_zero_is_plain_attention_and_its_bias_cancels():
    torch.manual_seed(0)
    attention = rrt._Attention(8, 2, 5)
    groups = torch.randn(3, 7, 8)
    plain = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    plain.in_proj_weight.data, plain.in_proj_bias.data = attention.qkv.weight.data, attention.qkv.bias.data
    plain.out_proj.load_state_dict(attention.proj.state_dict())
    torch.nn.init.zeros_(attention.epeg.weight)
    torch.nn.init.constant_(attention.epeg.bias, 3.0)
    torch.testing.assert_close(attention(groups), plain(groups, groups, groups)[0])


def test_groups_of_windows_change_nothing(monkeypatch, batch_of):
    torch.manual_seed(0)
    model = find_model("rrt")(in_dim=8, n_outputs=2, hidden=16, heads=2, cross_heads=2, regions=2, epeg=3)
    batch, answers = batch_of(torch.randn(30, 8)), []
    for held in (2**25, 700):
        monkeypatch.setattr(rrt, "_HELD_LOGITS", held)
        model.zero_grad()
        logits = model(batch).logits
        logits.square().sum().backward()
        answers.append([logits.detach(), *(p.grad.clone() for p in model.parameters())])
    for whole, parts in zip(*answers, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [1, 5, 21, 70])
def test_strict_mask_does_not_read_the_filling(n):
    torch.manual_seed(0)
    parts = [rrt._Regional(8, 2, 4, 3, 4096, True), rrt._CrossRegional(8, 2, 4, 2, False, True)]
    tiles = torch.randn(n, 8)
    before = [part(tiles) for part in parts]

    class Wild(rrt._Square):
        def cut(self, rows):
            windows = super().cut(rows)
            return windows if rows.shape[1] == 1 else windows.masked_fill(~self.real(rows)[..., None], 50.0)

    original, rrt._Square = rrt._Square, Wild
    try:
        after = [part(tiles) for part in parts]
    finally:
        rrt._Square = original
    for one, other in zip(before, after, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other)


def test_order_coords_undoes_the_order_of_the_file(batch_of):
    torch.manual_seed(0)
    rows = torch.arange(40)
    bag = next(iter(batch_of(torch.randn(40, 8)).bags()))
    bag = replace(bag, grid_xy=torch.stack([rows % 7, rows // 7], dim=1), slide_index=(rows > 20).long())
    order = torch.randperm(40)
    small = {"in_dim": 8, "n_outputs": 2, "hidden": 16, "regions": 2, "cross_regions": 2}
    by_coords = find_model("rrt")(**small, order="coords").eval()
    torch.testing.assert_close(by_coords(pack([bag.take(order)])).logits, by_coords(pack([bag])).logits)
    after = by_coords(pack([bag.take(order)])).attention
    torch.testing.assert_close(after, by_coords(pack([bag])).attention[order])
    by_file = find_model("rrt")(**small).eval()
    by_file.load_state_dict(by_coords.state_dict())
    slides = [bag.take(rows[:21]), bag.take(rows[21:])]  # no window holds tiles of two slides
    apart = torch.cat([by_file(pack([slide])).auxiliary["reembedded"] for slide in slides])
    torch.testing.assert_close(by_coords(pack([bag])).auxiliary["reembedded"], apart)
    assert not torch.allclose(by_file(pack([bag.take(order)])).logits, by_file(pack([bag])).logits)


def test_first_weights_are_spread_as_published():
    torch.manual_seed(0)
    model = find_model("rrt")(in_dim=128, n_outputs=2, hidden=64, representatives=3, epeg=15)
    xavier = math.sqrt(2 / (128 + 64))
    assert model.features.weight.std().item() == pytest.approx(xavier, rel=0.05)
    assert model.regional[0].attention.epeg.weight.std().item() == pytest.approx(math.sqrt(2 / (15 + 8 * 15)), rel=0.2)
    assert model.across.phi[0].weight.abs().max().item() == pytest.approx(1 / math.sqrt(3), rel=0.05)
    assert all((parameter == 0).all() for name, parameter in model.named_parameters() if name.endswith("bias"))


def test_large_windows_are_refused_with_enough_regions(batch_of):
    batch = batch_of(torch.randn(300, 8))
    with pytest.raises(ConfigError, match="regions=5 or more"):
        find_model("rrt")(in_dim=8, n_outputs=2, hidden=16, regions=2, max_window=16)(batch)
    assert math.ceil(18 / 5) ** 2 <= 16
    find_model("rrt")(in_dim=8, n_outputs=2, hidden=16, regions=5, max_window=16)(batch)


@pytest.mark.parametrize("wrong", [{"epeg": 4}, {"hidden": 20}, {"order": "random"}, {"layers": 0}])
def test_wrong_settings_are_refused(wrong, refused):
    refused("rrt", next(iter(wrong)), params=wrong)
