import io
import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from wsi_mil.bags import pack
from wsi_mil.contracts import make_bag
from wsi_mil.errors import ConfigError
from wsi_mil.lookup import find_model
from wsi_mil.methods import MethodSpec, build
from wsi_mil.models._base import Progress
from wsi_mil.models.ins import info_nce, supervised_contrast
from wsi_mil.tasks import class_task


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def at(step, total=10):
    return Progress(step=step, total_steps=total, generator=torch.Generator().manual_seed(step))


@pytest.fixture
def made(criterion):
    """A model and its objective."""

    def make(n_outputs=2, params=None, **settings):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            params = {"in_dim": 32, "hidden": 8, "projection_dim": 6} | (params or {})
            model = find_model("ins")(n_outputs=n_outputs, **params)
        return model.train(), model.objective(criterion(n_outputs), **settings)

    return make


def test_five_steps_of_the_published_code(vectors, batch_of, criterion, close):
    v = vectors("ins")
    model = find_model("ins").from_official(v.under("w0.")).train()
    objective = model.objective(
        criterion(2),
        queue=12,
        key_momentum=0.9,
        prototype_momentum=0.8,
        bag_weight=0.0,
        warmup=0.05,
        warmup_targets="candidates",
    )
    objective.key = find_model("ins").from_official(v.under("w0."), branch="k").requires_grad_(False)
    objective.queue.copy_(v["queue0"])
    objective.queue_labels.copy_(v["queue_pseudo0"].argmax(dim=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-3)
    labels = v["Y"][:, 1].long()
    for n in range(5):
        t = v.under(f"t{n}.")
        bags = t["idx"].tolist()
        batch = replace(batch_of(*v["X"][t["idx"]].split(1)), ids=tuple(f"tile{i}" for i in bags))
        output = model(replace(batch, features=t["xw"]))
        close(output.instance_logits, t["logits"], 1e-7)
        close(output.auxiliary["projection"], t["feats"][:4], 1e-7)
        close(objective.prototype_scores(output.auxiliary["projection"]), t["score_prot"], 1e-7)
        optimizer.zero_grad()
        progress = at(max(n - 1, 0))
        terms = objective.loss(model, batch, labels[t["idx"]], progress, views=(t["xw"], t["xs"]))
        close(terms["tiles"], t["loss_cls"], 1e-7)
        close(terms["contrast"], 0.5 * t["loss_con"], 1e-7)
        close(torch.tensor(objective.phi_at(at(n))), t["conf_ema_m_next"], 1e-6)
        close(objective.prototypes, t["prototypes"], 1e-7)
        close(objective.queue, t["queue"], 1e-7)
        assert objective.pointer.item() == t["queue_ptr"].item()
        share = torch.tensor([v["Y"][i, 1] * objective.targets.of(bag_named(v["X"][i], f"tile{i}")) for i in range(8)])
        close(share, t["confidence"][:, 1], 1e-7)
        for name, wanted in under(t, "wk.", "k").named_parameters():
            close(dict(objective.key.named_parameters())[name], wanted, 1e-7)
        sum(terms.values()).backward()
        optimizer.step()
        for name, wanted in under(t, "wq.", "q").named_parameters():
            close(dict(model.named_parameters())[name], wanted.detach(), 1e-7)


def test_a_published_checkpoint_is_read_with_all_it_holds_beside_the_network(vectors):
    weights = vectors("ins").under("w0.")
    beside = ("queue", "queue_pseudo", "queue_partial", "queue_ptr", "prototypes", "encoder_q.prototypes", "mlp.weight")
    beside += ("bag_classifier.bias", "model_teacherHead.attention.0.weight", "model_teacherHead2.fcc.bias")
    whole = {f"module.{name}": value for name, value in (weights | {k: torch.zeros(1) for k in beside}).items()}
    for branch in ("q", "k"):
        found = find_model("ins").from_official({"state_dict": whole, "epoch": 3}, branch=branch)
        wanted = find_model("ins").from_official(weights, branch=branch).state_dict()
        assert all(torch.equal(found.state_dict()[name], value) for name, value in wanted.items())


def under(arrays, prefix, branch):
    """A model with the weights of one branch after a step."""
    found = {f"encoder_{branch}.{k.removeprefix(prefix)}": w for k, w in arrays.items() if k.startswith(prefix)}
    return find_model("ins").from_official(found, branch=branch)


def bag_named(features, name):
    bag = make_bag(1, seed=0)
    return replace(bag, features=features[None], id=name)


@pytest.mark.parametrize("pool", ["top_mean", "mean", "max", "noisy_or", "linear_softmax"])
def test_pooled_probabilities_are_their_closed_form(pool, batch_of):
    model = find_model("ins")(in_dim=8, n_outputs=2, pool=pool, top_share=0.3).double().eval()
    x = 3 * torch.randn(9, 8, dtype=torch.float64)
    output = model(batch_of(x, x[:1]))
    p = output.instance_logits.softmax(dim=1)[:9, 1]
    wanted = {
        "top_mean": p.sort().values[-3:].mean(),
        "mean": p.mean(),
        "max": p.max(),
        "noisy_or": 1 - (1 - p).prod(),
        "linear_softmax": p.square().sum() / p.sum(),
    }[pool]
    torch.testing.assert_close(output.logits.exp()[0], torch.stack([1 - wanted, wanted]))
    torch.testing.assert_close(output.logits.exp()[1], torch.stack([1 - p[0], p[0]]))


def test_pooling_stays_finite_where_probabilities_round_to_one(batch_of):
    for pool in ("top_mean", "noisy_or", "linear_softmax"):
        model = find_model("ins")(in_dim=4, n_outputs=2, pool=pool, trunk="linear")
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 0)
        for bias in (-200.0, 200.0):
            torch.nn.init.constant_(model.classifier.bias[1:], bias)
            logits = model(batch_of(torch.randn(7, 4))).logits
            assert logits.isfinite().all()
            assert logits.argmax(dim=1).item() == (bias > 0)


