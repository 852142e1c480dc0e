"""A model that uses few tiles: the figure tells scores that know them from scores that do not."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from wsi_mil import faithfulness
from wsi_mil.bags import Bag, pack
from wsi_mil.faithfulness import judge_of_classes, measure_bags, perturb
from wsi_mil.lookup import find_model
from wsi_mil.statistics.faithfulness import STEPS

TILES, USED = 200, 10


def _bag(n: int = TILES, *, name: str = "bag", used: int = USED, first: bool = False) -> Bag:
    """The feature is 1 for the used tiles, 0 for the others; `first`: the used ones stand at the head."""
    places = np.arange(used) if first else np.random.default_rng(len(name)).permutation(n)[:used]
    features = torch.zeros(n, 1)
    features[torch.from_numpy(places)] = 1.0
    grid = torch.stack([torch.arange(n), torch.zeros(n, dtype=torch.int64)], dim=1)
    return Bag(
        features=features,
        coords_l0=grid * 224,
        grid_xy=grid,
        slide_index=torch.zeros(n, dtype=torch.int64),
        slide_ids=(name,),
        id=name,
    )


def share_of_used(bag: Bag) -> float:
    """A model that looks at 5 % of the tiles: the share of them that is there."""
    return float(bag.features.sum()) / USED


def _scores(bag: Bag) -> np.ndarray:
    return bag.features[:, 0].double().numpy()


TAKEN = np.array(STEPS) / 100
CLOSED_FORM = np.mean([0.99 - 0.8, 0.98 - 0.6, 0.95, 0.9, 0.8, 0.5])
"""Top 1, 2, 5 ... % hold 2, 4, 10, 10 ... of the ten; random tiles hold their own share."""


def test_scores_that_know_the_used_tiles_reach_the_closed_form():
    found = perturb(_bag(), _scores(_bag()), share_of_used)
    np.testing.assert_allclose(found.without_top, [0.8, 0.6, 0, 0, 0, 0], atol=1e-9)
    np.testing.assert_allclose(found.only_top, [0.2, 0.4, 1, 1, 1, 1], atol=1e-9)
    each = [perturb(bag, _scores(bag), share_of_used) for bag in (_bag(name=f"bag{place}") for place in range(40))]
    assert np.mean([one.deletion for one in each]) == pytest.approx(CLOSED_FORM, abs=0.02)
    assert np.mean([one.insertion for one in each]) == pytest.approx(CLOSED_FORM, abs=0.02)


def test_random_scores_are_at_zero_and_reversed_ones_below():
    generator = np.random.default_rng(0)
    bags = [_bag(name=f"bag{place}") for place in range(40)]
    by_chance = [perturb(bag, generator.random(TILES), share_of_used).faithfulness for bag in bags]
    assert np.mean(by_chance) == pytest.approx(0, abs=0.02)
    reversed_ones = [perturb(bag, -_scores(bag), share_of_used).faithfulness for bag in bags]
    assert np.mean(reversed_ones) == pytest.approx(-TAKEN.mean(), abs=0.02)


def test_equal_scores_are_ordered_at_random_and_not_by_their_place():
    bags = [_bag(name=f"bag{place}", first=True) for place in range(40)]
    found = [perturb(bag, np.zeros(TILES), share_of_used).faithfulness for bag in bags]
    assert np.mean(found) == pytest.approx(0, abs=0.02)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 30])
@pytest.mark.parametrize("min_tiles", [0, 1, 4])
def test_no_part_is_ever_smaller_than_the_model_allows_and_answers_are_few(n: int, min_tiles: int):
    asked: list[int] = []

    def answer(bag: Bag) -> float:
        asked.append(len(bag))
        return 0.5

    found = perturb(_bag(n, used=1), np.arange(n, dtype=float), answer, min_tiles=min_tiles)
    assert all(length >= max(1, min_tiles) for length in asked)
    assert len(asked) <= 2 * len(STEPS) * (1 + faithfulness.ORDERS) == 36
    assert np.isnan(found.deletion) == (n - 1 < max(1, min_tiles))


def test_the_same_bag_and_seed_give_the_same_and_parts_keep_their_order():
    def ordered(bag: Bag) -> float:
        assert (bag.grid_xy[:, 0].diff() > 0).all()
        return share_of_used(bag)

    first, again, other = (perturb(_bag(), np.arange(TILES) % 7.0, ordered, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.without_random, again.without_random)
    assert (first.without_random != other.without_random).any()


def test_a_model_of_classes_is_asked_for_the_class_that_it_predicts():
    torch.manual_seed(0)
    model = find_model("abmil")(in_dim=3, n_outputs=2).train()
    bag = _bag(20)
    bag = Bag(**{**vars(bag), "features": torch.randn(20, 3)})
    scores, answer = judge_of_classes(model, probabilities=lambda logits: logits.softmax(dim=1))(bag)
    with torch.no_grad():
        output = model.eval()(pack([bag]))
        expected = model(pack([bag.take(torch.arange(5))])).logits.double().softmax(dim=1)[0]
    shares = output.logits.double().softmax(dim=1)[0]
    assert answer(bag) == pytest.approx(float(shares.max()), abs=1e-6)
    np.testing.assert_allclose(scores, output.attention.mean(dim=1).numpy(), rtol=1e-5)
    assert answer(bag.take(torch.arange(5))) == pytest.approx(float(expected[shares.argmax()]), abs=1e-6)


class _Dataset:
    """As much of a dataset as is asked for."""

    def __init__(self, n: int) -> None:
        self.items = [SimpleNamespace(patient=f"p{place}") for place in range(n)]
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Bag:
        self.read.append(index)
        return _bag(name=f"bag{index}")


def test_a_bounded_number_of_bags_is_measured_and_the_table_holds_figures_and_curves():
    dataset = _Dataset(25)
    frame = measure_bags(dataset, lambda bag: (_scores(bag), share_of_used), seed=3)
    assert len(frame) == len(set(dataset.read)) == faithfulness.BAGS
    assert frame["patient"].tolist() == [bag.replace("bag", "p") for bag in frame["bag"]]
    assert frame["answer"].tolist() == [1.0] * len(frame)
    assert frame["without_top_1"].tolist() == pytest.approx([0.8] * len(frame))
    assert frame["only_top_2"].tolist() == pytest.approx([0.4] * len(frame))
    assert frame["faithfulness"].mean() == pytest.approx(CLOSED_FORM, abs=0.03)
    np.testing.assert_allclose(frame["faithfulness"], (frame["deletion"] + frame["insertion"]) / 2)
    assert measure_bags(_Dataset(0), lambda bag: (_scores(bag), share_of_used)).columns.tolist() == list(frame.columns)
