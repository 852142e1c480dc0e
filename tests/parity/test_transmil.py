import pytest
import torch
from torch import nn

from wsi_mil.contracts import check_model
from wsi_mil.errors import ConfigError
from wsi_mil.lookup import find_model
from wsi_mil.models.transmil import iterative_pinv, scaled_softmax, square_side


@pytest.fixture
def published(vectors):
    return find_model("transmil").from_official(
        {"state_dict": {f"model.{k}": w for k, w in vectors("transmil").under("w/").items()}}
    )


@pytest.mark.parametrize("n", [1, 2, 5, 10, 25, 40, 63])
def test_whole_network(n, published, vectors, batch_of, close):
    v = vectors("transmil")
    assert (published.heads, published.landmarks, published.hidden) == (8, 32, 64)
    output = published(batch_of(v[f"N{n}_x"][0]))
    close(output.logits, v[f"N{n}_logits"])
    close(output.logits.softmax(dim=1), v[f"N{n}_prob"])


def test_bags_are_answered_as_if_alone(published, vectors, batch_of, close):
    v = vectors("transmil")
    output = published(batch_of(*v["batch2_x"]))
    close(output.logits[0], v["batch2_first_alone_logits"])
    assert (output.logits - v["batch2_logits"]).abs().max() > 1e-4


def test_attention_layer_and_the_class_tokens_row(published, vectors, close):
    v = vectors("transmil")
    out, seen = published.layers[0].attention(v["nystrom_in"][0])
    close(out, v["nystrom_out"])
    close(seen, v["nystrom_attn"][0, :, -40, -40:])


def test_position_encoding_and_pseudoinverse(published, vectors, close):
    v = vectors("transmil")
    close(published.position(v["ppeg_in"][0], 5), v["ppeg_out_5x5"])
    close(iterative_pinv(v["pinv_in"][0], 6), v["pinv_out_it6"])


@pytest.mark.parametrize("n", [1, 3, 12, 40])
def test_the_row_of_the_output_is_that_of_the_first_layer(n, published, vectors, batch_of):
    """The product of the three matrices, written out."""
    x = torch.randn(n, 20)
    output = published(batch_of(x))
    rows, side = published.features(x), square_side(n)
    tokens = torch.cat([published.class_token[None], rows, rows[: side**2 - n]])
    layer = published.layers[0]
    padded = nn.functional.pad(layer.norm(tokens), (0, 0, -len(tokens) % 32, 0))
    q, k, _ = layer.attention.to_qkv(padded).reshape(len(padded), 3, 8, 8).permute(1, 2, 0, 3)
    q_means, k_means = (part.reshape(8, 32, -1, 8).mean(dim=2) for part in (q, k))
    inverse = iterative_pinv(scaled_softmax(q_means, k_means, 8**-0.5), 6)
    full = scaled_softmax(q, k_means, 8**-0.5) @ inverse @ scaled_softmax(q_means, k, 8**-0.5)
    row = full[:, -len(tokens), -len(tokens) :][:, 1 : n + 1].T
    torch.testing.assert_close(output.auxiliary["class_attention"], row, rtol=1e-4, atol=1e-5)
    cut = row.clamp(min=1e-12)
    torch.testing.assert_close(output.attention, cut / cut.sum(dim=0), rtol=1e-3, atol=1e-5)


def test_gradients_are_those_of_the_matrices_written_out(batch_of):
    torch.manual_seed(0)
    model = find_model("transmil")(in_dim=6, n_outputs=2, hidden=16, heads=2).double()
    attention = model.layers[0].attention
    tokens = torch.randn(21, 16, dtype=torch.float64, requires_grad=True)
    padded = nn.functional.pad(tokens, (0, 0, 3, 0))
    q, k, v = attention.to_qkv(padded).reshape(24, 3, 2, 8).permute(1, 2, 0, 3)
    q_means, k_means = (part.reshape(2, 8, 3, 8).mean(dim=2) for part in (q, k))
    inverse = iterative_pinv(scaled_softmax(q_means, k_means, 8**-0.5), 6)
    full = scaled_softmax(q, k_means, 8**-0.5) @ inverse @ scaled_softmax(q_means, k, 8**-0.5)
    naive = (full @ v + attention.residual(v[None])[0]).transpose(0, 1).flatten(1)
    naive = attention.out(naive)[3:]
    wanted = torch.autograd.grad(naive.sin().sum() + full[:, 3, 3:].cos().sum(), [tokens, *attention.parameters()])
    out, seen = attention(tokens)
    ours = torch.autograd.grad(out.sin().sum() + seen.cos().sum(), [tokens, *attention.parameters()])
    for mine, theirs in zip(ours, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("n", "side"), [(1, 1), (2, 2), (4, 2), (5, 3), (9, 3), (10, 4), (100_000, 317), (99_856, 316)]
)
def test_square(n, side):
    assert square_side(n) == side


def test_order_matters_and_is_declared(published, batch_of):
    x = torch.randn(30, 20)
    assert (published(batch_of(x)).logits - published(batch_of(x.flip(0))).logits).abs().max() > 1e-2
    assert published.order_matters


def test_forced_dropout_is_the_drawn_one(batch_of):
    model = find_model("transmil")(in_dim=6, n_outputs=2, hidden=16, dropout=0.3).train()
    batch, generator = batch_of(torch.randn(5, 6), torch.randn(1, 6)), torch.Generator().manual_seed(3)
    drawn = model(batch, generator=torch.Generator().manual_seed(3))
    masks = [
        torch.stack([(torch.rand(drawn_rows, 16, generator=generator) < 0.3).expand(t, 16) for drawn_rows in (t, 1)])
        for t in (10, 2)
    ]  # the second layer answers for the class token alone
    forced = model.eval()(batch, forced_mask=torch.cat(masks, dim=1))
    torch.testing.assert_close(forced.logits, drawn.logits)
    assert not torch.equal(model(batch).logits, drawn.logits)


def test_a_long_bag_is_answered_and_trained_on_without_a_square_matrix(batch_of, criterion):
    """100,000 tiles: a matrix of tokens by tokens would take 40 GB a head, and every storage is looked at."""
    model = find_model("transmil")(in_dim=8, n_outputs=2, hidden=8, heads=1).train()
    x, largest = torch.randn(100_000, 8), [0]

    def keep(tensor):
        largest[0] = max(largest[0], tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(batch_of(x))
        loss = criterion(2)(output.logits, torch.tensor([1]))
    loss.backward()
    assert output.attention.shape == (100_000, 1)
    assert model.features.linear.weight.grad.isfinite().all()
    assert largest[0] <= 4 * 8 * 101_000


def test_heads_must_fit():
    with pytest.raises(ConfigError, match="heads"):
        find_model("transmil")(in_dim=6, n_outputs=2, hidden=20)
    with pytest.raises(ConfigError, match="square"):
        find_model("transmil")(in_dim=6, n_outputs=2, square="tiles")


@pytest.mark.parametrize(
    "params", [{"dropout": 0.0, "landmarks": 3}, {"square": "positions"}], ids=lambda params: "-".join(params)
)
def test_other_forms_obey_every_law(params):
    assert [result for result in check_model(find_model("transmil"), params=params) if not result.passed] == []
