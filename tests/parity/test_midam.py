import io
import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from wsi_mil.bags import pack
from wsi_mil.contracts import make_bag
from wsi_mil.lookup import find_model
from wsi_mil.models._base import Progress

MODES = ["softmax", "attention"]
PUBLISHED = {"optimizer": "sgd", "momentum": 0.1, "scalar_lr": None, "warmup": 0.0}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def at(step, total=6):
    return Progress(step=step, total_steps=total, generator=torch.Generator().manual_seed(step))


def one_step(objective, optimizer, model, batch, target, progress, *, lr):
    optimizer.zero_grad()
    terms = objective.loss(model, batch, target, progress)
    total = torch.stack(list(terms.values())).sum()
    total.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    objective.after_optimizer_step(model, batch, lr)
    return total.detach(), gradients


@pytest.fixture
def named_batch(batch_of):
    """Bags of these features under these names."""

    def make(features, names):
        return replace(batch_of(*features), ids=tuple(names))

    return make


@pytest.mark.parametrize("mode", MODES)
def test_six_steps_of_the_published_loss_and_optimiser(mode, vectors, named_batch, criterion, close):
    v = vectors(f"midam_{mode}")
    model = find_model("midam").from_official(v.under("w0."), tau=v["tau"].item()).train()
    assert (model.mode, model.in_dim, model.hidden) == (mode, 5, (4,))
    objective = model.objective(
        criterion(1), margin=v["margin"].item(), gamma=v["gamma"].item(), decay_scalars=True, **PUBLISHED
    )
    lr = v["lr"].item()
    optimizer = objective.optimizer(model, lr=lr, weight_decay=v["weight_decay"].item())
    for n in range(int(v["steps"])):
        t = v.under(f"t{n}.")
        bags = t["idx"].tolist()
        batch = named_batch([v[f"bag{i}"][t[f"sel{k}"]] for k, i in enumerate(bags)], [f"b{i}" for i in bags])
        sums = model(batch).auxiliary
        if mode == "softmax":
            close(sums["log_mean"].exp(), t["pred"])
        else:
            close(sums["numerator"], t["pred"])
            close(sums["denominator"], t["denom"])
        loss, gradients = one_step(objective, optimizer, model, batch, v["y"][t["idx"]], at(n), lr=lr)
        close(loss, t["loss"], 1e-10)
        filled = find_model("midam").from_official({k[2:]: w for k, w in t.items() if k.startswith("g.")})
        for name, wanted in filled.named_parameters():
            close(gradients[name], wanted.detach(), 1e-10)
        close(objective.positive_mean.grad, t["ga"], 1e-10)
        close(objective.negative_mean.grad, t["gb"], 1e-10)
        close(objective.positive_mean, t["a"], 1e-10)
        close(objective.negative_mean, t["b"], 1e-10)
        close(objective.alpha, t["alpha"], 1e-10)
        for i in range(6):
            state = objective.memory.get(f"b{i}")
            if mode == "softmax":
                close(torch.zeros(1).double() if state is None else state.exp(), t["state_s"][i], 1e-10)
            else:
                state = torch.ones(2, 1).double() if state is None else state
                close(state, torch.stack([t["state_sn"][i], t["state_sd"][i]]), 1e-10)
        filled = find_model("midam").from_official({k[2:]: w for k, w in t.items() if k.startswith("w.")})
        for name, wanted in filled.named_parameters():
            close(dict(model.named_parameters())[name], wanted.detach(), 1e-10)
    logits = model.eval()(named_batch([v[f"bag{i}"] for i in range(6)], "abcdef")).logits[:, 0]
    close(logits.sigmoid() if mode == "softmax" else logits, v["eval_full_bag_score"], 1e-10)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("classes", [1, 3])
