import pytest
import torch
from torch.nn import functional as F

from wsi_mil.errors import ConfigError
from wsi_mil.lookup import find_model
from wsi_mil.models.set_transformer import MAX_TILES_OF_SAB

BLOCKS = ("isab", "pma", "sab")


def blocks(v, prefix=""):
    return {f"{b}.{name}": t for b in BLOCKS for name, t in v.under(f"{prefix}{b}.").items()}


def published(v, **kwargs):
    return find_model("set_transformer").from_official(blocks(v), heads=2, **kwargs)


@pytest.mark.parametrize("form", ["set_transformer", "set_transformer_ln"])
def test_blocks_and_all_gradients(form, vectors, batch_of, close, same_gradients):
    v = vectors(form)
    model = published(v)
    assert (model.norm, model.inducing, model.seeds, model.depth) == (form.endswith("ln"), 3, 2, 1)
    x = v["X"].clone().requires_grad_()
    batch = batch_of(*x)
    output = model(batch)
    close(output.auxiliary["tiles"], v["isab_out"])
    close(model.pooling.pool(model.seed, output.auxiliary["tiles"], batch.offsets)[0], v["pma_out"])
    close(output.bag_embedding, v["sab_out"])
    close(output.logits, v["sab_out"].flatten(1))
    weights = torch.arange(v["sab_out"].numel()).to(x).cos().reshape(v["sab_out"].shape)
    loss = (output.bag_embedding * weights).sum()
    close(loss, v["loss"])
    loss.backward()
    close(x.grad, v["gX"])
    for parameter in model.head.parameters():
        parameter.grad = parameter.detach().clone()  # the published blocks have no head
    same_gradients(model, find_model("set_transformer").from_official(blocks(v, "grad."), heads=2))


def test_tiles_in_another_order_move_and_the_pooled_stay(vectors, batch_of, close):
    v = vectors("set_transformer_ln")
    model, perm = published(v), v["perm"]
    output = model(batch_of(*(rows[perm] for rows in v["X"])))
    close(output.auxiliary["tiles"], v["isab_out"][:, perm])
    close(output.bag_embedding, v["sab_out"])


def mab(w, q, k, heads, norm):
    """The block as the paper writes it, for one bag: q (m, d), k (n, d)."""
    q, key, value = (F.linear(x, w[f"{n}.weight"], w[f"{n}.bias"]) for n, x in (("fc_q", q), ("fc_k", k), ("fc_v", k)))
    width = q.shape[1]
    parts = [x.reshape(len(x), heads, -1).transpose(0, 1) for x in (q, key, value)]
    attended = ((parts[0] @ parts[1].transpose(1, 2)) / width**0.5).softmax(dim=2) @ parts[2]
    out = q + attended.transpose(0, 1).reshape(len(q), width)
    out = F.layer_norm(out, (width,), w["ln0.weight"], w["ln0.bias"]) if norm else out
    out = out + F.linear(out, w["fc_o.weight"], w["fc_o.bias"]).relu()
    return F.layer_norm(out, (width,), w["ln1.weight"], w["ln1.bias"]) if norm else out


def random_mab(dq, dk, width, norm):
    shapes = {"fc_q": (width, dq), "fc_k": (width, dk), "fc_v": (width, dk), "fc_o": (width, width)}
    w = {f"{n}.weight": torch.randn(s).double() for n, s in shapes.items()}
    w |= {f"{n}.bias": torch.randn(width).double() for n in (*shapes, *(("ln0", "ln1") if norm else ()))}
    return w | ({f"{n}.weight": torch.randn(width).double() for n in ("ln0", "ln1")} if norm else {})


