import io
import math

import pytest
import torch

from wsi_mil.errors import ConfigError
from wsi_mil.lookup import find_model, find_regulariser
from wsi_mil.models._anchor import Anchor, normalised_sigmoid
from wsi_mil.models._base import Progress

OFFSETS = torch.tensor([0, 29])


def anchor(**settings):
    defaults = {"weight": 1.0, "momentum": 0.999, "temperature": 0.5, "kind": "ema", "scaling": "sum", "warm_up": 0}
    return Anchor(**defaults | settings)


def progress(seed=0):
    return Progress(step=0, total_steps=10, generator=torch.Generator().manual_seed(seed))


def filled(gradients, weights):
    """Published gradients; parameters that get none have empty arrays there."""
    return {name: value if value.numel() else torch.zeros_like(weights[name]) for name, value in gradients.items()}


def as_published(columns):
    return columns.reshape(29, 4, 8).permute(2, 1, 0)


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_outputs_terms_and_all_gradients(mode, vectors, batch_of, criterion, close, terms_of, same_gradients):
    v, prefix = vectors("asmil"), "" if mode == "eval" else "train_"
    model, slow = (find_model("asmil").from_official(v.under(p), dropout=0.0) for p in ("w/", "wa/"))
    batch, forced = batch_of(v["x"][0]), {}
    if mode == "train":
        forced["forced_drop"] = torch.zeros(1, 4, dtype=torch.bool)
        forced["forced_drop"][0, v["train_dropped_tokens"].long()] = True
        model.train()
    output = model(batch, **forced)
    close(output.logits, v[f"{prefix}logits"])
    close(output.auxiliary["token_logits"][0], v[f"{prefix}branch_logits"])
    close(as_published(output.attention_logits), v[f"{prefix}attention_logits"])
    close(as_published(output.attention), v[f"{prefix}attention"])
    anchored = slow(batch).attention_logits
    close(as_published(anchored), v[f"{prefix}anchor_attention_logits"])
    close(as_published(normalised_sigmoid(anchored / 0.5)), v[f"{prefix}anchor_target"])

    objective = model.objective(criterion(3), weight=1.0, scaling="released")
    objective.anchor.replace(slow)
    objective.anchor.attention_logits = lambda model, batch: anchored.detach()
    terms = terms_of(objective, model, batch, v["label"].long(), **forced)
    close(terms["bag"], v[f"{prefix}ce"])
    close(terms["anchor"], v[f"{prefix}kd_released"])
    close(sum(terms.values()), v[f"{prefix}loss_released"])
    gradients = filled(v.under("g/" if mode == "eval" else "gtrain/"), v.under("w/"))
    same_gradients(model, find_model("asmil").from_official(gradients))
    paper = anchor().distance(output.attention_logits, anchored, OFFSETS)
    close(paper, v[f"{prefix}kl_paper_sum_over_tiles_mean_over_heads_tokens"])


def test_the_anchor_answers_with_its_own_weights(vectors, batch_of, close):
    v = vectors("asmil")
    model, slow = (find_model("asmil").from_official(v.under(p)) for p in ("w/", "wa/"))
    part = anchor()
    part.replace(slow)
    found = part.attention_logits(model.train(), batch_of(v["x"][0]))
    close(as_published(found), v["anchor_attention_logits"])
    assert not found.requires_grad


def test_moving_average_of_every_tensor(vectors, close):
    v = vectors("asmil")
    model, slow = (find_model("asmil").from_official(v.under(p)) for p in ("w/", "wa/"))
    part = anchor()
    part.replace(slow)
    part.update(model)
    ours = find_model("asmil")(in_dim=24, n_outputs=3, n_tokens=4, hidden=16)
    ours.load_state_dict(part.tensors)
    names = {"q": ours.queries, "dimreduction.fc1.weight": ours.features.linear.weight}
    names |= {f"sub_attention.{m}.q_proj.weight": ours.attention[m].query.weight for m in range(4)}
    names["bag_attention.q_proj.weight"] = ours.class_attention.query.weight
    after = v.under("anchor_after_paper_ema/")
    assert names.keys() == after.keys()
    for name, value in names.items():
        close(value, after[name])
    for name, new in model.state_dict().items():
        torch.testing.assert_close(part.tensors[name], 0.999 * slow.state_dict()[name] + 0.001 * new)


