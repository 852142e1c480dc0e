import itertools
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from wsi_mil.bags import Bag
from wsi_mil.fitting.datasets import BagDataset, BagReader, Item, join_slides, plan_epoch, read_ahead, sample_tiles
from wsi_mil.store import BagStore

LABELS = np.array([0] * 17 + [1] * 4 + [2] * 2)
PLAN = {"bags_per_step": 4, "balance": "none", "both_classes": False, "seed": 0, "epoch": 0}


def flat(plan):
    return list(itertools.chain.from_iterable(plan))


def bag_of(values, name="a"):
    n = len(values)
    rows = torch.arange(n)
    return Bag(
        features=torch.tensor(values, dtype=torch.float32)[:, None],
        coords_l0=torch.stack([rows, rows], 1),
        grid_xy=torch.stack([rows, rows], 1),
        slide_index=torch.zeros(n, dtype=torch.int64),
        slide_ids=(name,),
        id=name,
    )


@pytest.fixture(scope="module")
def dataset(make_study, tmp_path_factory):
    _, bags = make_study(tmp_path_factory.mktemp("study"), patients=40)
    store = BagStore(bags)
    return BagDataset(BagReader(store), [Item(id=s, patient=s, slide_ids=(s,), values=(0.0,)) for s in store.ids()])


def test_an_epoch_holds_each_bag_once_and_depends_on_seed_and_epoch_alone():
    plan = plan_epoch(LABELS, **PLAN)
    assert sorted(flat(plan)) == list(range(len(LABELS)))
    assert plan == plan_epoch(LABELS, **PLAN)
    assert plan != plan_epoch(LABELS, **PLAN | {"epoch": 1})
    assert plan != plan_epoch(LABELS, **PLAN | {"seed": 1})
    assert max(map(len, plan)) == 4


def test_the_sampler_draws_each_class_equally_often_and_leaves_out_as_few_as_it_can():
    drawn = np.array(flat(plan_epoch(LABELS, **PLAN | {"balance": "sampler"})))
    assert np.bincount(LABELS[drawn]).tolist() == [8, 8, 8]
    assert set(drawn[LABELS[drawn] > 0]) == set(range(17, 23))
    assert len(set(drawn[LABELS[drawn] == 0])) == 8


def test_every_batch_holds_every_class_when_a_method_compares_them():
    plan = plan_epoch(LABELS, **PLAN | {"both_classes": True})
    assert all(set(LABELS[batch]) == {0, 1, 2} for batch in plan)
    assert set(flat(plan)) == set(range(len(LABELS)))


def test_sampled_tiles_are_some_of_the_bag_in_its_order_anew_each_epoch():
    bag = bag_of(range(100))
    one, two = (sample_tiles(bag, 10, seed=0, epoch=e, position=3) for e in (0, 1))
    values = one.features[:, 0].tolist()
    assert values == sorted(set(values))
    assert len(values) == 10
    assert one.coords_l0[:, 0].tolist() == values
    assert values != two.features[:, 0].tolist()
    assert sample_tiles(bag, 100, seed=0, epoch=0, position=0) is bag


def test_a_patient_is_its_slides_one_after_the_other():
    joined = join_slides([bag_of([1, 2], "x"), bag_of([3], "y")], name="p")
    assert joined.features[:, 0].tolist() == [1, 2, 3]
    assert joined.slide_index.tolist() == [0, 0, 1]
    assert (joined.slide_ids, joined.id) == (("x", "y"), "p")
    alone = join_slides([bag_of([1, 2], "x")], name="p")
    assert (alone.id, alone.slide_ids) == ("p", ("x",))


def test_reading_ahead_gives_the_bags_in_order(dataset):
    batches = [[3, 1], [0], [7, 8]]
    found = [[bag.id for bag in bags] for bags in read_ahead(dataset, batches)]
    assert found == [[dataset.items[i].id for i in batch] for batch in batches]


def test_many_bags_hold_no_file_open(dataset):
    def count():
        return len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").is_dir() else 0

    before = count()
    kept = [dataset[i] for i in range(len(dataset))]
    assert count() <= before
    assert len(kept) == 40


def test_memory_is_used_only_where_it_may_be(dataset):
    store = dataset.reader.store
    name = store.ids()[0]
    never = BagReader(store, cache="none")
    assert never.bag(name) is not never.bag(name)
    small, large = (BagReader(store, cache="auto", total_bytes=size) for size in (10**6, 10**11))
    assert small.bag(name) is small.bag(name)
    assert large.bag(name) is not large.bag(name)


def test_a_dataset_is_small_to_send_even_after_use(dataset):
    reader = BagReader(dataset.reader.store, cache="ram")
    used = BagDataset(reader, dataset.items)
    size = len(pickle.dumps(used))
    expected = used[5].features
    again = pickle.loads(pickle.dumps(used))
    assert len(pickle.dumps(used)) == size
    assert torch.equal(again[5].features, expected)
