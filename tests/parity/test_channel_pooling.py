"""Mixed, gated and tree pooling, SoftPool, adaPool, GeM, GGeM, LSE, attentive statistics: closed forms."""

import math

import pytest
import torch

from wsi_mil.lookup import find_model
from wsi_mil.models.attentive_statistics import weighted_moments

CHANNELS = ["mixed_pool", "gated_pool", "tree_pool", "softpool", "adapool", "gem", "ggem"]


def identity(method, width=4, **kwargs):
    """The pooling alone: its logits are the pooled channels."""
    eye, zeros = torch.eye(width).double(), torch.zeros(width).double()
    kwargs = {"groups": 2} | kwargs if method == "ggem" else kwargs
    return find_model(method).from_official({"W": eye, "b": zeros}, **kwargs)


@pytest.mark.parametrize(
    ("method", "params", "name", "tolerance"),
    [
        ("softpool", {}, "softpool", 1e-12),
        ("adapool", {"beta": 1.0}, "edsc_channelwise", 1e-7),
        ("adapool", {"beta": 0.0}, "softpool", 1e-12),
        ("adapool", {"beta": 0.3}, "adapool_beta0.3", 1e-7),
        ("mixed_pool", {"mix": 0.25}, "mixed_a0.25", 1e-7),
        ("lse_pool", {"r": 1.0}, "lse_r1", 1e-6),
        ("lse_pool", {"r": 5.0}, "lse_r5", 1e-6),
    ],
)
def test_closed_forms(method, params, name, tolerance, vectors, batch_of, close):
    v = vectors("instance_pooling")
    output = identity(method, **params)(batch_of(*v["x"]))
    close(output.logits, v[name], tolerance)


@pytest.mark.parametrize(("method", "params"), [("gem", {}), ("ggem", {"groups": 3})])
@pytest.mark.parametrize("p", [1.0, 3.0])
def test_generalised_means(method, params, p, vectors, batch_of, close):
    v = vectors("instance_pooling")
    output = identity(method, p=p, **params)(batch_of(*(v["x"].abs() + 1e-6)))
    close(output.logits, v[f"gem_p{p:.0f}"], 1e-6)


def test_attentive_statistics(vectors, batch_of, close):
    v = vectors("instance_pooling")
    offsets = torch.tensor([0, 9, 18])
    attention = v["asp_logit"].softmax(dim=1).flatten(0, 1)
    close(weighted_moments(attention, v["x"].flatten(0, 1), offsets), v["asp_out"], 1e-5)
    each = attention.expand(-1, 4)
    close(weighted_moments(each, v["x"].flatten(0, 1), offsets, clamp=1e-12), v["asp_out"], 1e-12)
    settings = {"feature_layer": False, "clamp": 1e-12}
    model = find_model("attentive_statistics")(in_dim=4, n_outputs=2, **settings).double()
    output = model(batch_of(*v["x"]), forced_logits=v["asp_logit"].flatten(0, 1))
    close(output.bag_embedding[:, 0], v["asp_out"], 1e-12)


def test_uniform_attention_is_plain_statistics_and_long_bags_do_not_cancel():
    x = torch.randn(100_000, 2, generator=torch.Generator().manual_seed(0)) + torch.tensor([0.0, 300.0])
    moments = weighted_moments(torch.full((100_000, 1), 1e-5), x, torch.tensor([0, 100_000]))[0]
    torch.testing.assert_close(moments, torch.cat([x.mean(dim=0), x.std(dim=0, correction=0)]), rtol=1e-4, atol=1e-4)


def test_one_tile_has_no_spread_and_a_finite_slope():
    x = torch.randn(1, 3, requires_grad=True)
    moments = weighted_moments(torch.ones(1, 1), x, torch.tensor([0, 1]))[0]
    torch.testing.assert_close(moments, torch.cat([x[0], torch.full((3,), 1e-3)]))
    moments.sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(1, 3))