def test_released_term_is_a_scaled_entropy_and_divergence():
    torch.manual_seed(0)
    online, slow = 3 * torch.randn(29, 6), torch.randn(29, 6)
    target = normalised_sigmoid(slow / 0.5)
    entropy = torch.special.entr(target).sum(dim=0).mean()
    released = anchor(scaling="released").distance(online, slow, OFFSETS)
    torch.testing.assert_close(29 * released - entropy, anchor().distance(online, slow, OFFSETS))


def test_normalised_sigmoid():
    logits = torch.tensor([[2.0], [3.0], [4.0]])
    weights = normalised_sigmoid(logits)
    assert weights.sum().item() == pytest.approx(1)
    assert not torch.allclose(weights, normalised_sigmoid(logits + 1))
    assert (weights.max() / weights.min()).item() <= 1 + math.exp(-2)
    hidden = normalised_sigmoid(logits, torch.tensor([[True], [False], [True]]))
    torch.testing.assert_close(hidden[[0, 2]], normalised_sigmoid(logits[[0, 2]]))
    assert hidden[1] == 0


def test_one_tile_and_hidden_tiles():
    one = anchor().distance(torch.tensor([[4.0]]), torch.tensor([[-2.0]]), torch.tensor([0, 1]))
    assert one.item() == pytest.approx(0, abs=1e-6)
    online, slow = torch.tensor([[0.3], [1.0], [-0.4]]), torch.tensor([[1.0], [0.0], [2.0]])
    masked = torch.cat([online, torch.full((2, 1), torch.finfo(torch.float32).min)])
    both = anchor().distance(masked, torch.cat([slow, torch.ones(2, 1)]), torch.tensor([0, 5]))
    torch.testing.assert_close(both, anchor().distance(online, slow, torch.tensor([0, 3])))


@pytest.mark.parametrize("dropping", ["fixed", "bernoulli"])
def test_dropping_leaves_at_least_one_token(dropping, batch_of):
    model = find_model("asmil")(in_dim=8, n_outputs=2, n_tokens=3, n_drop=2, token_dropping=dropping).train()
    batch = batch_of(*torch.randn(200, 2, 8))
    dropped = model(batch, generator=torch.Generator().manual_seed(0)).auxiliary["dropped_tokens"]
    counts = dropped.sum(dim=1)
    assert set(counts.tolist()) == ({2} if dropping == "fixed" else {0, 1, 2})
    assert ((dropped.float().mean(dim=0) - (2 / 3 if dropping == "fixed" else 0.57)).abs() < 0.1).all()
    assert not model.eval()(batch, generator=torch.Generator()).auxiliary["dropped_tokens"].any()


def test_scores_are_tokens_weighted_by_the_class_vector(vectors, batch_of):
    v = vectors("asmil")
    model = find_model("asmil").from_official(v.under("w/"))
    output = model(batch_of(v["x"][0]))
    weights = output.auxiliary["token_weights"][0]
    wanted = sum(w * model.instance_scores(output, "attention", m) for m, w in enumerate(weights))
    torch.testing.assert_close(model.instance_scores(output, "attention"), wanted)
    assert weights.std() > 0.01


def steps(model, objective, batches, start=0):
    optimizer = torch.optim.SGD([p for g in objective.parameter_groups(model) for p in g["params"]], lr=0.1)
    for i, batch in enumerate(batches, start):
        optimizer.zero_grad()
        sum(objective.loss(model, batch, torch.tensor([0, 1]), progress(i)).values()).backward()
        optimizer.step()
        objective.after_optimizer_step(model, batch, 0.1)
    return model