def test_soft_targets_stay_within_what_the_bag_allows(made):
    model, objective = made(n_outputs=3, warmup=0.0)
    bags = [make_bag(5, seed=i) for i in range(4)]
    target = torch.tensor([0, 1, 2, 2])
    for n in range(4):
        objective.loss(model, pack(bags), target, at(n))
    nearest = torch.tensor([0, 1, 0, 1, 0] * 2 + [2, 0, 2, 0, 2] * 2)
    soft = objective._soft_targets(pack(bags), target, nearest, at(4))
    torch.testing.assert_close(soft.sum(dim=1), torch.ones(20))
    assert soft[:5].tolist() == [[1, 0, 0]] * 5
    for i, label in enumerate(target.tolist()):
        outside = [c for c in range(3) if c not in (0, label)]
        assert not soft[5 * i : 5 * i + 5, outside].any()
    assert sorted(objective.targets.state()) == ["bag1", "bag2", "bag3"]


def test_soft_targets_follow_their_tile_through_sampling(made):
    _, objective = made()
    bag = make_bag(10, seed=0)
    rows = torch.tensor([7, 2, 5])
    objective.targets.put(bag.take(rows), torch.tensor([0.7, 0.2, 0.51]))
    objective.targets.put(bag.take(torch.tensor([2, 9])), torch.tensor([0.25, 0.9]))
    wanted = [0.5, 0.5, 0.25, 0.5, 0.5, 0.51, 0.5, 0.7, 0.5, 0.9]
    assert objective.targets.of(bag).tolist() == pytest.approx(wanted)
    assert objective.targets.of(replace(bag, id="another")).tolist() == [0.5] * 10
    shifted = replace(bag, slide_index=bag.slide_index + 1)
    assert objective.targets.of(shifted).tolist() == [0.5] * 10


