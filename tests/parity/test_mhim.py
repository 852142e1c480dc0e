import io
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from wsi_mil.bags import pack, split
from wsi_mil.contracts import (
    LAWS,
    Subject,
    check_law,
    ignores_neighbours,
    is_well_formed,
    law_name,
    make_bag,
    trains_every_parameter,
)
from wsi_mil.errors import ConfigError
from wsi_mil.lookup import find_model, find_regulariser
from wsi_mil.methods import build, parse_method
from wsi_mil.models._base import Progress
from wsi_mil.models.mhim import Masking, consistency, cosine, visible
from wsi_mil.tasks import class_task

CASES = {
    "h10": Masking(high=0.1),
    "h10r50": Masking(high=0.1, high_random=0.5),
    "h3r50": Masking(high=0.03, high_random=0.5),
    "l80": Masking(low=0.8),
    "r50": Masking(random=0.5),
    "r50_h10r50": Masking(random=0.5, high=0.1, high_random=0.5),
    "r70_l20_h5": Masking(random=0.7, low=0.2, high=0.05),
    "inv_h10": Masking(high=0.1, inverse=True),
}
FORMS = {"abmil": {}, "dsmil": {"baseline": "dsmil"}, "transmil": {"baseline": "transmil"}, "v2": {"merge_tokens": 3}}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def at(step, total=10):
    return Progress(step=step, total_steps=total, generator=torch.Generator().manual_seed(step))


def unasked(n: int) -> torch.Tensor:
    raise AssertionError("no permutation is needed")


def recorded(case: dict[str, torch.Tensor]) -> Callable[[int], torch.Tensor]:
    """The published permutations, one after the other."""
    orders = iter([case[name] for name in ("randperm0", "randperm1") if name in case])

    def permutation(n: int) -> torch.Tensor:
        order = next(orders)
        assert len(order) == n
        return order

    return permutation


@pytest.fixture
def made(criterion):
    """A model and its objective."""

    def make(n_outputs=2, form="abmil", **settings):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = find_model("mhim")(in_dim=32, n_outputs=n_outputs, hidden=16, **FORMS[form])
        return model.train(), model.objective(criterion(n_outputs), **settings)

    return make


@pytest.mark.parametrize("tag", CASES)
def test_masks_are_the_published_ones(tag, vectors):
    case = vectors("mhim_v1").under(f"{tag}_")
    hidden = CASES[tag].hidden(case["attn"].T, recorded(case))
    assert hidden.nonzero().flatten().tolist() == case["masked"].tolist()
    assert (~hidden).sum().item() == case["len_keep"].item()


@pytest.mark.parametrize(
    ("tag", "masking"), [("H_h10", Masking(high=0.1)), ("H_l80_h3r50", Masking(low=0.8, high=0.03, high_random=0.5))]
)
def test_heads_vote_as_published_up_to_ties(tag, masking, vectors):
    """Tiles with more votes than the last one of the published choice are hidden, those with fewer are not."""
    case = vectors("mhim_v1").under(f"{tag}_")
    scores, published = case["attn"][0].T, torch.zeros(40, dtype=torch.bool)
    published[case["masked"]] = True
    hidden = masking.hidden(scores, recorded(case))
    assert hidden.sum() == published.sum()
    if masking.low:
        return
    votes = torch.zeros(40).index_add_(0, scores.topk(4, dim=0).indices.flatten(), torch.ones(32))
    assert votes[hidden].sum() == votes[published].sum()
    assert (votes[hidden].sort().values == votes[published].sort().values).all()


def test_low_votes_reach_the_published_sum(vectors):
    case = vectors("mhim_v1").under("H_l80_h3r50_")
    scores, published = case["attn"][0].T, torch.zeros(40, dtype=torch.bool)
    published[case["masked"]] = True
    votes = torch.zeros(40).index_add_(0, scores.topk(32, dim=0, largest=False).indices.flatten(), torch.ones(256))
    hidden = Masking(low=0.8).hidden(scores, unasked)
    assert votes[hidden].sort().values.tolist() == votes.sort().values[-32:].tolist()
    assert votes[hidden].min() >= votes[published & ~hidden].max()