@pytest.mark.parametrize("name", ["asmil", "abmil", "acmil"])
def test_interrupted_training_ends_the_same(name, batch_of, criterion):
    batches = [batch_of(*torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(i))) for i in range(6)]

    def fresh():
        torch.manual_seed(1)
        model = find_model(name)(in_dim=8, n_outputs=2).train()
        objective = model.objective(criterion(2))
        return model, objective if name == "asmil" else find_regulariser("anchor")(objective, momentum=0.8)

    whole, objective = fresh()
    steps(whole, objective, batches)
    model, objective = fresh()
    steps(model, objective, batches[:3])
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "objective": objective.state_dict()}, buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    model, objective = fresh()
    objective.parameter_groups(model)
    model.load_state_dict(state["model"])
    objective.load_state_dict(state["objective"])
    steps(model, objective, batches[3:], start=3)
    for ours, theirs in zip(model.state_dict().values(), whole.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_kinds_of_anchor(batch_of, criterion):
    torch.manual_seed(0)
    batch, target = batch_of(torch.randn(7, 6), torch.randn(4, 6)), torch.tensor([0, 1])
    values = {}
    for kind in ("ema", "frozen", "uniform"):
        torch.manual_seed(1)
        model = find_model("abmil")(in_dim=6, n_outputs=2)
        objective = find_regulariser("anchor")(model.objective(criterion(2)), kind=kind, momentum=0.0)
        steps(model, objective, [batch] * 3)
        values[kind] = objective.loss(model, batch, target, progress())["anchor"].item()
    assert len(set(values.values())) == 3
    flat = model(batch).attention
    wanted = torch.stack([(-math.log(n) - p.log().mean()) for n, p in ((7, flat[:7]), (4, flat[7:]))]).mean()
    assert values["uniform"] == pytest.approx(0.1 * wanted.item(), rel=1e-4)


def test_warm_up_follows_the_model_and_adds_nothing(batch_of, criterion):
    model = find_model("abmil")(in_dim=6, n_outputs=2)
    objective = find_regulariser("anchor")(model.objective(criterion(2)), warm_up=2)
    batch = batch_of(torch.randn(7, 6), torch.randn(4, 6))
    steps(model, objective, [batch] * 2)
    assert all(torch.equal(objective.anchor.tensors[n], t) for n, t in model.state_dict().items())
    assert objective.anchor.steps == 2
    fresh = find_regulariser("anchor")(model.objective(criterion(2)), warm_up=2)
    assert fresh.loss(model, batch, torch.tensor([0, 1]), progress())["anchor"].item() == 0


@pytest.mark.parametrize("kind", ["frozen", "uniform"])
def test_warm_up_of_an_anchor_that_does_not_move_ends(kind, batch_of, criterion):
    torch.manual_seed(0)
    model = find_model("abmil")(in_dim=6, n_outputs=2)
    objective = find_regulariser("anchor")(model.objective(criterion(2)), kind=kind, warm_up=2)
    batch, first = batch_of(torch.randn(7, 6), torch.randn(4, 6)), {n: t.clone() for n, t in model.state_dict().items()}
    terms = []
    for i in range(3):
        steps(model, objective, [batch], start=i)
        terms.append(objective.loss(model, batch, torch.tensor([0, 1]), progress())["anchor"].item())
    assert terms[0] == 0
    assert all(term != 0 for term in terms[1:])  # after two steps
    assert all(torch.equal(objective.anchor.tensors[name], tensor) for name, tensor in first.items())


def test_other_terms_see_the_model_and_not_the_anchor(batch_of, criterion):
    model = find_model("asmil")(in_dim=8, n_outputs=2)
    objective = find_regulariser("aem")(model.objective(criterion(2)), weight=0.1)
    terms = objective.loss(model, batch_of(torch.randn(7, 8)), torch.tensor([1]), progress())
    assert terms["aem"].requires_grad
    assert terms["anchor"].requires_grad


def test_methods_without_attention_are_refused(criterion):
    model = find_model("mean_pool")(in_dim=6, n_outputs=2)
    with pytest.raises(ConfigError, match="attention"):
        find_regulariser("anchor")(model.objective(criterion(2))).parameter_groups(model)


@pytest.mark.parametrize("wrong", [{"kind": "fast"}, {"momentum": 1.5}, {"temperature": 0.0}, {"scaling": "half"}])
def test_wrong_settings_of_the_anchor_are_refused(wrong, refused):
    refused("abmil", next(iter(wrong)), regularisers={"anchor": wrong})
    refused("asmil", next(iter(wrong)), objective=wrong)


@pytest.mark.parametrize("wrong", [{"n_drop": 8}, {"token_dropping": "some"}, {"hidden": 12}])
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ConfigError):
        find_model("asmil")(in_dim=8, n_outputs=2, **wrong)