def test_with_all_tiles_and_no_memory_the_gradient_is_that_of_the_objective(mode, classes, criterion):
    torch.manual_seed(0)
    model = find_model("midam")(in_dim=32, n_outputs=classes, mode=mode, hidden=(6, 5), tau=0.3).double()
    bags = [make_bag(n, seed=n) for n in (1, 4, 9, 5, 3)]
    batch = pack(bags)
    batch = type(batch)(**{**vars(batch), "features": batch.features.double()})
    target = torch.tensor([0, 1, 2, 1, 0]) % max(classes, 2)
    objective = model.objective(criterion(classes), gamma=1.0, margin=0.4, warmup=0.0)
    with torch.no_grad():
        objective.positive_mean.copy_(torch.linspace(0.1, 0.5, classes))
        objective.negative_mean.copy_(torch.linspace(0.4, 0.2, classes))
        objective.alpha.copy_(torch.linspace(0.3, 0.7, classes))
    parameters = [*model.parameters(), objective.positive_mean, objective.negative_mean]
    ours = torch.autograd.grad(sum(objective.loss(model, batch, target, at(0)).values()), parameters)

    score = model(batch).logits.sigmoid()
    a, b, alpha = objective.positive_mean, objective.negative_mean, objective.alpha
    total = 0
    for c in range(classes):
        chosen = target == (1 if classes == 1 else c)
        plus, minus = score[chosen, c], score[~chosen, c]
        total = total + (plus - a[c]).square().mean() + (minus - b[c]).square().mean()
        total = total + alpha[c] * (0.4 + minus.mean() - plus.mean())
    for one, other in zip(ours, torch.autograd.grad(total / classes, parameters), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_the_temperature_goes_from_maximum_to_mean(batch_of):
    x = torch.randn(20, 8)
    weights = find_model("midam")(in_dim=8, n_outputs=1).state_dict()

    def pooled(tau):
        model = find_model("midam")(in_dim=8, n_outputs=1, tau=tau)
        model.load_state_dict(weights)
        output = model(batch_of(x))
        return output.logits.sigmoid().item(), output.instance_logits.sigmoid()

    score, tiles = pooled(1e-3)
    assert score == pytest.approx(tiles.max().item() - 1e-3 * math.log(20), abs=1e-3)
    score, tiles = pooled(1e4)
    assert score == pytest.approx(tiles.mean().item(), abs=1e-2)


def test_first_visits_are_biased_as_published_or_not_at_all(batch_of, criterion):
    model = find_model("midam")(in_dim=8, n_outputs=1, tau=0.5).train()
    batch, target = batch_of(torch.randn(5, 8), torch.randn(6, 8)), torch.tensor([0, 1])
    seen = model(batch).auxiliary["log_mean"].detach()
    for start, bias in (("published", math.log(0.3)), ("first_visit", 0.0)):
        objective = model.objective(criterion(1), gamma=0.3, start=start, warmup=0.0)
        objective.loss(model, batch, target, at(0))
        torch.testing.assert_close(torch.stack(list(objective.memory.values())), seen + bias)


@pytest.mark.parametrize("mode", MODES)
def test_a_bag_that_stands_twice_in_a_step_has_one_state(mode, named_batch, criterion):
    """As published: the state is written for both drawings, the last one stays, and both scores are read from it."""
    model = find_model("midam")(in_dim=8, n_outputs=1, mode=mode, tau=0.5, hidden=(4,)).double().train()
    objective = model.objective(criterion(1), gamma=0.3, warmup=0.0)
    batch = named_batch(torch.randn(3, 5, 8).double().unbind(), ("twice", "other", "twice"))
    terms = objective.loss(model, batch, torch.tensor([1, 0, 1]), at(0))
    sums = {name: values.detach()[:, 0] for name, values in model(batch).auxiliary.items()}
    if mode == "softmax":
        score = 0.5 * (0.3 * sums["log_mean"].exp()).log()
    else:
        score = ((0.7 + 0.3 * sums["numerator"]) / (0.7 + 0.3 * sums["denominator"])).sigmoid()
    torch.testing.assert_close(terms["spread"].detach(), score[2].square() + score[1].square())


def test_alpha_stays_at_or_above_zero_and_follows_the_gap(criterion, batch_of):
    model = find_model("midam")(in_dim=8, n_outputs=1)
    batch, target = batch_of(torch.randn(5, 8), torch.randn(6, 8)), torch.tensor([0, 1])
    objective = model.objective(criterion(1), margin=0.2, warmup=0.0, scalar_lr=None)
    objective.loss(model, batch, target, at(0))
    with torch.no_grad():
        objective.positive_mean.fill_(5)
    objective.after_optimizer_step(model, batch, 0.1)
    assert objective.alpha.item() == 0
    with torch.no_grad():
        objective.positive_mean.zero_()
    objective.after_optimizer_step(model, batch, 0.1)
    assert objective.alpha.item() == pytest.approx(0.1 * 0.2)


def test_a_step_of_one_class_is_finite_and_leaves_the_other_class_alone(criterion, batch_of):
    model = find_model("midam")(in_dim=8, n_outputs=1).train()
    objective = model.objective(criterion(1), warmup=0.0)
    terms = objective.loss(model, batch_of(torch.randn(5, 8)), torch.tensor([1]), at(0))
    sum(terms.values()).backward()
    assert torch.isfinite(sum(terms.values()))
    assert objective.negative_mean.grad.item() == 0
    assert objective.positive_mean.grad.item() != 0


def test_large_scores_do_not_overflow_where_plain_sums_do(batch_of, criterion):
    model = find_model("midam")(in_dim=4, n_outputs=1, tau=0.005).train()
    torch.nn.init.constant_(model.head.bias, 8.0)
    batch, target = batch_of(torch.randn(5, 4), torch.randn(6, 4)), torch.tensor([0, 1])
    assert torch.isinf((model(batch).auxiliary["log_mean"] * 1.0).exp()).all()
    sum(model.objective(criterion(1), warmup=0.0).loss(model, batch, target, at(0)).values()).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_gamma_is_halved_at_its_milestones(criterion):
    objective = find_model("midam")(in_dim=4, n_outputs=1).objective(criterion(1), gamma_milestones=(0.5, 0.75))
    assert [objective.gamma_at(at(n, 8)) for n in (0, 3, 4, 6, 7)] == [0.9, 0.9, 0.45, 0.225, 0.225]


def test_warming_up_is_the_plain_loss_and_keeps_no_state(criterion, batch_of):
    model = find_model("midam")(in_dim=8, n_outputs=1).train()
    objective = model.objective(criterion(1), warmup=0.5)
    batch, target = batch_of(torch.randn(5, 8), torch.randn(6, 8)), torch.tensor([0, 1])
    terms = objective.loss(model, batch, target, at(2))
    plain = F.binary_cross_entropy_with_logits(model(batch).logits[:, 0], target.float())
    assert terms.keys() == {"bag", "spread"}
    torch.testing.assert_close(terms["bag"], plain)
    objective.after_optimizer_step(model, batch, 0.1)
    assert objective.memory == {}
    assert objective.alpha.item() == 0
    assert objective.loss(model, batch, target, at(3)).keys() == {"pooling", "spread"}


def test_class_means_are_found_while_warming_up(criterion):
    model, bags = find_model("midam")(in_dim=32, n_outputs=1), [make_bag(9, seed=n) for n in range(4)]
    batch, target = pack(bags), torch.tensor([0, 1, 1, 0])
    objective = model.objective(criterion(1), warmup=1.0, scalar_lr=0.05)
    optimizer = torch.optim.AdamW(objective.parameter_groups(model), lr=0.0, weight_decay=0.0)
    for n in range(200):
        optimizer.param_groups[1]["lr"] = 0.05 * (1 - n / 200)
        one_step(objective, optimizer, model, batch, target, at(0), lr=0.0)
    score = model(batch).logits.sigmoid()[:, 0]
    assert objective.positive_mean.item() == pytest.approx(score[target == 1].mean().item(), abs=1e-3)
    assert objective.negative_mean.item() == pytest.approx(score[target == 0].mean().item(), abs=1e-3)


def trained(bags, labels, criterion, **objective):
    """Scores of the bags after 120 steps at a learning rate of 1e-3."""
    torch.manual_seed(0)
    model = find_model("midam")(in_dim=256, n_outputs=1).train()
    own = model.objective(criterion(1), **objective)
    optimizer = torch.optim.AdamW(own.parameter_groups(model), lr=1e-3)
    order = torch.Generator().manual_seed(0)
    for n in range(120):
        rows = torch.cat([torch.randperm(12, generator=order)[:4] + 12 * label for label in (0, 1)])
        one_step(own, optimizer, model, pack([bags[i] for i in rows]), labels[rows], at(n, 120), lr=1e-3)
    with torch.no_grad():
        return model.eval()(pack(bags)).logits[:, 0]


def test_it_learns_on_features_where_scalars_that_start_at_zero_and_crawl_pull_all_scores_there(criterion):
    random = torch.Generator().manual_seed(0)
    base, sign = torch.randn(256, generator=random), 0.5 * torch.randn(256, generator=random)
    labels = torch.arange(24) // 12
    bags = []
    for i, label in enumerate(labels.tolist()):
        features = base + 0.7 * torch.randn(60, 256, generator=random)
        features[:6] += sign * label
        bags.append(replace(make_bag(60, seed=i), features=features.clamp(0, 6)))
    ours = trained(bags, labels, criterion)
    assert ours[labels == 1].min() > ours[labels == 0].max()
    sunk = trained(bags, labels, criterion, scalar_lr=None, warmup=0.0)
    assert (sunk.sigmoid() < 0.05).all()
    assert not sunk[labels == 1].min() > sunk[labels == 0].max()


def test_scalars_have_a_rate_of_their_own_under_either_optimiser(criterion):
    model = find_model("midam")(in_dim=8, n_outputs=1)
    objective = model.objective(criterion(1), scalar_lr=0.25)
    assert objective.optimizer(model, lr=1e-3, weight_decay=0.1) is None
    published = model.objective(criterion(1), scalar_lr=0.25, optimizer="sgd").optimizer(model, lr=1e-3, weight_decay=0)
    of_training = torch.optim.AdamW(objective.parameter_groups(model), lr=1e-3)
    for optimizer in (published, of_training):
        assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.25]
    assert isinstance(published, torch.optim.SGD)
    with torch.no_grad():
        objective.positive_mean.fill_(0.5)
    objective._ascends = True
    objective.after_optimizer_step(model, pack([make_bag(3, seed=0)]), 1e-3)
    assert objective.alpha.item() == pytest.approx(0.25 * 0.5)


