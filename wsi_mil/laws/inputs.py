"""Laws about what of a bag may matter: not its label, its order, its neighbours; its places only where declared."""

import inspect
from dataclasses import replace

import torch
from torch import Tensor

from wsi_mil.bags import Bag, BagBatch, pack, split
from wsi_mil.laws.comparing import answer_of, is_close, must_be_close, must_be_finite, must_equal, per_tile, spans
from wsi_mil.laws.subject import LawError, Subject, make_bag, seeded

_LABEL_WORDS = {"label", "labels", "target", "targets", "y", "instance_labels", "tile_labels"}


def sees_no_label(subject: Subject) -> str:
    """No label can reach `forward`, by its arguments or behind its back; what things are called changes nothing."""
    for name, parameter in list(inspect.signature(subject.cls.forward).parameters.items())[2:]:
        if name.lower() in _LABEL_WORDS:
            raise LawError(f"forward takes {name!r}")
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY or parameter.default is not None:
            raise LawError(f"forward's {name!r} must be keyword-only with the default None")
    batch, model = subject.batch(), subject.model()
    renamed = replace(batch, ids=("x", "y", "z"), slide_ids=(("p",), ("q",), ("r",)))
    must_equal("logits under other names", answer_of(model, renamed).logits, answer_of(model, batch).logits)
    k = subject.cls.binary_outputs
    (bags, said), *others = (
        _said_in_training(subject, k, torch.tensor(target)) for target in ([1, 0, 1], [1, 1, 0], [0, 1, 1])
    )
    for others_bags, would_say in others:
        if others_bags == bags:  # an objective may choose which bags it asks about by their labels
            must_equal("the first answer of a step with other labels", would_say, said)
    return "forward has no way in for a label"


def _said_in_training(subject: Subject, k: int, target: Tensor) -> tuple[tuple[str, ...], Tensor]:
    """The bags of the first forward pass of one training step, and their logits."""
    model, said = subject.model(k, training=True), list[tuple[tuple[str, ...], Tensor]]()
    model.register_forward_hook(
        lambda _, given, output: said.append((given[0].ids if given else (), output.logits.detach()))
    )
    subject.loss(model, subject.batch(), target=target)
    return said[0] if said else ((), torch.zeros(0))


def ignores_order(subject: Subject) -> str:
    """Tiles in another order: the same logits, and every score moves with its tile; unless order_matters."""
    if subject.model().order_matters:
        batch, model = subject.batch(200), subject.model()
        if is_close(answer_of(model, _shuffled(batch)[0]).logits, answer_of(model, batch).logits):
            raise LawError("declares order_matters, but 200 tiles in another order have the same logits")
        return "does not apply: order_matters"
    for training in (False, True):
        batch, model = subject.batch(500, 70, 12, 5), subject.model(training=training)
        shuffled, order = _shuffled(batch)
        before, after = answer_of(model, batch), answer_of(model, shuffled)
        must_be_close("logits of shuffled tiles", after.logits, before.logits)
        for name, values in per_tile(model, before).items():
            must_be_close(f"{name} of shuffled tiles", per_tile(model, after)[name], values[order])
    return "logits stay, scores move along"


def _shuffled(batch: BagBatch) -> tuple[BagBatch, Tensor]:
    """The tiles of each bag in another order, and the rows where they were."""
    order = [start + torch.randperm(n, generator=seeded(3)) for start, n in spans(batch)]
    return pack([bag.take(rows - rows.min()) for bag, rows in zip(batch.bags(), order, strict=True)]), torch.cat(order)


def ignores_places(subject: Subject) -> str:
    """Where tiles lie matters only to a method that uses_positions, and how slides of a bag lie to each other never."""
    bags, model = list(subject.batch(70, 24).bags()), subject.model()
    before = answer_of(model, pack(bags)).logits
    moved = [replace(bag, grid_xy=bag.grid_xy[torch.randperm(len(bag), generator=seeded(4))]) for bag in bags]
    same = torch.equal(answer_of(model, pack(moved)).logits, before)
    if same == model.uses_positions:
        raise LawError(
            "declares uses_positions, but tiles that change places have the same logits"
            if same
            else "does not declare uses_positions, but tiles that change places have other logits"
        )
    if not model.uses_positions:
        return "does not apply: positions are not used"
    together = [_of_two_slides(bag, gap) for bag in bags for gap in (0, 3)]
    near, far = (answer_of(model, pack(together[i::2])).logits for i in (0, 1))
    must_be_close("logits of a bag whose second slide is moved", far, near)
    return "places matter within a slide, as declared"


