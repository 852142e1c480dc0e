"""What each method says of itself, put into words: the lines of `wsi-mil list` and the page docs/methods.md. Pure.

Nothing about a single method is written here; only the words that help to choose between families.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wsi_mil.models._base import MILModel, Regulariser, ScoreKind

RENEW = "wsi-mil list models --page docs/methods.md"
"""The command that writes the page anew."""

MEANINGS: dict[ScoreKind, str] = {
    "probability": "what the head says of a tile alone, between 0 and 1",
    "attention": "how much of the bag's vector comes from a tile; sums to 1 over the bag, is not evidence for a class",
    "contribution": "a tile's share of the bag's logit, with a sign; sums to the logit",
}

_FAMILIES = {
    "pooling": "A mean of some kind. Few parameters; the honest first line of every table, and hard to beat on signs "
    "that are all over the tissue. Small lesions are diluted, by mean_pool most.",
    "max-pooling": "One tile decides for each class. For small foci that are clear when seen; learns slowly, since "
    "only that tile gets a gradient.",
    "instance probability": "Each tile gets a probability, and the bag's is pooled from them. For maps that are read "
    "tile by tile.",
    "instance": "A tile classifier is trained under the bags' labels. Needs bags that are free of the other classes.",
    "additive": "Each tile adds its share to the answer.",
    "attention": "A learned weight for each tile. The usual choice: begin with abmil. Those with several branches, "
    "heads or tokens are meant to spread their attention over more of the lesion.",
    "transformer": "Tiles, or learned tokens, look at each other. For signs that lie in the arrangement or the mixture "
    "of tissue; they need more patients, more time and more care than attention does.",
    "AUC maximisation": "Trains the order of the bags instead of each bag's probability. For rare classes; needs bags "
    "of both classes in each step, and its probabilities are not calibrated.",
}
_INTRODUCTION = f"""# Choosing a method

Made by `{RENEW}` from what each method's file says of itself:
change the file, not this page. Runnable settings with their sources lie in `configs/methods/`; `parity.md` describes
the agreement with published code.

No method is best everywhere. Published gains were measured with other encoders, splits and rules of selection than
yours, and change with them. Choose by what you need:

- **A first answer, or fewer than about 100 patients:** mean_pool, max_pool and abmil, all on the same folds. Go on
  only when the report's paired test shows that another method is better on *your* patients.
- **A map that is evidence:** `contribution` sums to the answer, `probability` speaks of each tile alone. `attention`
  says where the model looked, not what it saw there.
- **Small lesions in much tissue:** the families max-pooling and instance probability, dsmil, clam_sb, or acmil.
- **Attention that sits on a handful of tiles:** `+aem` or `+anchor` behind an attention method, or acmil, asmil, mhim.
- **Signs in the arrangement of tissue:** smabmil and psa use positions. A method whose *order matters* reads the order
  of the file as if it were an arrangement; shuffled tiles give another answer.
- **Several slides a patient:** spatial methods never look across slides; all others take the slides as one bag.
- **Very long bags:** no method holds every tile against every other in memory; abmilx and rrt still take time that
  grows with the square of the tiles. A method with a limit in the column *bags* refuses longer ones.
  `train.tile_cap` draws tiles while training; evaluation uses all.

The scores of tiles (the first kind is drawn by default):

"""
_TRAITS = """
The columns: *order* says whether the order of tiles matters, and whether their positions are used. *Outputs* is the
width of the head for two classes (files always hold one probability a class). *Targets* says what can be predicted:
any kind, or classes only (one target, no order between the classes). *Bags* says how a step of several bags
is worked off: packed (all tiles at once) or one by one, which costs time, not memory; and the limit of tiles, if any.
"""


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


def facts(model: type[MILModel]) -> Facts:
    """The facts of a method in its default form."""
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


def model_lines(models: Mapping[str, type[MILModel]]) -> list[str]:
    """One line a method: family, meaning of the scores, order, what it is, paper and year."""
    width = max(map(len, models), default=0)
    lines = []
    for name, model in models.items():
        told = facts(model)
        paper = told.paper if str(told.year) in told.paper or not told.year else f"{told.paper} ({told.year})"
        lines.append(f"{name:<{width}}  {told.family}; scores: {told.scores}; {told.order}. {told.summary}. {paper}.")
    return lines


def regulariser_lines(regularisers: Mapping[str, type[Regulariser]]) -> list[str]:
    """One line a plug-in."""
    width = max(map(len, regularisers), default=0)
    return [f"{name:<{width}}  {_first_line(plug_in)}" for name, plug_in in regularisers.items()]


def methods_page(models: Mapping[str, type[MILModel]], regularisers: Mapping[str, type[Regulariser]]) -> str:
    """The page that helps to choose a method, in Markdown."""
    parts = [_INTRODUCTION, *(f"- `{kind}`: {text}.\n" for kind, text in MEANINGS.items()), _TRAITS]
    told = {name: facts(model) for name, model in models.items()}
    for family in _in_order({fact.family.split(",")[0] for fact in told.values()}):
        parts.append(f"\n## {family[0].upper()}{family[1:]}\n\n")
        if family in _FAMILIES:
            parts.append(f"{_FAMILIES[family]}\n\n")
        parts.append(
            _row("method", "what it is", "scores of tiles", "order", "outputs", "targets", "bags", "paper", "year")
        )
        parts.append("|" + "---|" * 9 + "\n")
        for name, fact in told.items():
            if fact.family.split(",")[0] == family:
                told_of = (fact.summary, fact.scores, fact.order, str(fact.outputs), fact.targets, fact.memory)
                parts.append(_row(f"`{name}`", *told_of, fact.paper, str(fact.year or "")))
    parts.append("\n## Plug-ins\n\nWritten behind a method's name, several if need be: `abmil+aem`.\n\n")
    parts += [_row("plug-in", "what it does"), "|---|---|\n"]
    parts += [_row(f"`+{name}`", _first_line(plug_in)) for name, plug_in in regularisers.items()]
    return "".join(parts)


def _in_order(families: set[str]) -> Sequence[str]:
    """The families that are described above in that order, then all others by the alphabet."""
    return [*(name for name in _FAMILIES if name in families), *sorted(families - set(_FAMILIES))]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _default(model: type[MILModel], name: str) -> int | None:
    parameter = inspect.signature(model).parameters.get(name)
    return parameter.default if parameter is not None and isinstance(parameter.default, int) else None


def _first_line(thing: type) -> str:
    return (inspect.getdoc(thing) or "").splitlines()[0]