def test_a_step_of_v1_with_its_gradients_and_the_teacher_after_it(vectors, batch_of, criterion, close, same_gradients):
    v = vectors("mhim_v1")
    model = find_model("mhim").from_official(v.under("stu_w/"))
    objective = model.objective(criterion(2), warmup=0.0, random=0.0, high=0.1, high_random=1.0, high_decay=False)
    objective.teacher = find_model("mhim").from_official(v.under("tea_w/")).requires_grad_(False)
    batch = batch_of(v["x"][0])
    taught = objective.teacher(batch)
    close(taught.attention.T, v["tea_attn"])
    close(taught.bag_embedding[:, 0], v["tea_feat"])
    hidden = objective.hidden_tiles(taught, at(0))
    assert (~hidden).nonzero().flatten().tolist() == v["kept_ids"][0].tolist()
    close(model(visible(batch, ~hidden)).logits, v["stu_logits"])
    close(model(batch).logits, v["test_logits_stu"])
    terms = objective.loss(model, batch, v["label"], at(0))
    close(terms["consistency"], 0.1 * v["cons_loss"])
    close(sum(terms.values()), v["loss"])
    sum(terms.values()).backward()
    same_gradients(model, find_model("mhim").from_official(v.under("stu_g/")))
    objective.after_optimizer_step(model, batch, 1e-4)
    after = find_model("mhim").from_official(v.under("tea_after_ema_w/"))
    for name, wanted in after.named_parameters():
        close(dict(objective.teacher.named_parameters())[name], wanted.detach(), 1e-7)


def test_schedules_and_soft_cross_entropy(vectors, close):
    v = vectors("mhim_v1")
    close(torch.tensor([cosine(0.03, 0.0, t / 10) for t in range(10)]), v["cos_sched_h_0.03_to_0_T10"], 1e-9)
    close(torch.tensor([cosine(0.9999, 1.0, t / 10) for t in range(10)]), v["cos_sched_mm_0.9999_to_1_T10"], 1e-6)
    close(consistency(v["ce_student"], v["ce_teacher"], temperature=0.1), v["soft_ce_tt0_1"])


def test_a_step_of_v2(vectors, batch_of, criterion, close):
    v = vectors("mhim_v2")
    model = find_model("mhim").from_official(v.under("stu_w/"), act="gelu", dropout=0.0).train()
    assert (model.merge_tokens, model.attention_dim) == (5, 128)
    objective = model.objective(
        criterion(2),
        warmup=0.0,
        random=0.0,
        high=0.05,
        high_random=1.0,
        high_decay=False,
        score="class",
        alpha=0.5,
        merge_keep=0.8,
    )
    objective.teacher = find_model("mhim").from_official(v.under("tea_w/"), act="gelu").requires_grad_(False)
    batch = batch_of(v["x"][0])
    taught = objective.teacher(batch)
    close(taught.attention.T, v["tea_attn"])
    close(taught.bag_embedding[:, 0], v["tea_feat"])
    close(objective.teacher.difficulty(taught, "class").exp().T, v["tea_score"])
    hidden = objective.hidden_tiles(taught, at(0))
    assert (~hidden).nonzero().flatten().tolist() == v["kept_after_mask"][0].tolist()
    seen = visible(batch, ~hidden)
    output = model(seen, merge_noise=v["merge_noise"], merge_keep=0.8)
    assert output.offsets.tolist() == [0, v["n_after_merge"].item()]
    close(output.logits, v["stu_logits"], 3e-5)  # theirs is 2.4e-5 away from the same sum in fp64; ours is not
    close(model.merge.queries, v["q_before"])
    terms = objective.loss(model, batch, v["label"], at(0), merge_noise=v["merge_noise"])
    close(terms["consistency"], 0.5 * v["cons_loss"])
    close(sum(terms.values()), v["loss"])
    close(model.merge.queries, v["q_after"], 1e-7)
    assert (model.merge.queries - v["q_before"][0]).abs().max() > 1e-5
    sum(terms.values()).backward()
    assert model.merge.to_query.weight.grad.abs().max() > 0
    close(model.eval()(batch).logits, v["test_logits_stu"])