@pytest.mark.parametrize("context", [False, True])
@pytest.mark.parametrize("channel_wise", [False, True])
def test_attentive_statistics_equal_their_equation(channel_wise, context, batch_of):
    torch.manual_seed(0)
    settings = {"attention_dim": 6, "feature_layer": False, "channel_wise": channel_wise, "context": context}
    model = find_model("attentive_statistics")(in_dim=4, n_outputs=3, **settings).double().eval()
    bags = [torch.randn(n, 4).double() for n in (7, 1)]
    output = model(batch_of(*bags))
    for i, x in enumerate(bags):
        spread = (x.var(dim=0, correction=0) + 1e-6).sqrt()
        seen = torch.cat([x, x.mean(dim=0).expand_as(x), spread.expand_as(x)], dim=1) if context else x
        a = model.attention.weights(model.attention.tanh(seen).tanh()).softmax(dim=0)
        mean = (a * x).sum(dim=0)
        deviation = ((a * (x - mean) ** 2).sum(dim=0) + 1e-6).sqrt()
        torch.testing.assert_close(output.logits[i], model.head(torch.cat([mean, deviation])), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", CHANNELS)
def test_contributions_are_what_tiles_add_to_each_channel(method, batch_of):
    torch.manual_seed(1)
    model = identity(method)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    bags = [torch.rand(n, 4).double() for n in (1, 8, 150)]
    bags[1][:2] = bags[1].amax(dim=0)  # two tiles share the maximum
    output = model(batch_of(*bags))
    for c in range(4):
        scores = model.instance_scores(output, "contribution", c).split([1, 8, 150])
        torch.testing.assert_close(scores[1][0], scores[1][1])
        torch.testing.assert_close(torch.stack([rows.sum() for rows in scores]), output.logits[:, c])


@pytest.mark.parametrize("method", CHANNELS)
def test_pooled_lies_between_mean_and_maximum(method, batch_of):
    torch.manual_seed(2)
    x = torch.rand(40, 4).double()
    for seed in range(3):
        model = identity(method)
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if not name.startswith("head"):
                parameter.data += torch.randn_like(parameter)
        pooled = model(batch_of(x)).logits[0]
        low = x.min(dim=0).values if method in ("softpool", "adapool") else x.mean(dim=0)
        assert ((pooled >= low - 1e-9) & (pooled <= x.amax(dim=0) + 1e-9)).all()


@pytest.mark.parametrize(("method", "name"), [("gem", "p"), ("lse_pool", "r")])
def test_generalised_means_grow_from_mean_to_maximum(method, name, batch_of):
    x = torch.rand(30, 4, generator=torch.Generator().manual_seed(0)).double()
    sizes = [1.0, 2.0, 8.0, 1000.0] if method == "gem" else [1e-4, 1.0, 8.0, 1000.0]
    pooled = torch.stack([identity(method, **{name: size})(batch_of(x)).logits[0] for size in sizes])
    assert (pooled.diff(dim=0) > 0).all()
    torch.testing.assert_close(pooled[0], x.mean(dim=0), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(pooled[-1], x.amax(dim=0), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("method", [*CHANNELS, "lse_pool"])
def test_a_bag_twice_as_long_is_the_same_bag(method, batch_of):
    x = torch.rand(200, 4, generator=torch.Generator().manual_seed(0)).double()
    once, twice = identity(method)(batch_of(x, torch.cat([x, x]))).logits
    torch.testing.assert_close(once, twice)


def test_gates_start_in_the_middle_and_tree_merges_its_four_leaves(batch_of):
    x = torch.randn(250, 4, generator=torch.Generator().manual_seed(0)).double()
    middle = (x.amax(dim=0) + x.mean(dim=0)) / 2
    torch.testing.assert_close(identity("gated_pool")(batch_of(x)).logits[0], middle)
    torch.testing.assert_close(identity("mixed_pool")(batch_of(x)).logits[0], middle)
    soft = x.exp().mean(dim=0).log()
    top = x.sort(dim=0, descending=True).values[:3].mean(dim=0)
    model = identity("tree_pool")
    wanted = (x.amax(dim=0) + top + soft + x.mean(dim=0)) / 4
    torch.testing.assert_close(model(batch_of(x)).logits[0], wanted, rtol=1e-6, atol=1e-6)
    for bias, leaf in (
        ([50, 50, 0], x.amax(dim=0)),
        ([50, -50, 0], top),
        ([-50, 0, 50], soft),
        ([-50, 0, -50], x.mean(0)),
    ):
        model.gates.bias.data = torch.tensor(bias).double()
        torch.testing.assert_close(model(batch_of(x)).logits[0], leaf, rtol=1e-6, atol=1e-6)


def test_a_gate_sees_the_bag(batch_of):
    model = identity("gated_pool", per_channel=True)
    model.gate.weight.data[:, 8:] = 10.0  # the standard deviation
    flat, wide = torch.full((5, 4), 0.5).double(), torch.rand(5, 4).double() * 4
    model.gate.bias.data[:] = -3.0
    output = model(batch_of(flat, wide)).logits
    torch.testing.assert_close(output[0], flat[0])
    torch.testing.assert_close(output[1], wide.amax(dim=0), rtol=1e-2, atol=1e-2)


def test_groups_have_their_own_exponent(batch_of):
    model = identity("ggem", width=5, groups=2)
    assert model.group_of.tolist() == [0, 0, 0, 1, 1]
    model.rho.data = torch.tensor([-100.0, math.log(math.expm1(4))]).double()
    x = torch.rand(9, 5).double() + 0.1
    wanted = torch.cat([x[:, :3].mean(dim=0), (x[:, 3:] ** 5).mean(dim=0) ** 0.2])
    torch.testing.assert_close(model(batch_of(x)).logits[0], wanted)


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        ("mixed_pool", {"mix": 1.5}),
        ("adapool", {"beta": -0.1}),
        ("gem", {"p": 0.5}),
        ("ggem", {"groups": 9, "feature_layer": False}),
        ("lse_pool", {"r": 0.0}),
        ("tree_pool", {"top": 0.0}),
    ],
)
def test_wrong_settings_are_refused(method, wrong, refused):
    refused(method, "(?i)" + method.split("_")[0], params=wrong)
