"""Laws about what a method says of itself and what it answers."""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from wsi_mil.bags import segment_sum, split
from wsi_mil.laws.comparing import answer_of, must_be_close, must_be_finite, must_equal, must_have_shape
from wsi_mil.laws.subject import IN_DIM, LawError, Subject, seeded
from wsi_mil.models._base import MILModel, MILOutput


def says_what_it_is(subject: Subject) -> str:
    """The class says what it is, and keeps the parameters of its constructor as attributes of the same name.

    All that is missing is told at once.
    """
    parameters = list(inspect.signature(subject.cls).parameters.values())
    loose = [p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    untyped = [p.name for p in parameters if p.annotation is inspect.Parameter.empty]
    names = ("summary", "family", "paper", "score_kinds")
    faults = {
        "the class does not say": [name for name in names if not getattr(subject.cls, name, None)],
        "parameters are keyword-only and typed; not so:": list(dict.fromkeys(loose + untyped)),
    }
    try:
        faults["not kept as attributes:"] = _lost(subject, [p.name for p in parameters])
    except Exception as error:
        faults["it cannot be built:"] = [f"{type(error).__name__}: {error}"]
    told = [f"{fault} {', '.join(names)}" for fault, names in faults.items() if names]
    if told:
        raise LawError("; ".join(told))
    return f"{len(parameters)} parameters are kept"


def _lost(subject: Subject, parameters: Sequence[str]) -> list[str]:
    """The parameters that the model does not have, or not as they were given, as attributes."""
    model = replace(subject, wrap=None).model()
    lost = [name for name in parameters if not hasattr(model, name)]
    given = {"in_dim": IN_DIM, "n_outputs": 3, **subject.params}
    return lost + [name for name, value in given.items() if getattr(model, name, None) != value and name not in lost]


def is_well_formed(subject: Subject) -> str:
    """Every tensor of the output has the shape that MILOutput promises."""
    for k in subject.widths:
        batch = subject.batch()
        output = answer_of(subject.model(k), batch)
        b, total = len(batch), len(batch.features)
        must_have_shape("logits", output.logits, (b, k))
        must_equal("offsets", output.offsets, batch.offsets)
        if (output.attention is None) != (output.attention_logits is None):
            raise LawError("attention and attention_logits are given both or not at all")
        if ("attention" in subject.model(k).score_kinds) and output.attention is None:
            raise LawError("score_kinds has attention, the output has none")
        if output.attention is not None and output.attention_logits is not None:
            m = output.attention.shape[-1]
            must_have_shape("attention", output.attention, (total, m))
            must_have_shape("attention_logits", output.attention_logits, (total, m))
        if output.instance_logits is not None:
            must_have_shape("instance_logits", output.instance_logits, (total, k))
        if output.bag_embedding is not None and (output.bag_embedding.ndim != 3 or len(output.bag_embedding) != b):
            raise LawError(f"bag_embedding is {tuple(output.bag_embedding.shape)}, not (b={b}, m, h)")
    return "shapes are as promised"


def attention_sums_to_one(subject: Subject) -> str:
    """Each column of attention is a distribution over the tiles of a bag, in training too."""
    batch = subject.batch()
    for training in (False, True):
        output = subject.model(training=training)(batch, generator=seeded(0))
        if output.attention is None:
            return "does not apply: no attention"
        if (output.attention < 0).any():
            raise LawError("attention is negative")
        sums = segment_sum(output.attention, batch.offsets)
        must_be_close("sum of attention", sums, torch.ones_like(sums), tolerance=1e-5)
        logits = split(output.attention_logits.float(), batch.offsets)
        must_be_close("attention against its logits", output.attention, torch.cat([rows.softmax(0) for rows in logits]))
    return "sums are 1"


def scores_every_tile(subject: Subject) -> str:
    """`instance_scores` gives one finite number a tile, of the declared kinds only, with their meaning."""
    for k in subject.widths:
        batch, model = subject.batch(), subject.model(k)
        output = answer_of(model, batch)
        for kind in ("probability", "attention", "contribution"):
            if kind not in model.score_kinds:
                _refuses(model, output, kind)
        if k in subject.classes:
            columns = model.score_columns(("a", "b", "c")[: max(k, 2)])
        else:
            columns = model.score_columns_of_outputs(("value",))
        if (k in subject.classes and not columns) or len({column.name for column in columns}) < len(columns):
            raise LawError("score_columns has no column, or two of one name")
        for name, kind, _, index in columns:
            scores = model.instance_scores(output, kind, index)
            must_have_shape(name, scores, (len(batch.features),))
            must_be_finite(name, scores)
            if kind == "probability" and not ((scores >= 0) & (scores <= 1)).all():
                raise LawError(f"{name} is outside of [0, 1]")
            if kind == "attention":
                sums = segment_sum(scores, batch.offsets)
                must_be_close(f"sum of {name}", sums, torch.ones_like(sums), tolerance=1e-5)
    return ", ".join(subject.model().score_kinds)


def contributions_sum_to_the_logit(subject: Subject) -> str:
    """Contributions of a bag's tiles sum to its logit, for each class."""
    for k in subject.widths:
        batch, model = subject.batch(), subject.model(k)
        if "contribution" not in model.score_kinds:
            return "does not apply: no contributions"
        output = answer_of(model, batch)
        for column in range(k):
            scores = model.instance_scores(output, "contribution", 1 if k == 1 else column)
            sums = segment_sum(scores, batch.offsets)
            must_be_close(f"sum of contributions to class {column}", sums, output.logits[:, column])
    return "sums are the logits"


def _refuses(model: MILModel, output: MILOutput, kind: Any) -> None:
    try:
        model.instance_scores(output, kind)
    except ValueError:
        return
    raise LawError(f"instance_scores answers {kind!r}, which score_kinds does not name")