def test_masks_unite_and_stay_among_their_candidates():
    scores, order = torch.randn(200, 1), torch.randperm(200)
    both = Masking(low=0.3, high=0.2, high_random=0.5).hidden(scores, lambda n: torch.arange(n).flip(0))
    low = Masking(low=0.3).hidden(scores, unasked)
    high = Masking(high=0.2, high_random=0.5).hidden(scores, lambda n: torch.arange(n).flip(0))
    assert torch.equal(both, low | high)
    assert not (low & high).any()
    assert high.sum() == math.ceil(math.ceil(200 * 0.4) * 0.5)
    candidates = torch.zeros(200, dtype=torch.bool)
    candidates[scores[:, 0].topk(80).indices] = True
    assert not (high & ~candidates).any()
    assert Masking(random=0.25).hidden(scores, lambda n: order).sum() == 50


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_a_tile_is_always_seen_and_never_the_highest_alone(n):
    for masking in (Masking(high=0.01), Masking(low=0.5, high=0.01), Masking(random=1.0), Masking(low=1.0, high=0.4)):
        scores = torch.randn(n, 1)
        hidden = masking.hidden(scores, torch.arange)
        assert not hidden.all()
        if n > 1 and masking.high:
            assert hidden[scores.argmax()]


def test_random_masks_are_uniform_however_small(made):
    _, objective = made(warmup=0.0, random=0.0005, high=0.0)
    batch, found = pack([make_bag(40, seed=0)]), torch.zeros(40)
    taught = objective.teacher(batch)
    progress = at(0)
    for _ in range(800):
        found += objective.hidden_tiles(taught, progress)
    assert found.sum() == 800
    assert found.max() < 50


def test_the_high_mask_fades_and_the_teacher_freezes(made):
    _, objective = made(warmup=0.2, high=0.03, momentum=0.9, momentum_schedule="cosine")
    assert [objective.high_at(at(n)) for n in (0, 2)] == [0.03, 0.03]
    assert objective.high_at(at(6)) == pytest.approx(0.015)
    assert 0 < objective.high_at(at(9)) < 0.003
    assert objective.momentum_at(at(2)) == pytest.approx(0.9)
    assert objective.momentum_at(at(6)) == pytest.approx(0.95)
    _, objective = made(warmup=0.0, random=0.0, high=0.4, high_random=1.0)
    taught = objective.teacher(pack([make_bag(100, seed=0)]))
    assert [objective.hidden_tiles(taught, at(n)).sum().item() for n in (0, 5, 9)] == [40, 20, 1]


def test_warming_up_is_the_baseline_and_the_teacher_equals_the_student(made):
    model, objective = made(warmup=0.5)
    batch, target = pack([make_bag(9, seed=0), make_bag(4, seed=1)]), torch.tensor([0, 1])
    terms = objective.loss(model, batch, target, at(4))
    wanted = objective.criterion(model(batch, generator=at(4).generator).logits, target)
    assert terms.keys() == {"bag"}
    assert torch.equal(terms["bag"], wanted)
    with torch.no_grad():
        model.features.weight.add_(1)
    objective.after_optimizer_step(model, batch, 0.1)
    assert torch.equal(objective.teacher.features.weight, model.features.weight)
    assert objective.loss(model, batch, target, at(5)).keys() == {"bag", "consistency"}
    before = objective.teacher.features.weight.clone()
    with torch.no_grad():
        model.features.weight.add_(1)
    objective.after_optimizer_step(model, batch, 0.1)
    torch.testing.assert_close(objective.teacher.features.weight, before + 1e-4, rtol=0, atol=2e-7)