@pytest.mark.parametrize(
    ("sizes", "heads", "points", "seeds", "norm"),
    [((1,), 1, 1, 1, True), ((5, 1, 13), 4, 6, 1, False), ((2, 3), 2, 2, 3, True)],
)
def test_whole_network_of_other_sizes(sizes, heads, points, seeds, norm, batch_of):
    """enc: two ISAB; dec: PMA, two SAB, a Linear that reads each seed; computed naively bag by bag."""
    torch.manual_seed(1)
    width, dim, classes = 8, 5, 3
    m = {"enc.0.mab0": random_mab(width, dim, width, norm), "enc.0.mab1": random_mab(dim, width, width, norm)}
    m |= {n: random_mab(width, width, width, norm) for n in ("enc.1.mab0", "enc.1.mab1")}
    m |= {f"dec.{i}.mab": random_mab(width, width, width, norm) for i in range(3)}
    published = {f"{n}.{k}": t for n, w in m.items() for k, t in w.items()}
    published |= {f"enc.{i}.I": torch.randn(1, points, width).double() for i in range(2)}
    published |= {"dec.0.S": torch.randn(1, seeds, width).double()}
    published |= {"dec.3.weight": torch.randn(classes, width).double(), "dec.3.bias": torch.randn(classes).double()}
    model = find_model("set_transformer").from_official({f"module.{n}": t for n, t in published.items()}, heads=heads)
    bags = [torch.randn(n, dim).double() for n in sizes]
    output = model(batch_of(*bags))
    for i, x in enumerate(bags):
        for e in range(2):
            x = mab(
                m[f"enc.{e}.mab1"], x, mab(m[f"enc.{e}.mab0"], published[f"enc.{e}.I"][0], x, heads, norm), heads, norm
            )
        z = mab(m["dec.0.mab"], published["dec.0.S"][0], x, heads, norm)
        for d in (1, 2):
            z = mab(m[f"dec.{d}.mab"], z, z, heads, norm)
        z = F.linear(z, published["dec.3.weight"], published["dec.3.bias"])
        torch.testing.assert_close(output.logits[i], z.flatten(), rtol=1e-9, atol=1e-9)


def test_full_attention_equals_the_block_and_is_refused_for_long_bags(batch_of):
    torch.manual_seed(0)
    w = {f"enc.0.mab.{k}": t for k, t in random_mab(6, 6, 8, True).items()}
    pooled = random_mab(8, 8, 8, True)
    w |= {f"dec.0.mab.{k}": t for k, t in pooled.items()} | {"dec.0.S": torch.randn(1, 1, 8).double()}
    model = find_model("set_transformer").from_official(w, heads=4)
    bags = [torch.randn(n, 6).double() for n in (9, 4)]
    tiles = model(batch_of(*bags)).auxiliary["tiles"]
    own = {k.removeprefix("enc.0.mab."): t for k, t in w.items() if k.startswith("enc")}
    naive = torch.cat([mab(own, x, x, 4, True) for x in bags])
    torch.testing.assert_close(tiles, naive, rtol=1e-9, atol=1e-9)
    with pytest.raises(ConfigError, match="block=isab"):
        model(batch_of(torch.zeros(MAX_TILES_OF_SAB + 1, 6).double()))


def test_a_seed_for_each_class_is_read_by_its_own_row(batch_of):
    model = find_model("set_transformer")(in_dim=6, n_outputs=3, hidden=8, per_class=True, dropout=0).eval()
    output = model(batch_of(torch.randn(5, 6)))
    assert output.bag_embedding.shape == (1, 3, 8)
    wanted = (output.bag_embedding[0] * model.head.weight).sum(dim=1) + model.head.bias
    torch.testing.assert_close(output.logits[0], wanted)
    torch.testing.assert_close(model.instance_scores(output, "attention", 1), output.attention[:, 4:8].mean(dim=1))


def test_missing_and_left_keys_are_named(vectors):
    weights = blocks(vectors("set_transformer"))
    with pytest.raises(ConfigError, match="extra"):
        find_model("set_transformer").from_official(weights | {"extra": torch.zeros(1)}, heads=2)
    del weights["pma.mab.fc_o.bias"]
    with pytest.raises(ConfigError, match=r"pma\.mab\.fc_o\.bias"):
        find_model("set_transformer").from_official(weights, heads=2)
    zeros = find_model("set_transformer").from_official(blocks(vectors("set_transformer")), heads=2, n_outputs=2)
    assert zeros.head.weight.shape == (2, 16)
    assert not zeros.head.weight.any()
