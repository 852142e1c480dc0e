"""Efficient probing, SimPool, adaptive pooling, class attention: queries that look at frozen features."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from wsi_mil.errors import ConfigError
from wsi_mil.lookup import find_model
from wsi_mil.models._attention import normalised


@pytest.mark.parametrize(("form", "queries", "width"), [("ep_q1", 1, 8), ("ep_q4", 4, 8), ("ep_q2_dout2", 2, 4)])
def test_efficient_probing_and_all_gradients(form, queries, width, vectors, batch_of, close):
    v = vectors(form)
    model = find_model("efficient_probing").from_official(v.under("w."))
    assert (model.queries, model.value.out_features, model.norm) == (queries, width, "none")
    x = v["x"].clone().requires_grad_()
    output = model(batch_of(*x))
    close(output.bag_embedding[:, 0], v["out"], 1e-12)
    close(output.logits, v["out"], 1e-12)
    close(output.attention.reshape(2, 5, queries).transpose(1, 2), v["attn"], 1e-12)
    loss = output.bag_embedding.square().sum() + output.bag_embedding[..., 0].sum()
    close(loss, v["loss"], 1e-12)
    loss.backward()
    close(x.grad, v["gx"], 1e-12)
    close(model.query.grad, v["g.cls_token"], 1e-12)
    close(model.value.weight.grad, v["g.v.weight"], 1e-12)


@pytest.mark.parametrize(("in_dim", "queries"), [(1024, 32), (768, 32), (166, 2), (7, 7), (1, 1)])
def test_efficient_probing_fits_any_width(in_dim, queries):
    assert len(find_model("efficient_probing")(in_dim=in_dim, n_outputs=2).query) == queries


def test_efficient_probing_with_bias_and_given_head(batch_of):
    torch.manual_seed(0)
    weights = {"cls_token": torch.randn(1, 3, 6), "v.weight": torch.randn(6, 6), "v.bias": torch.randn(6)}
    weights |= {"head.weight": torch.randn(2, 6), "head.bias": torch.randn(2)}
    model, x = find_model("efficient_probing").from_official(weights), torch.randn(4, 6)
    attention = (weights["cls_token"][0] @ x.T / 6**0.5).softmax(dim=1)
    values = F.linear(x, weights["v.weight"], weights["v.bias"])
    z = torch.cat([attention[j] @ values[:, 2 * j : 2 * j + 2] for j in range(3)])
    wanted = F.linear(z, weights["head.weight"], weights["head.bias"])
    torch.testing.assert_close(model(batch_of(x)).logits[0], wanted)


@pytest.mark.parametrize("wrong", [{"queries": 5}, {"d_out": 3}, {"norm": "batch"}])
def test_efficient_probing_refuses_what_does_not_divide(wrong):
    with pytest.raises(ConfigError, match="efficient_probing"):
        find_model("efficient_probing")(in_dim=8, n_outputs=2, **wrong)


def test_input_norms_forget_the_scale_of_an_encoder():
    x = torch.randn(5, 12)
    for kind in ("layer", "l2"):
        ours = normalised(100 * x, kind)
        torch.testing.assert_close(ours, normalised(x, kind), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(ours.norm(dim=1), torch.full((5,), 12**0.5), rtol=1e-3, atol=1e-3)
    assert normalised(x, "none") is x


@pytest.mark.parametrize("form", ["none", "g1.25", "g2"])
def test_simpool(form, vectors, batch_of, close):
    v = vectors(f"simpool_{form}")
    gamma = None if form == "none" else float(v["gamma"])
    model = find_model("simpool").from_official(v.under("w."), gamma=gamma, gamma_minimum="batch")
    output = model(batch_of(*v["x"]))
    close(output.bag_embedding[:, 0], v["out"], 1e-12)
    close(output.logits, v["out"], 1e-12)


@pytest.mark.parametrize("form", ["g1.25", "g2"])
def test_simpool_by_default_takes_the_minimum_of_the_bag(form, vectors, batch_of):
    v = vectors(f"simpool_{form}")
    gamma = float(v["gamma"])
    own = find_model("simpool").from_official(v.under("w."), gamma=gamma)
    published = find_model("simpool").from_official(v.under("w."), gamma=gamma, gamma_minimum="batch")
    together = own(batch_of(*v["x"])).logits
    alone = torch.cat([published(batch_of(rows)).logits for rows in v["x"]])
    torch.testing.assert_close(together, alone)
    assert (together - v["out"]).abs().max() > 0.1


@pytest.mark.parametrize(("n", "heads", "gamma"), [(1, 1, None), (7, 2, None), (7, 4, 1.5), (1, 2, 2.0)])
def test_simpool_of_other_sizes(n, heads, gamma, batch_of):
    torch.manual_seed(0)
    names = ("norm_patches.weight", "norm_patches.bias", "wq.bias", "wk.bias")
    w = {name: torch.randn(8).double() for name in names}
    w |= {name: torch.randn(8, 8).double() for name in ("wq.weight", "wk.weight")}
    model = find_model("simpool").from_official(w, heads=heads, gamma=gamma)
    x = torch.randn(n, 8).double()
    u = F.layer_norm(x, (8,), w["norm_patches.weight"], w["norm_patches.bias"], 1e-6)
    q = F.linear(x.mean(dim=0), w["wq.weight"], w["wq.bias"]).reshape(heads, 1, -1)
    k = F.linear(u, w["wk.weight"], w["wk.bias"]).reshape(n, heads, -1).transpose(0, 1)
    a = (q @ k.transpose(1, 2) / (8 // heads) ** 0.5).softmax(dim=2)
    values = u.reshape(n, heads, -1).transpose(0, 1)
    z = a @ values if gamma is None else (a @ (values - values.min() + 1e-6) ** gamma) ** (1 / gamma)
    output = model(batch_of(torch.zeros(3, 8).double(), x))
    torch.testing.assert_close(output.logits[1], z.flatten(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(output.attention[3:], a[:, 0].T, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", [1, 1e5])
def test_simpool_learns_at_any_gamma(scale, batch_of):
    """1e-6, the lowest value, to the power of 8 is 0 in fp32, and the slope of its root infinite; not so in fp64."""
    torch.manual_seed(0)
    model = find_model("simpool")(in_dim=8, n_outputs=2, gamma=8.0)
    bags = [scale * torch.randn(1, 8), scale * torch.randn(6, 8)]

    def gradients():
        model.zero_grad()
        precise = [rows.to(model.head.weight) for rows in bags]
        model(batch_of(*precise)).logits.square().sum().backward()
        return [parameter.grad.double() for parameter in model.parameters()]

    ours = gradients()
    model.double()
    for found, wanted in zip(ours, gradients(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("form", "query"), [("mean", "mean"), ("idx0", "index")])
def test_adaptive_attention(form, query, vectors, batch_of, close):
    v = vectors(f"adapool_brothers_{form}")
    model = find_model("adaptive_attention").from_official(v.under("w."), heads=2, query=query)
    output = model(batch_of(*v["x"]))
    close(output.bag_embedding[:, 0], v["out"], 1e-12)
    close(output.logits, v["out"], 1e-12)


@pytest.mark.parametrize(
    ("n", "heads", "query"), [(1, 1, "mean"), (9, 4, "max_norm"), (9, 2, "index"), (2, 1, "index")]
)
def test_adaptive_attention_of_other_sizes(n, heads, query, batch_of):
    torch.manual_seed(0)
    w = {"attn.Q.weight": torch.randn(8, 8).double(), "attn.KV.weight": torch.randn(16, 8).double()}
    w |= {"attn.out.weight": torch.randn(8, 8).double()}
    model = find_model("adaptive_attention").from_official(w, heads=heads, query=query, query_index=3)
    x = torch.randn(n, 8).double()
    one = x[x.norm(dim=1).argmax()] if query == "max_norm" else x[min(3, n - 1)]
    asked = x.mean(dim=0) if query == "mean" else one
    q = (w["attn.Q.weight"] @ asked).reshape(heads, 1, -1)
    k, value = ((x @ part.T).reshape(n, heads, -1).transpose(0, 1) for part in w["attn.KV.weight"].chunk(2))
    z = w["attn.out.weight"] @ ((q @ k.transpose(1, 2) / 8**0.5).softmax(dim=2) @ value).flatten()
    wanted = z if query == "mean" else z + one
    ours = model(batch_of(torch.ones(2, 8).double(), x)).logits[1]
    torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", ["patchconvnet_agg", "patchconvnet_agg_multi"])
def test_class_attention(form, vectors, batch_of, close):
    v = vectors(form)
    model = find_model("class_attention").from_official(v.under("w."), cls_token=v["cls"][:1])
    assert model.per_class == form.endswith("multi")
    output = model(batch_of(*v["x"]))
    close(output.bag_embedding, v["out"], 1e-12)
    close(output.logits, v["out"].sum(dim=2) if model.per_class else v["out"][:, 0], 1e-12)


@pytest.mark.parametrize(
    ("n", "heads", "classes", "bias"), [(1, 1, None, True), (6, 4, None, False), (6, 2, 5, True), (1, 4, 2, False)]
)
def test_class_attention_of_the_whole_network(n, heads, classes, bias, batch_of):
    torch.manual_seed(0)
    d, tokens = 8, classes or 1
    shapes = {"attn.q": (d, d), "attn.k": (d, d), "attn.v": (d, d), "attn.proj": (d, d)}
    shapes |= {"mlp.fc1": (12, d), "mlp.fc2": (d, 12), "norm1": (d,), "norm2": (d,)}
    w = {f"{name}.weight": torch.randn(shape).double() for name, shape in shapes.items()}
    w |= {f"{name}.bias": torch.randn(shape[0]).double() for name, shape in shapes.items()}
    w |= {name: torch.randn(d).double() for name in ("gamma_1", "gamma_2")}
    if not bias:
        for name in "qkv":
            w[f"attn.{name}.bias"] = torch.zeros(d).double()
    whole = {
        f"blocks_token_only.0.{k}": t
        for k, t in w.items()
        if bias or not (k[:6] in ("attn.q", "attn.k", "attn.v") and "bias" in k)
    }
    whole |= {"cls_token": torch.randn(1, tokens, d).double()}
    whole |= {"norm.weight": torch.randn(d).double(), "norm.bias": torch.randn(d).double()}
    if classes is None:
        whole |= {"head.weight": torch.randn(3, d).double(), "head.bias": torch.randn(3).double()}
    else:
        whole |= {f"head.{c}.weight": torch.randn(1, d).double() for c in range(classes)}
        whole |= {f"head.{c}.bias": torch.randn(1).double() for c in range(classes)}
    model = find_model("class_attention").from_official(
        whole | {"total_norm.bias": w["gamma_1"]}, heads=heads, ignore=("total_norm*",)
    )

    def linear(name, rows):
        return F.linear(rows, w[f"{name}.weight"], w[f"{name}.bias"])

    x, c = torch.randn(n, d).double(), whole["cls_token"][0]
    u = F.layer_norm(torch.cat([c, x]), (d,), w["norm1.weight"], w["norm1.bias"])
    keys = u if classes is None else u[tokens:]
    q, k, value = (
        linear(f"attn.{m}", r).reshape(len(r), heads, -1).transpose(0, 1)
        for m, r in (("q", u[:tokens]), ("k", keys), ("v", keys))
    )
    a = (q @ k.transpose(1, 2) / (d // heads) ** 0.5).softmax(dim=2)
    c = c + w["gamma_1"] * linear("attn.proj", (a @ value).transpose(0, 1).reshape(tokens, d))
    hidden = F.gelu(linear("mlp.fc1", F.layer_norm(c, (d,), w["norm2.weight"], w["norm2.bias"])))
    c = F.layer_norm(c + w["gamma_2"] * linear("mlp.fc2", hidden), (d,), whole["norm.weight"], whole["norm.bias"])
    output = model(batch_of(torch.ones(4, d).double(), x))
    if classes is None:
        wanted = F.linear(c[0], whole["head.weight"], whole["head.bias"])
        torch.testing.assert_close(output.auxiliary["own_share"][1], a[:, 0, 0], rtol=1e-9, atol=1e-9)
        ours = a[:, 0, 1:] / a[:, 0, 1:].sum(dim=1, keepdim=True)
        torch.testing.assert_close(output.attention[4:], ours.T, rtol=1e-9, atol=1e-9)
    else:
        wanted = torch.stack(
            [(c[i] @ whole[f"head.{i}.weight"][0] + whole[f"head.{i}.bias"][0]) for i in range(classes)]
        )
    torch.testing.assert_close(output.logits[1], wanted, rtol=1e-9, atol=1e-9)


def test_class_attention_has_the_eps_that_is_asked_for(vectors, batch_of):
    """1e-5 as in the published classes; the published networks are made with 1e-6, which counts for small features."""
    v = vectors("patchconvnet_agg")
    batch = batch_of(0.01 * v["x"][0])
    logits = {}
    for eps in (1e-5, 1e-6):
        model = find_model("class_attention").from_official(v.under("w."), cls_token=v["cls"], norm_eps=eps)
        assert {norm.eps for norm in model.modules() if isinstance(norm, torch.nn.LayerNorm)} == {eps}
        logits[eps] = model(batch).logits
    assert (logits[1e-5] - logits[1e-6]).abs().max() > 1e-3
    default = find_model("class_attention").from_official(v.under("w."), cls_token=v["cls"])
    assert torch.equal(default(batch).logits, logits[1e-5])


def test_class_attention_refuses_a_head_of_another_width(vectors):
    v = vectors("patchconvnet_agg_multi")
    head = {f"head.{c}.weight": torch.zeros(1, 8) for c in range(3)} | {
        f"head.{c}.bias": torch.zeros(1) for c in range(3)
    }
    weights = v.under("w.") | {"cls_token": v["cls"][:1]} | head
    assert find_model("class_attention").from_official(weights).n_outputs == 3
    with pytest.raises(ConfigError, match=r"head\.1\.weight"):
        find_model("class_attention").from_official(weights | {"head.1.weight": torch.zeros(1, 9)})


def test_class_attention_needs_its_token(vectors):
    v = vectors("patchconvnet_agg")
    weights = v.under("w.")
    assert len(find_model("class_attention").from_official(weights, cls_token=v["cls"]).tokens) == 1
    with pytest.raises(ConfigError, match="differs between bags"):
        find_model("class_attention").from_official(weights, cls_token=torch.randn(2, 1, 8))
    with pytest.raises(ConfigError, match="cls_token"):
        find_model("class_attention").from_official(weights)


def test_class_queries_equal_a_plain_decoder(batch_of):
    torch.manual_seed(0)
    model = find_model("class_queries")(in_dim=5, n_outputs=3, hidden=8, heads=2, depth=2, dropout=0).double().eval()
    bags = [torch.randn(n, 5).double() for n in (1, 6)]
    output = model(batch_of(*bags))

    def heads(rows):
        return rows.reshape(len(rows), 2, 4).transpose(0, 1)

    for i, x in enumerate(bags):
        tiles, z = model.features(x), model.queries
        for layer in model.layers:
            q, k, value = map(heads, layer.mine(z).chunk(3, dim=1))
            among = ((q @ k.transpose(1, 2) / 2).softmax(dim=2) @ value).transpose(0, 1).reshape(3, 8)
            z = layer.norms[0](z + layer.mine_out(among))
            q, k, value = heads(layer.query(z)), heads(layer.key(tiles)), heads(layer.value(tiles))
            seen = ((q @ k.transpose(1, 2) / 2).softmax(dim=2) @ value).transpose(0, 1).reshape(3, 8)
            z = layer.norms[1](z + layer.out(seen))
            z = layer.norms[2](z + layer.forward_layers(z))
        torch.testing.assert_close(output.logits[i], model.head(z)[:, 0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(
    ("method", "params"),
    [("class_queries", {}), ("class_attention", {"per_class": True}), ("set_transformer", {"per_class": True})],
)
def test_what_is_drawn_is_the_attention_of_the_predicted_class_over_its_heads(method, params, heads, batch_of):
    torch.manual_seed(0)
    model = find_model(method)(in_dim=5, n_outputs=3, hidden=8, heads=heads, **params).eval()
    output = model(batch_of(*(3 * torch.randn(8, 6, 5))))
    output = replace(output, logits=torch.eye(3)[torch.arange(8) % 3])  # each class is predicted
    of_classes = output.attention.reshape(48, 3, heads).mean(dim=2)
    wanted = torch.cat([rows[:, i % 3] for i, rows in enumerate(of_classes.split(6))])
    torch.testing.assert_close(model.instance_scores(output, "attention"), wanted)
    for c in range(3):
        torch.testing.assert_close(model.instance_scores(output, "attention", c), of_classes[:, c])
    names = [column.name for column in model.score_columns(("a", "b", "c"))]
    assert names == ["attention", "attention:a", "attention:b", "attention:c"]


def test_latent_attention_equals_its_equation_and_is_additive(batch_of):
    torch.manual_seed(0)
    model = find_model("latent_attention")(in_dim=5, n_outputs=3, hidden=8, heads=2, latents=7).double().eval()
    x = torch.randn(6, 5).double()
    output = model(batch_of(x))
    tiles, book = (rows.reshape(len(rows), 2, 4).transpose(0, 1) for rows in (model.features(x), model.codebook))
    words = ((tiles @ book.transpose(1, 2) / 2).softmax(dim=2) @ book).transpose(0, 1).reshape(6, 8)
    wanted = model.head(model.mlp(words))
    torch.testing.assert_close(output.instance_logits, wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(output.logits[0], wanted.mean(dim=0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "method", ["class_attention", "adaptive_attention", "latent_attention", "class_queries", "set_transformer"]
)
def test_dropout_is_drawn_or_forced(method, batch_of):
    torch.manual_seed(0)
    model = find_model(method)(in_dim=6, n_outputs=2, hidden=8, dropout=0.5, **({"heads": 2})).train()
    batch = batch_of(torch.randn(5, 6), torch.randn(2, 6))
    mask = torch.rand(7, 8, generator=torch.Generator().manual_seed(3)) < 0.5
    drawn = model(batch, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(model(batch, forced_mask=mask).logits, drawn.logits, rtol=0, atol=0)
    assert not torch.allclose(model(batch).logits, drawn.logits)
