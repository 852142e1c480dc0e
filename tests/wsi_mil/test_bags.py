import pytest
import torch

from wsi_mil.bags import (
    Bag,
    pack,
    segment_log_softmax,
    segment_max,
    segment_mean,
    segment_softmax,
    segment_sum,
    segment_weighted_sum,
    split,
    spread,
)
from wsi_mil.lookup import find_model

OFFSETS = torch.tensor([0, 3, 4, 9])


def make_bag(n, name="a", d=4):
    grid_xy = torch.stack([torch.arange(n), torch.arange(n) * 2], dim=1)
    return Bag(
        features=torch.randn(n, d),
        coords_l0=grid_xy * 10,
        grid_xy=grid_xy,
        slide_index=torch.zeros(n, dtype=torch.int64),
        slide_ids=(name,),
        id=name,
    )


def test_packing_and_taking_apart_is_a_round_trip():
    bags = [make_bag(3, "a"), make_bag(1, "b"), make_bag(5, "c")]
    batch = pack(bags)
    assert batch.offsets.tolist() == OFFSETS.tolist()
    assert batch.lengths == [3, 1, 5]
    assert len(batch) == 3
    for before, after in zip(bags, batch.bags(), strict=True):
        assert (before.id, before.slide_ids) == (after.id, after.slide_ids)
        for column in ("features", "coords_l0", "grid_xy", "slide_index"):
            assert torch.equal(getattr(before, column), getattr(after, column))


def test_what_cannot_be_a_bag_or_a_batch_is_refused():
    with pytest.raises(ValueError, match="no instance"):
        make_bag(0)
    with pytest.raises(ValueError, match="no bags"):
        pack([])
    with pytest.raises(ValueError, match="different widths"):
        pack([make_bag(2, d=4), make_bag(2, d=5)])
    bag = make_bag(3)
    with pytest.raises(ValueError, match="rows"):
        Bag(**{**vars(bag), "grid_xy": bag.grid_xy[:2]})


def test_a_bag_of_plain_features_lies_on_a_square_unless_places_are_given():
    features = torch.randn(10, 3)
    bag = Bag.of(features, id="mine")
    assert (bag.id, bag.slide_ids, bag.features is features) == ("mine", ("mine",), True)
    assert bag.grid_xy.tolist() == [[i % 4, i // 4] for i in range(10)]
    assert len({tuple(place) for place in bag.grid_xy.tolist()}) == 10
    assert bag.slide_index.tolist() == [0] * 10
    places = torch.tensor([[7, 1], [2, 5]])
    assert torch.equal(Bag.of(features[:2], grid_xy=places).grid_xy, places)
    assert pack([bag, Bag.of(features[:1])]).lengths == [10, 1]
    with pytest.raises(ValueError, match="no instance"):
        Bag.of(features[:0])
    with pytest.raises(ValueError, match="rows"):
        Bag.of(features, grid_xy=places)


@pytest.mark.parametrize("given", [torch.randn(5, 4), [torch.randn(5, 4)], make_bag(3), [make_bag(3), "b"]])
def test_only_a_list_of_bags_is_packed(given):
    with pytest.raises(TypeError, match=r"list of bags, .* Bag.of\(features\)"):
        pack(given)


def test_features_without_a_row_for_each_tile_are_refused():
    with pytest.raises(ValueError, match=r"features are \(n, d\), one row a tile, not \(2, 5, 4\)"):
        Bag.of(torch.randn(2, 5, 4))


def test_scores_asked_of_a_batch_are_refused_without_printing_tensors():
    batch = pack([make_bag(3)])
    model = find_model("abmil")(in_dim=4, n_outputs=2)
    for arguments in ((batch, model(batch)), (model(batch), batch), ("attention", model(batch))):
        with pytest.raises(TypeError, match="takes the model's MILOutput and a kind") as caught:
            model.instance_scores(*arguments)
        assert "tensor(" not in str(caught.value)


def test_taking_rows_keeps_columns_together():
    bag = make_bag(5)
    taken = bag.take(torch.tensor([4, 0]))
    assert torch.equal(taken.features, bag.features[[4, 0]])
    assert taken.coords_l0.tolist() == [[40, 80], [0, 0]]


def test_moving_moves_every_tensor():
    moved = pack([make_bag(2)]).to("meta")
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert len(tensors) == 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_softmax_is_per_bag_and_in_fp32(dtype):
    scores = torch.randn(9, 2).to(dtype)
    result = segment_softmax(scores, OFFSETS)
    assert result.dtype == torch.float32
    for rows, found in zip(split(scores, OFFSETS), split(result, OFFSETS), strict=True):
        assert torch.equal(found, rows.float().softmax(dim=0))
    torch.testing.assert_close(segment_log_softmax(scores, OFFSETS).exp(), result)


def test_double_precision_is_kept():
    values = torch.randn(9, 2, dtype=torch.float64)
    for result in (segment_softmax(values, OFFSETS), segment_mean(values, OFFSETS), segment_sum(values, OFFSETS)):
        assert result.dtype == torch.float64


def test_a_hundred_thousand_equal_tiles_have_weights_in_half_precision():
    attention = segment_softmax(torch.zeros(100_000, 1, dtype=torch.float16), torch.tensor([0, 100_000]))
    assert attention.sum().item() == pytest.approx(1, abs=1e-5)


def test_weighted_sum_keeps_digits_under_autocast():
    n = 20_000
    weights, values = torch.full((n, 1), 1 / n), torch.ones(n, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = segment_weighted_sum(weights, values, torch.tensor([0, n]))
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, torch.ones(1, 1, 3), rtol=1e-5, atol=1e-5)


def test_weighted_sum_of_each_bag_and_column():
    weights, values = torch.randn(9, 2), torch.randn(9, 4)
    result = segment_weighted_sum(weights, values, OFFSETS)
    assert result.shape == (3, 2, 4)
    torch.testing.assert_close(result[2, 1], (weights[4:9, 1:2] * values[4:9]).sum(dim=0))


def test_maximum_names_its_row_and_routes_the_gradient_there():
    values = torch.randn(9, 2, requires_grad=True)
    greatest, rows = segment_max(values, OFFSETS)
    assert torch.equal(greatest[2], values[4:9].max(dim=0).values)
    assert torch.equal(values.gather(0, rows), greatest)
    greatest.sum().backward()
    assert values.grad.sum(dim=0).tolist() == [3, 3]
    assert values.grad.gather(0, rows).tolist() == [[1, 1]] * 3


def test_spread_repeats_rows_for_their_tiles():
    assert spread(torch.tensor([7, 8, 9]), OFFSETS).tolist() == [7, 7, 7, 8, 9, 9, 9, 9, 9]