def _of_two_slides(bag: Bag, gap: int) -> Bag:
    """The bag with its second half on another slide, whose grid begins `gap` places further on."""
    second = torch.arange(len(bag)) >= len(bag) // 2
    return replace(
        bag,
        grid_xy=bag.grid_xy + gap * second[:, None],
        slide_index=second.long(),
        slide_ids=("first", "second"),
    )


def ignores_neighbours(subject: Subject) -> str:
    """What else is in the batch changes nothing, in eval mode and in training mode."""
    bag = make_bag(max(9, subject.cls.min_tiles), seed=5)
    wild = make_bag(max(21, subject.cls.min_tiles), seed=6)
    wild = replace(wild, features=torch.full_like(wild.features, 1e6))
    for training in (False, True):
        model = subject.model(training=training)
        alone = answer_of(model, pack([bag]))
        for neighbours, place in (([bag, wild], 0), ([wild, bag], 1)):
            batch = pack(neighbours)
            together = answer_of(model, batch)
            mode = "training" if training else "eval"
            must_be_close(f"logits beside a wild bag ({mode} mode)", together.logits[place : place + 1], alone.logits)
            for name, values in per_tile(model, together).items():
                mine = split(values, batch.offsets)[place]
                must_be_close(f"{name} beside a wild bag ({mode} mode)", mine, per_tile(model, alone)[name])
    _draws_nothing_from_others(subject)
    return "a neighbour of 1e6 and another length changes nothing"


def _draws_nothing_from_others(subject: Subject) -> None:
    """In training with a generator, where answers cannot be compared: no gradient flows from a bag to another."""
    batch, model = subject.batch(), subject.model(training=True)
    features = batch.features.clone().requires_grad_()
    logits = model(replace(batch, features=features), generator=seeded(0)).logits
    for place, (start, n) in enumerate(spans(batch)):
        (found,) = torch.autograd.grad(logits[place].sum(), features, retain_graph=True, allow_unused=True)
        if found is not None and (found[:start].any() or found[start + n :].any()):
            raise LawError("a bag's logits in training depend on the tiles of other bags")


def takes_one_tile(subject: Subject) -> str:
    """A bag of one tile is answered and trained on; its attention is 1."""
    if subject.cls.min_tiles > 1:
        return f"does not apply: min_tiles is {subject.cls.min_tiles}"
    model = subject.model()
    output = answer_of(model, subject.batch(1))
    must_be_finite("logits", output.logits)
    if output.attention is not None:
        must_be_close("attention of the only tile", output.attention, torch.ones_like(output.attention))
    must_be_finite("loss", subject.loss(subject.model(training=True), subject.batch(1, 1)))
    return "one tile works"


def takes_few_tiles(subject: Subject) -> str:
    """Bags with fewer tiles than any top-k of the method are answered and trained on."""
    for n in (2, 3, 9, 10, 11):
        must_be_finite(f"logits of {n} tiles", answer_of(subject.model(), subject.batch(n)).logits)
        must_be_finite(f"loss of {n} tiles", subject.loss(subject.model(training=True), subject.batch(n, n + 1)))
    return "2 to 11 tiles work"


def treats_equals_equally(subject: Subject) -> str:
    """Identical tiles have identical scores, and their bag is trained on."""
    bag = make_bag(max(7, subject.cls.min_tiles), seed=1)
    same = pack([replace(bag, features=bag.features[:1].expand(len(bag), -1).clone())])
    model = subject.model()
    output = answer_of(model, same)
    must_be_finite("logits", output.logits)
    if not (model.order_matters or model.uses_positions):
        for name, values in per_tile(model, output).items():
            must_be_close(f"{name} of identical tiles", values, values[:1].expand_as(values))
    must_be_finite("loss", subject.loss(subject.model(training=True), same))
    return "identical tiles are equal"