def test_a_momentum_of_one_freezes_the_teacher_and_no_gradient_reaches_it(made):
    model, objective = made(warmup=0.0, momentum=1.0)
    batch = pack([make_bag(9, seed=0)])
    sum(objective.loss(model, batch, torch.tensor([1]), at(0)).values()).backward()
    assert all(p.grad is None for p in objective.teacher.parameters())
    before = objective.teacher.features.weight.clone()
    with torch.no_grad():
        model.features.weight.zero_()
    objective.after_optimizer_step(model, batch, 0.1)
    assert torch.equal(objective.teacher.features.weight, before)
    assert {id(p) for group in objective.parameter_groups(model) for p in group["params"]} == {
        id(p) for p in model.parameters()
    }


def test_consistency_is_least_at_the_sharpened_teacher_where_it_is_its_entropy():
    teacher = torch.randn(2, 1, 7, dtype=torch.float64, requires_grad=True)
    student = (teacher / 0.1).detach().requires_grad_()
    loss = consistency(student, teacher, temperature=0.1)
    p = student.detach().softmax(dim=-1)
    torch.testing.assert_close(loss, -(p * p.log()).sum(dim=-1).mean())
    loss.backward()
    assert student.grad.abs().max() < 1e-12
    assert teacher.grad is None


def test_without_masks_and_teacher_it_is_the_baseline(made):
    model, objective = made(warmup=0.0, random=0.0, high=0.0, alpha=0.0)
    batch, target = pack([make_bag(9, seed=0), make_bag(4, seed=1)]), torch.tensor([0, 1])
    terms = objective.loss(model, batch, target, at(3))
    assert terms.keys() == {"bag"}
    assert torch.equal(terms["bag"], objective.criterion(model(batch, generator=at(3).generator).logits, target))


def test_the_published_start_takes_a_trained_baseline(made):
    model, objective = made(warmup=0.0)
    torch.manual_seed(1)
    trained = find_model("mhim")(in_dim=32, n_outputs=2, hidden=16)
    head = model.encoder.head.weight.clone()
    objective.start_from(model, trained)
    assert torch.equal(model.features.weight, trained.features.weight)
    assert torch.equal(model.encoder.head.weight, head)
    for theirs, ours in zip(objective.teacher.parameters(), trained.parameters(), strict=True):
        assert torch.equal(theirs, ours)
    with pytest.raises(ConfigError, match="does not fit"):
        objective.start_from(model, find_model("mhim")(in_dim=32, n_outputs=2, hidden=8))


def test_a_run_that_starts_from_a_trained_teacher_has_no_plain_phase_that_would_undo_it(made):
    model, objective = made(init_from="plain", warmup=0.2, momentum=1.0)
    assert objective.init_from == "plain"
    trained, _ = made()
    torch.nn.init.constant_(trained.encoder.head.bias, 3.0)
    objective.start_from(model, trained)
    batch, target = pack([make_bag(9, seed=0), make_bag(4, seed=1)]), torch.tensor([0, 1])
    assert "consistency" in objective.loss(model, batch, target, at(0))
    objective.after_optimizer_step(model, batch, 0.1)
    assert (objective.teacher.encoder.head.bias == 3).all()


def test_the_start_reaches_through_plug_ins():
    task = class_task("y", ("a", "b"))
    for name in ("mhim+aem", "mhim+mammoth+aem"):
        spec = replace(parse_method(name), params={"hidden": 32}, objective={"init_from": "plain"})
        model, objective = build(spec, in_dim=32, task=task, seed=0)
        trained, _ = build(spec, in_dim=32, task=task, seed=1)
        assert objective.init_from == "plain"
        objective.start_from(model, trained)
        inner = getattr(trained, "behind", trained)
        teacher = next(part.teacher for part in objective.modules() if hasattr(part, "teacher"))
        assert all(map(torch.equal, teacher.parameters(), inner.parameters()))
        if "mammoth" in name:
            assert all(map(torch.equal, model.layer.parameters(), trained.layer.parameters()))
    model, objective = build(parse_method("abmil"), in_dim=32, task=task, seed=0)
    with pytest.raises(NotImplementedError, match="starts from no other"):
        objective.start_from(model, model)


