import math

import pytest
import torch

from wsi_mil.errors import ConfigError
from wsi_mil.lookup import find_model


def test_blocks_pooling_loss_and_all_gradients(vectors, batch_of, criterion, close, terms_of, same_gradients):
    v = vectors("ilra")
    model = find_model("ilra").from_official(v.under("w/"), heads=4)
    batch = batch_of(v["x"][0])
    output = model(batch)
    close(output.auxiliary["tiles"], v["after_gab"])
    close(output.bag_embedding, v["bag"])
    close(output.logits, v["logits"])
    terms = terms_of(model.objective(criterion(3)), model, batch, v["label"].long())
    close(terms["bag"], v["loss"])
    same_gradients(model, find_model("ilra").from_official(v.under("g/"), heads=4))


@pytest.mark.parametrize(("n", "latents", "heads"), [(1, 1, 2), (9, 5, 1), (30, 3, 4)])
def test_attention_is_torch_s_with_doubled_projections(n, latents, heads, batch_of):
    torch.manual_seed(0)
    model = find_model("ilra")(in_dim=6, n_outputs=2, hidden=8, heads=heads, latents=latents, layer_norm=False)
    tiles = torch.randn(n, 6)
    part = model.layers[0].forth
    plain = torch.nn.MultiheadAttention(8, heads, batch_first=True)
    plain.in_proj_weight.data = torch.cat([part.query.weight, part.key.weight, part.value.weight])
    plain.in_proj_bias.data = torch.cat([part.query.bias, part.key.bias, part.value.bias])
    plain.out_proj.load_state_dict(part.out.state_dict())
    own = part.own_query(model.layers[0].latents)
    mixed, _ = plain(own[None], part.own_key(tiles)[None], part.own_value(tiles)[None])
    attended = own + mixed[0]
    wanted = (attended + part.feed(attended).relu()) * torch.nn.functional.silu(part.gate(model.layers[0].latents))
    ours = part.gather(model.layers[0].latents, tiles, torch.tensor([0, n]))
    torch.testing.assert_close(ours[0], wanted)
    pooled = model(batch_of(tiles))
    torch.testing.assert_close(pooled.attention.sum(dim=0), torch.ones(heads))
    read = model.pool.value(model.pool.own_value(pooled.auxiliary["tiles"])).reshape(n, heads, -1)
    own = model.pool.own_query(model.seed)
    mixed = own + model.pool.out(torch.einsum("nh,nhd->hd", pooled.attention, read).reshape(1, -1))
    torch.testing.assert_close(pooled.bag_embedding[0], mixed + model.pool.feed(mixed).relu())


def test_first_weights_are_spread_as_published():
    torch.manual_seed(0)
    model = find_model("ilra")(in_dim=128, n_outputs=2, hidden=64, latents=16)
    block = model.layers[0]
    published = torch.nn.MultiheadAttention(64, 8)
    assert block.latents.abs().max().item() == pytest.approx(math.sqrt(6 / (16 * 64 + 64)), rel=0.05)
    assert model.seed.abs().max().item() == pytest.approx(math.sqrt(6 / (64 + 64)), rel=0.1)
    for part in (block.forth.query, block.forth.key, block.forth.value):
        assert part.weight.abs().max().item() == pytest.approx(published.in_proj_weight.abs().max().item(), rel=0.01)
        assert (part.bias == 0).all()
    assert block.forth.own_key.weight.std().item() == pytest.approx(math.sqrt(2 / (128 + 64)), rel=0.05)


def test_several_seeds_are_refused(vectors):
    weights = vectors("ilra").under("w/")
    with pytest.raises(ConfigError, match="2 pooling seeds"):
        find_model("ilra").from_official(weights | {"pooling.S": torch.zeros(1, 2, 16)}, heads=4)
