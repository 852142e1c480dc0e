"""What a method's file says of it, and its references as links."""

import inspect
import re
from dataclasses import dataclass

from wsi_mil.errors import ConfigError
from wsi_mil.models._base import MILModel, ScoreKind

MEANINGS: dict[ScoreKind, str] = {
    "probability": "what the head says of a tile alone, between 0 and 1",
    "attention": "how much of the bag's vector comes from a tile; sums to 1 over the bag, is not evidence for a class",
    "contribution": "a tile's share of the bag's logit, with a sign; sums to the logit",
}
_NEEDED = ("summary", "family", "paper", "score_kinds")
_SOURCES = {
    r"arXiv:(\d{4}\.\d{4,5})": "https://arxiv.org/abs/{}",
    r"OpenReview (\w+)": "https://openreview.net/forum?id={}",
}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a method's file says of it, in words."""

    family: str
    summary: str
    scores: str
    order: str
    outputs: int
    targets: str
    memory: str
    paper: str
    year: int


def facts(name: str, model: type[MILModel]) -> Facts:
    """The facts of a method in its default form. Raises ConfigError when the class does not say them."""
    missing = [needed for needed in _NEEDED if not getattr(model, needed, None)]
    if missing:
        raise ConfigError(
            f"{name}: the class {model.__name__} does not say its {', '.join(missing)}. "
            f"`wsi-mil check {name}` tells what a method must say, and which laws it keeps."
        )
    order = "order matters" if model.order_matters else "order-free"
    parts = ["bag by bag" if model.loops_over_bags else "packed"]
    if model.min_tiles > 1:
        parts.append(f"at least {model.min_tiles} tiles")
    if limit := _default(model, "max_tiles"):
        parts.append(f"at most {limit:,} tiles")
    return Facts(
        family=model.family,
        summary=model.summary.rstrip("."),
        scores=", ".join(model.score_kinds),
        order=f"{order}, uses positions" if model.uses_positions else order,
        outputs=model.binary_outputs,
        targets="classes only" if model.classes_only else "any",
        memory=", ".join(parts),
        paper=model.paper,
        year=year_of(model.paper),
    )


def year_of(paper: str) -> int:
    """The year in a reference, else that of its arXiv number, else 0."""
    plain = re.sub(r"arXiv:\S+", "", paper)
    if found := re.search(r"\b(19|20)\d\d\b", plain):
        return int(found.group())
    number = re.search(r"arXiv:(\d\d)\d\d\.", paper)
    return 2000 + int(number.group(1)) if number else 0


def linked(paper: str) -> str:
    """A reference with its arXiv and OpenReview numbers as links, in Markdown."""
    for pattern, address in _SOURCES.items():
        paper = re.sub(pattern, f"[\\g<0>]({address})".replace("{}", "\\1"), paper)
    return paper


def addresses(paper: str) -> list[str]:
    """Where the papers of a reference can be read."""
    return [address.format(number) for pattern, address in _SOURCES.items() for number in re.findall(pattern, paper)]


def _default(model: type[MILModel], name: str) -> int | None:
    parameter = inspect.signature(model).parameters.get(name)
    return parameter.default if parameter is not None and isinstance(parameter.default, int) else None


def first_line(thing: object) -> str:
    """Of its docstring."""
    return (inspect.getdoc(thing) or "").partition("\n")[0]