def test_class_scores_have_no_ties_where_the_published_ones_do():
    model = find_model("mhim")(in_dim=32, n_outputs=2).eval()
    output = model(pack([make_bag(10_000, seed=0)]))
    published = output.auxiliary["class_shares"].softmax(dim=1).max(dim=1).values
    assert len(torch.unique(published)) < 5_000
    assert len(torch.unique(model.difficulty(output, "class"))) > 9_900


def test_ranks_are_those_of_each_baseline(made):
    batch = pack([make_bag(9, seed=0), make_bag(4, seed=1)])
    for form, columns in (("abmil", 1), ("dsmil", 1), ("transmil", 8)):
        model, _ = made(3, form)
        output = model.eval()(batch)
        scores = model.difficulty(output, "attention")
        assert scores.shape == (13, columns)
        if form == "dsmil":
            assert torch.equal(scores[:, 0], output.instance_logits.max(dim=1).values)
        if form == "transmil":
            assert torch.equal(scores, output.auxiliary["class_attention"])


def test_both_streams_of_dsmil_learn(made):
    model, objective = made(2, "dsmil", warmup=1.0)
    batch, target = pack([make_bag(9, seed=0)]), torch.tensor([1])
    loss = objective.loss(model, batch, target, at(0))["bag"]
    streams = model(batch, generator=at(0).generator).auxiliary
    wanted = [objective.criterion(streams[name], target) for name in ("bag_logits", "max_logits")]
    torch.testing.assert_close(loss, sum(wanted) / 2)


def test_merging_keeps_bags_apart(made):
    model, _ = made(2, "v2")
    bags = [make_bag(n, seed=n) for n in (1, 2, 11)]
    noise = torch.rand(14)
    together = model(pack(bags), merge_noise=noise, merge_keep=0.8)
    assert together.offsets.diff().tolist() == [0 + 3, 1 + 3, 8 + 3]
    for i, (bag, own) in enumerate(zip(bags, split(noise, pack(bags).offsets), strict=True)):
        alone = model(pack([bag]), merge_noise=own, merge_keep=0.8)
        torch.testing.assert_close(together.logits[i], alone.logits[0])


def test_what_stays_is_shuffled_as_published(made):
    """The transformer sees the order."""
    model = find_model("mhim")(in_dim=32, n_outputs=2, hidden=16, baseline="transmil", merge_tokens=3).eval()
    batch, noise = pack([make_bag(10, seed=0)]), torch.rand(10)
    hidden, order = model.activation(model.features(batch.features)), noise.argsort()
    seen = torch.cat([hidden[order[:8]], model.merge(hidden[order[8:]])])
    wanted = model.encoder(replace(batch, features=seen, offsets=torch.tensor([0, 11])))
    torch.testing.assert_close(model(batch, merge_noise=noise, merge_keep=0.8).logits, wanted.logits)