def test_a_bag_that_stands_twice_in_a_step_moves_once(made):
    """As published: both rows start from the target before the step, and the last one written is what both get."""
    _, objective = made(warmup=0.0, phi=(0.9, 0.9))
    bag = make_bag(3, seed=0)
    nearest = torch.tensor([1, 0, 1, 1, 1, 0])
    soft = objective._soft_targets(pack([bag, bag]), torch.tensor([1, 1]), nearest, at(0))
    wanted = torch.tensor([0.55, 0.55, 0.45])
    torch.testing.assert_close(soft[:, 1], wanted.repeat(2))
    torch.testing.assert_close(objective.targets.of(bag), wanted.double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("background", [True, False])
def test_pseudo_labels_stay_within_what_the_bag_allows_however_sure_the_classifier_is(background, made):
    model, objective = made(n_outputs=3, background=background, warmup=0.0)
    torch.nn.init.zeros_(model.classifier.weight)
    model.classifier.bias.data = torch.tensor([0.0, 1e4, 0.0])
    objective.loss(model, pack([make_bag(4, seed=0)]), torch.tensor([2]), at(0))
    assert set(objective.queue_labels[:4].tolist()) <= ({0, 2} if background else {2})


def test_prototypes_equal_the_loop_over_tiles(made):
    _, objective = made(prototype_momentum=0.7)
    query = F.normalize(torch.randn(9, 6), dim=1)
    labels = torch.tensor([0, 1, 1, 0, 1, 1, 1, 0, 1])
    objective.prototypes.copy_(F.normalize(torch.randn(2, 6), dim=1))
    slow = objective.prototypes.clone()
    for row, label in zip(query, labels.tolist(), strict=True):
        slow[label] = 0.7 * slow[label] + 0.3 * row
    objective._move_prototypes(query, labels)
    torch.testing.assert_close(objective.prototypes, F.normalize(slow, dim=1))


def test_a_class_that_nothing_was_given_to_keeps_a_prototype_of_zero(made):
    model, objective = made()
    objective.loss(model, pack([make_bag(5, seed=0)]), torch.tensor([0]), at(0))
    assert objective.prototypes.norm(dim=1).tolist() == pytest.approx([1, 0])


def test_the_queue_wraps_and_holds_the_newest(made):
    _, objective = made(queue=5)
    for start, count in ((0, 3), (3, 3), (6, 12)):
        keys = torch.arange(start, start + count, dtype=torch.float32)[:, None].expand(-1, 6)
        objective._enqueue(keys, torch.zeros(count, dtype=torch.int64))
    assert objective.pointer.item() == 18 % 5
    assert sorted(objective.queue[:, 0].tolist()) == [13, 14, 15, 16, 17]
    assert objective.queue[2, 0].item() == 17


def test_keys_see_what_a_plug_in_makes_of_the_tiles():
    spec = MethodSpec(
        name="ins",
        params={"dropout": 0.0, "hidden": 8, "projection_dim": 6},
        objective={"view": "none", "queue": 12, "key_momentum": 1.0},
        regularisers={"sm": {"alpha": 0.6}},
    )
    model, objective = build(spec, in_dim=32, task=class_task("y", ("a", "b")), seed=0)
    batch = pack([make_bag(7, seed=0), make_bag(5, seed=1)])
    objective.loss(model.train(), batch, torch.tensor([0, 1]), at(0))
    same = model.eval()(batch).auxiliary["projection"]  # the key network is still the model, and so are the views
    torch.testing.assert_close(objective.inner.queue, same)
    unsmoothed = model.project(model.encode(batch.features))
    assert not torch.allclose(same, unsmoothed, atol=1e-3)


@pytest.mark.parametrize("momentum", [0.0, 1.0])
def test_the_key_network_is_frozen_or_the_model_itself_at_the_ends(momentum, made):
    model, objective = made(key_momentum=momentum)
    before = [p.clone() for p in objective.key.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    objective.loss(model, pack([make_bag(5, seed=0)]), torch.tensor([1]), at(0))
    for key, old, ours in zip(objective.key.parameters(), before, model.parameters(), strict=True):
        assert torch.equal(key, old if momentum else ours)


def test_gradients_reach_the_model_alone(made):
    model, objective = made(warmup=0.0)
    for n in range(2):
        terms = objective.loss(model, pack([make_bag(5, seed=0), make_bag(6, seed=1)]), torch.tensor([0, 1]), at(n))
    sum(terms.values()).backward()
    assert all(p.grad is None and not p.requires_grad for p in objective.parameters())
    assert not objective.queue.requires_grad
    assert not objective.prototypes.requires_grad
    assert all(p.grad is not None for p in model.parameters())


def test_supervised_contrast_with_one_positive_is_info_nce_over_the_same():
    unit = F.normalize(torch.randn(4 + 4 + 6, 5, dtype=torch.float64), dim=1)
    query, keys, queue = unit.split([4, 4, 6])
    for i in range(4):
        labels = torch.tensor([0, 1, 2, 3])
        everything, all_labels = torch.cat([query, keys, queue]), torch.cat([labels, labels, torch.full((6,), 9)])
        ours = supervised_contrast(query[i : i + 1], labels[:1], everything.roll(-i, 0), all_labels, 0.07)
        others = torch.cat([everything[:i], everything[i + 1 :]]) @ query[i] / 0.07
        wanted = others.logsumexp(dim=0) - query[i] @ keys[i] / 0.07
        torch.testing.assert_close(ours, wanted)


def test_info_nce_is_the_cross_entropy_against_the_queue():
    query, keys, queue = F.normalize(torch.randn(3 + 3 + 4, 5), dim=1).split([3, 3, 4])
    logits = torch.cat([(query * keys).sum(dim=1, keepdim=True), query @ queue.T], dim=1) / 0.1
    wanted = F.cross_entropy(logits, torch.zeros(3, dtype=torch.int64))
    torch.testing.assert_close(info_nce(query, keys, queue, 0.1), wanted)
    assert info_nce(query[:1], keys[:1], queue[:0], 0.1).item() == 0


def test_no_more_tiles_are_used_than_asked_for(made):
    model, objective = made(tiles_per_bag=4, queue=64)
    objective.loss(model, pack([make_bag(30, seed=0), make_bag(3, seed=1)]), torch.tensor([0, 1]), at(0))
    assert objective.pointer.item() == 7


def test_views_are_what_they_say(made):
    features = torch.randn(4000, 32) * torch.linspace(1, 5, 32)
    for view, strength in (("dropout", (0.1, 0.3)), ("noise", (0.2, 0.5))):
        _, objective = made(view=view, view_strength=strength)
        for found, size in zip(objective._views(features, torch.Generator().manual_seed(0)), strength, strict=True):
            if view == "dropout":
                assert (found == 0).float().mean().item() == pytest.approx(size, abs=0.01)
            else:
                spread = (found - features).std(dim=0) / features.std(dim=0)
                torch.testing.assert_close(spread, torch.full((32,), size), rtol=0.05, atol=0)
            torch.testing.assert_close(found.mean(dim=0), features.mean(dim=0), rtol=0, atol=0.3)


def test_a_restart_between_two_steps_changes_nothing(made):
    def go(model, objective, optimizer, steps):
        for n in steps:
            batch = pack([make_bag(9 + i, seed=i) for i in (n % 3, 3)])
            optimizer.zero_grad()
            sum(objective.loss(model, batch, torch.tensor([0, 1]), at(n)).values()).backward()
            optimizer.step()
            objective.after_optimizer_step(model, batch, 0.1)

    def begin():
        model, objective = made(tiles_per_bag=5, queue=16, warmup=0.2)
        return model, objective, torch.optim.AdamW(objective.parameter_groups(model), lr=0.01)

    whole, halves, again = begin(), begin(), begin()
    go(*whole, range(8))
    go(*halves, range(5))
    buffer = io.BytesIO()
    torch.save([part.state_dict() for part in halves], buffer)
    buffer.seek(0)
    for part, state in zip(again, torch.load(buffer, weights_only=True), strict=True):
        part.load_state_dict(state)
    go(*again, range(5, 8))
    for one, other in zip(whole[:2], again[:2], strict=True):
        state = other.state_dict()
        assert all(torch.equal(v, state[k]) for k, v in one.state_dict().items() if k != "_extra_state")
    kept, others = whole[1].targets.state(), again[1].targets.state()
    assert kept.keys() == others.keys() == {"bag3"}
    assert all(torch.equal(a, b) for name in kept for a, b in zip(kept[name], others[name], strict=True))


def test_five_percent_of_witnesses_are_found_better_than_by_labels_of_bags():
    """Tiles of positive bags are mostly background; soft targets sort them out."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    direction = F.normalize(torch.randn(32, generator=generator), dim=0)
    bags, witness = [], []
    for i in range(24):
        bag, is_witness = make_bag(60, seed=100 + i), torch.zeros(60, dtype=torch.bool)
        is_witness[:3] = bool(i % 2)
        bags.append(replace(bag, features=bag.features + 5.0 * is_witness[:, None] * direction))
        witness.append(is_witness)
    found, truth = {}, torch.cat(witness)
    criterion = class_task("y", ("a", "b")).criterion(2)
    for naive in (True, False):
        torch.manual_seed(0)
        model = find_model("ins")(in_dim=32, n_outputs=2, trunk="linear", hidden=16, projection_dim=8).train()
        objective = model.objective(criterion, queue=256, background=not naive, warmup=0.1, bag_weight=0.0)
        optimizer = torch.optim.AdamW(objective.parameter_groups(model), lr=3e-3)
        for step in range(100):
            chosen = [(step * 4 + i) % 24 for i in range(4)]
            terms = objective.loss(model, pack([bags[i] for i in chosen]), torch.tensor(chosen) % 2, at(step, 100))
            optimizer.zero_grad()
            sum(terms.values()).backward()
            optimizer.step()
        scores = model.eval()(pack(bags)).instance_logits.softmax(dim=1)[:, 1]
        inside = torch.cat([torch.full((60,), bool(i % 2)) for i in range(24)])
        found[naive] = (scores[truth][:, None] > scores[inside & ~truth]).float().mean().item()
    assert found[False] > 0.9
    assert found[False] > found[True]


def test_what_cannot_be_is_refused(refused):
    for params in ({"pool": "median"}, {"trunk": "cnn"}, {"top_share": 0.0}):
        refused("ins", f"ins.*{next(iter(params))}", params=params)
    for settings in ({"queue": 0}, {"view": "blur"}, {"view_strength": [0.1, 1.0]}):
        refused("ins", f"ins.*{next(iter(settings))}", objective=settings)
    with pytest.raises(ConfigError, match="ins:"):
        find_model("ins")(in_dim=4, n_outputs=1)
    assert math.isclose(find_model("ins")(in_dim=4, n_outputs=2).dropout, 0.1)
