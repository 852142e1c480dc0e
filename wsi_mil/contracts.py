"""The laws that every MIL method obeys, shipped, so that a user's own method can be held to them.

A law is a function of a Subject that says what was shown, and raises when it is broken. Traits of the method decide
which ones apply. They stand in `wsi_mil.laws`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from wsi_mil.laws.answers import (
    attention_sums_to_one,
    contributions_sum_to_the_logit,
    is_well_formed,
    says_what_it_is,
    scores_every_tile,
)
from wsi_mil.laws.inputs import (
    ignores_neighbours,
    ignores_order,
    ignores_places,
    sees_no_label,
    takes_few_tiles,
    takes_one_tile,
    treats_equals_equally,
)
from wsi_mil.laws.subject import IN_DIM, LawError, Subject, make_bag, seeded
from wsi_mil.laws.training import (
    draws_from_its_generator_only,
    is_finite_in_half_precision,
    is_fixed_in_eval,
    optimises_every_parameter,
    resumes_where_it_stopped,
    survives_a_checkpoint,
    takes_a_step_of_one_class,
    trains_every_parameter,
)
from wsi_mil.models._base import MILModel, Objective

__all__ = [
    "IN_DIM",
    "LAWS",
    "LawError",
    "LawResult",
    "Subject",
    "check_law",
    "check_model",
    "law_name",
    "make_bag",
    "next_step",
    "seeded",
]

Law = Callable[[Subject], str]

LAWS: tuple[Law, ...] = (
    says_what_it_is,
    is_well_formed,
    sees_no_label,
    ignores_order,
    ignores_places,
    ignores_neighbours,
    takes_one_tile,
    takes_few_tiles,
    treats_equals_equally,
    attention_sums_to_one,
    scores_every_tile,
    contributions_sum_to_the_logit,
    is_finite_in_half_precision,
    is_fixed_in_eval,
    draws_from_its_generator_only,
    takes_a_step_of_one_class,
    trains_every_parameter,
    optimises_every_parameter,
    survives_a_checkpoint,
    resumes_where_it_stopped,
)
"""All laws. The name of a law is its function's name in words."""


_BAG_BY_BAG = "Take means and softmax bag by bag (segment_mean, segment_softmax of wsi_mil.bags); no BatchNorm."
_SOFTMAX = "Make attention by segment_softmax of wsi_mil.bags, and give what it was made of as attention_logits."
_STATE = "Keep what is drawn or counted as a parameter or with register_buffer."
_NEXT_STEPS = (
    (
        "says what it is",
        "does not say",
        'Write it into the class: texts, and score_kinds = ("attention",) or the like.',
    ),
    ("says what it is", "not kept as attributes", "Write self.<name> = <name> in __init__."),
    ("ignores order", "shuffled tiles", "Pool over the tiles of a bag, or say order_matters = True in the class."),
    ("ignores order", "declares order_matters", "Take order_matters out of the class."),
    ("ignores places", "does not declare", "Say uses_positions = True in the class."),
    ("ignores places", "declares uses_positions", "Take uses_positions out of the class."),
    ("ignores places", "second slide", "Keep tiles of different batch.slide_index apart."),
    ("ignores neighbours", "beside a wild bag", _BAG_BY_BAG),
    ("ignores neighbours", "tiles of other bags", _BAG_BY_BAG),
    ("treats equals equally", "identical tiles", "Break no ties by the place in the bag."),
    ("attention sums to one", "sum of attention", _SOFTMAX),
    ("attention sums to one", "against its logits", _SOFTMAX),
    ("is finite in half precision", "attention", _SOFTMAX),
    ("is finite in half precision", "is not finite", "Take sums, squares and exponentials of .float()."),
    ("is fixed in eval", "logits", "Draw only where self.training is true and a generator is given; no BatchNorm."),
    ("draws from its generator only", "does not declare", "Say random_in_training = True in the class."),
    ("draws from its generator only", "declares", "Take random_in_training out of the class."),
    (
        "draws from its generator only",
        "global",
        "Draw with generator=generator; Dropout of wsi_mil.models._layers does.",
    ),
    ("takes a step of one class", "is not finite", "If it needs both, say needs_both_classes = True in the objective."),
    ("trains every parameter", "gets no gradient", "Use it in forward, or take it out."),
    ("trains every parameter", "is zero everywhere", "Look for a detach() or an argmax on the way to the logits."),
    ("optimises every parameter", "groups", "Give each parameter once in parameter_groups of the objective."),
    ("survives a checkpoint", "after a checkpoint", _STATE),
    ("resumes where it stopped", "after an interruption", _STATE),
    ("", "index k out of range", "Take at most as many tiles as the bag has, or say min_tiles in the class."),
)
"""A law ("" any), words of its message, and what mends it most often."""


@dataclass(frozen=True, kw_only=True)
class LawResult:
    """Whether a method obeys one law."""

    name: str
    passed: bool
    message: str
    """Why it is broken, why it does not apply, or what was shown."""


def law_name(law: Law) -> str:
    """'ignores order' of `ignores_order`."""
    return law.__name__.replace("_", " ")


def check_law(law: Law, subject: Subject) -> LawResult:
    """Try one law. Whatever the method raises is its fault and becomes the message."""
    try:
        return LawResult(name=law_name(law), passed=True, message=law(subject))
    except LawError as broken:
        return LawResult(name=law_name(law), passed=False, message=str(broken))
    except Exception as error:
        return LawResult(name=law_name(law), passed=False, message=f"it raised {type(error).__name__}: {error}")


def next_step(result: LawResult) -> str:
    """What mends a broken law most often; empty where its message says all there is."""
    steps = [step for law, words, step in _NEXT_STEPS if law in ("", result.name) and words in result.message]
    return "" if result.passed else " ".join(steps)


def check_model(
    cls: type[MILModel],
    *,
    params: Mapping[str, Any] | None = None,
    wrap: Callable[[Objective], Objective] | None = None,
) -> list[LawResult]:
    """Hold a method to every law. params: of its constructor.  wrap: puts a regulariser around its objective.

    A class that does not say what it is would break most of the others for that alone, so it is held to no more.
    """
    subject = Subject(cls=cls, params=params or {}, wrap=wrap)
    first = check_law(LAWS[0], subject)
    return [first, *(check_law(law, subject) for law in LAWS[1:])] if first.passed else [first]