def test_the_merge_has_dropout_where_there_is_any(made):
    rates = [find_model("mhim")(in_dim=32, n_outputs=2, merge_tokens=3, dropout=p).merge.drop.rate for p in (0, 0.25)]
    assert rates == [0, 0.1]
    merge = made(form="v2")[0].merge
    drawn = merge(torch.randn(40, 16), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(0)
    torch.rand(8, 3, 40, generator=generator)  # of the attention
    assert torch.equal(drawn == 0, torch.rand(3, 16, generator=generator) < 0.1)


def test_the_teachers_queries_follow(made):
    model, objective = made(form="v2", warmup=0.0, momentum=0.9)
    model.merge.queries = model.merge.queries + 1
    before = objective.teacher.merge.queries.clone()
    batch = pack([make_bag(9, seed=0)])
    objective.loss(model, batch, torch.tensor([1]), at(0))
    objective.after_optimizer_step(model, batch, 0.1)
    torch.testing.assert_close(objective.teacher.merge.queries, 0.9 * before + 0.1 * model.merge.queries)


def test_class_scores_of_the_transformer_are_those_of_its_values(made):
    """v2: each tile's values of the first layer, weighted by the class token's attention, through output and head."""
    model, objective = made(3, "transmil", warmup=0.0, score="class", random=0.0, high=0.3, high_random=1.0)
    batch, layer = pack([make_bag(9, seed=0), make_bag(4, seed=1)]), model.encoder.layers[0].attention
    taught = objective.teacher(batch)
    tiles = model.activation(model.features(batch.features))
    normed = model.encoder.layers[0].norm(tiles)
    shares = torch.zeros(13, 16)
    for head in range(8):
        of_head = slice(2 * head, 2 * head + 2)
        values = normed @ layer.to_qkv.weight[32:][of_head].T
        weighted = taught.auxiliary["class_attention"][:, head, None] * values
        shares += weighted @ layer.out.weight[:, of_head].T
    logits = (shares + layer.out.bias) @ model.encoder.head.weight.T
    ranks = logits.softmax(dim=1).max(dim=1).values
    torch.testing.assert_close(model.difficulty(taught, "class").exp()[:, 0], ranks.double(), rtol=1e-5, atol=1e-7)
    hidden = objective.hidden_tiles(taught, at(0))
    assert [part.sum().item() for part in split(hidden, batch.offsets)] == [3, 2]


@pytest.mark.parametrize("n", [1, 2, 5, 36, 37, 49, 60])
def test_tiles_fill_a_square_for_the_positions_of_the_transformer_alone(n, made):
    """Attention sees each tile once; a square below 7 x 7 is filled with zeros, row by row."""
    model = made(form="transmil")[0].eval()
    encoder, batch = model.encoder, pack([make_bag(n, seed=0)])
    tiles = model.activation(model.features(batch.features))
    tokens, seen = encoder.layers[0](torch.cat([encoder.class_token[None], tiles]))
    side = math.ceil(n**0.5)
    square = torch.cat([tokens, tokens[1 : 1 + side**2 - n]])
    if side < 7:
        square = torch.cat([square, torch.zeros(49 - side**2, 16)])
    tokens = encoder.position(square, max(side, 7))[: n + 1]
    feature = encoder.norm(encoder.layers[1](tokens)[0][0])
    output = model(batch)
    torch.testing.assert_close(output.bag_embedding[0, 0], feature)
    torch.testing.assert_close(output.logits[0], encoder.head(feature))
    torch.testing.assert_close(model.difficulty(output, "attention"), seen[:, 1:].T)


@pytest.mark.parametrize("law", LAWS, ids=law_name)
@pytest.mark.parametrize("form", ["dsmil", "v2"])
def test_every_form_obeys_the_laws(form, law):
    result = check_law(law, Subject(cls=find_model("mhim"), params=FORMS[form]))
    assert result.passed, result.message


@pytest.mark.parametrize("law", [is_well_formed, ignores_neighbours, trains_every_parameter], ids=law_name)
def test_the_transformer_obeys_the_laws_that_its_own_form_adds_to(law):
    result = check_law(law, Subject(cls=find_model("mhim"), params=FORMS["transmil"]))
    assert result.passed, result.message
    assert find_model("mhim")(in_dim=32, n_outputs=2, baseline="transmil").order_matters


@pytest.mark.parametrize("form", FORMS)
def test_a_restart_between_two_steps_changes_nothing(form, made):
    def go(model, objective, optimizer, steps):
        for n in steps:
            batch = pack([make_bag(9 if form == "transmil" else 9 + i, seed=i) for i in (n % 3, 3)])
            optimizer.zero_grad()
            sum(objective.loss(model, batch, torch.tensor([0, 1]), at(n)).values()).backward()
            optimizer.step()
            objective.after_optimizer_step(model, batch, 0.1)

    def begin():
        settings = {"v2": {"score": "class"}, "transmil": {"random": 0.0}}.get(form, {})
        model, objective = made(2, form, warmup=0.2, momentum=0.9, momentum_schedule="cosine", low=0.2, **settings)
        return model, objective, torch.optim.AdamW(objective.parameter_groups(model), lr=0.01)

    whole, halves, again = begin(), begin(), begin()
    go(*whole, range(7))
    go(*halves, range(4))
    buffer = io.BytesIO()
    torch.save([part.state_dict() for part in halves], buffer)
    buffer.seek(0)
    for part, state in zip(again, torch.load(buffer, weights_only=True), strict=True):
        part.load_state_dict(state)
    go(*again, range(4, 7))
    for one, other in zip(whole[:2], again[:2], strict=True):
        assert all(torch.equal(v, other.state_dict()[k]) for k, v in one.state_dict().items())
    assert not torch.equal(whole[0].features.weight, whole[1].teacher.features.weight)


def test_entropy_of_attention_is_taken_of_what_the_student_sees(made):
    model, objective = made(warmup=0.0, random=0.5, high=0.0, alpha=0.0)
    wrapped = find_regulariser("aem")(objective, weight=1.0)
    batch = pack([make_bag(20, seed=0)])
    term = wrapped.loss(model, batch, torch.tensor([0]), at(0))["aem"]
    assert -math.log(10) <= term.item() < 0


@pytest.mark.parametrize("form", ["dsmil", "transmil"])
def test_published_names_of_the_other_baselines_are_read(form):
    model = find_model("mhim")(in_dim=20, n_outputs=2, hidden=64, **FORMS[form]).eval()
    inner = {k.removeprefix("encoder."): v for k, v in model.state_dict().items() if k.startswith("encoder.")}
    names = {"features.weight": "patch_to_emb.0.weight", "features.bias": "patch_to_emb.0.bias"}
    published = {theirs: model.state_dict()[ours] for ours, theirs in names.items()}
    if form == "dsmil":
        layers = {"query": "b_classifier.q", "value.linear": "b_classifier.v.1", "instance_head": "i_classifier.0"}
        layers["head"] = "b_classifier.fcc"
    else:
        layers = {"class_token": "cls_token", "position.convolutions.0": "pos_embedding.proj", "norm": "norm"}
        layers |= {f"position.convolutions.{i}": f"pos_embedding.proj{i}" for i in (1, 2)}
        for i in (0, 1):
            layers |= {
                f"layers.{i}.norm": f"layer{i + 1}.norm",
                f"layers.{i}.attention.out": f"layer{i + 1}.attn.to_out.0",
            }
            layers |= {f"layers.{i}.attention.to_qkv": f"layer{i + 1}.attn.to_qkv"}
            layers |= {f"layers.{i}.attention.residual": f"layer{i + 1}.attn.res_conv"}
    for name, value in inner.items():
        ours = max((o for o in layers if name.startswith(o)), key=len, default=None)
        if ours is None:
            assert name.startswith("head.")
            published[name.replace("head", "predictor")] = value
        else:
            published[f"online_encoder.{layers[ours]}{name.removeprefix(ours)}"] = value
    if form == "transmil":
        published["online_encoder.cls_token"] = published["online_encoder.cls_token"][None, None]
    else:  # the published module has this layer with every baseline
        published |= {"predictor.weight": torch.randn(2, 64), "predictor.bias": torch.randn(2)}
    loaded = find_model("mhim").from_official(published)
    batch = pack([replace(make_bag(7, seed=0), features=torch.randn(7, 20))])
    assert loaded.baseline == form
    assert torch.equal(loaded(batch).logits, model(batch).logits)


def test_what_cannot_be_is_refused(made, refused):
    for settings in ({"high_random": 0.0}, {"random": 1.5}, {"score": "votes"}, {"warmup": 2.0}):
        refused("mhim", f"mhim.*{next(iter(settings))}", objective=settings)
    with pytest.raises(ConfigError, match="abmil"):
        made(2, "dsmil", score="class")
    with pytest.raises(ConfigError, match="baseline"):
        find_model("mhim")(in_dim=4, n_outputs=2, baseline="clam")
