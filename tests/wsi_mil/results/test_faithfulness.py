"""A model that uses few tiles: the figure tells scores that know them from scores that do not."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from wsi_mil.bags import Bag
from wsi_mil.fitting.evaluation import answer as answer_of
from wsi_mil.lookup import find_model
from wsi_mil.methods import score_columns
from wsi_mil.results import faithfulness
from wsi_mil.results.faithfulness import judge_of_classes, measure_bags, perturb
from wsi_mil.statistics.faithfulness import STEPS
from wsi_mil.targets import ClassTarget
from wsi_mil.tasks import Task

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


@pytest.mark.parametrize(
    ("method", "n_outputs", "speaks_of"),
    [
        ("mean_pool", 2, "positive"),
        ("max_pool", 2, "positive"),
        ("latent_attention", 2, "positive"),
        ("mean_pool", 1, "positive"),
        ("mean_pool", 3, "predicted"),
        ("abmil", 2, "predicted"),
        ("clam_mb", 2, "predicted"),
    ],
)
def test_the_map_that_is_drawn_is_judged_by_the_class_it_speaks_of(method: str, n_outputs: int, speaks_of: str):
    torch.manual_seed(0)
    classes = ("a", "b", "c")[: max(n_outputs, 2)]
    task = Task(level="slide", targets=(ClassTarget(name="label", classes=classes),))
    model = find_model(method)(in_dim=3, n_outputs=n_outputs).train()
    judge, predictions = judge_of_classes(model, task=task), set()
    for place in range(24):
        bag = Bag(**{**vars(_bag(20, name=f"bag{place}")), "features": 2 * torch.randn(20, 3) + torch.randn(3)})
        part = bag.take(torch.arange(5))
        drawn = answer_of(model, bag, device=torch.device("cpu"), columns=score_columns(model, task)[:1])
        shares, of_part = (
            task.probabilities(answer_of(model, one, device=torch.device("cpu")).logits[None].double())[0]
            for one in (bag, part)
        )
        predictions.add(int(shares.argmax()))
        judged = 1 if speaks_of == "positive" else int(shares.argmax())
        scores, answer = judge(bag)
        np.testing.assert_allclose(scores, drawn.tile_scores[:, 0], rtol=1e-6)
        assert [answer(bag), answer(part)] == pytest.approx([float(shares[judged]), float(of_part[judged])], abs=1e-6)
    assert len(predictions) > 1


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