@pytest.mark.parametrize("mode", MODES)
def test_a_restart_between_two_steps_changes_nothing(mode, criterion):
    def begin():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = find_model("midam")(in_dim=32, n_outputs=1, mode=mode).train()
        objective = model.objective(criterion(1), **PUBLISHED)
        return model, objective, objective.optimizer(model, lr=0.1, weight_decay=1e-3)

    def go(parts, steps):
        model, objective, optimizer = parts
        for n in steps:
            batch = pack([make_bag(3 + i, seed=i) for i in (n % 3, 3)])
            one_step(objective, optimizer, model, batch, torch.tensor([0, 1]), at(n), lr=0.1)

    whole, halves = begin(), begin()
    go(whole, range(7))
    go(halves, range(4))
    buffer = io.BytesIO()
    torch.save([part.state_dict() for part in halves], buffer)
    buffer.seek(0)
    again = begin()
    for part, state in zip(again, torch.load(buffer, weights_only=True), strict=True):
        part.load_state_dict(state)
    go(again, range(4, 7))
    for one, other in zip(whole[:2], again[:2], strict=True):
        for name, value in one.state_dict().items():
            if name != "_extra_state":
                assert torch.equal(value, other.state_dict()[name]), name
    assert whole[1].memory.keys() == again[1].memory.keys()
    assert all(torch.equal(whole[1].memory[name], again[1].memory[name]) for name in whole[1].memory)
