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


def check_model(
    cls: type[MILModel],
    *,
    params: Mapping[str, Any] | None = None,
    wrap: Callable[[Objective], Objective] | None = None,
) -> list[LawResult]:
    """Hold a method to every law. params: of its constructor.  wrap: puts a regulariser around its objective."""
    subject = Subject(cls=cls, params=params or {}, wrap=wrap)
    return [check_law(law, subject) for law in LAWS]
