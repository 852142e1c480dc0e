"""What each method says of itself, put into words: the answers of `wsi-mil list` and the page docs/methods.md. Pure.

Nothing about a single method is written here; only the words that help to choose between them.
"""

import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml

from wsi_mil.encoders._base import Declaration
from wsi_mil.errors import ConfigError
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
change the file, not this page. `wsi-mil list models NAME` tells all of one method: settings, defaults, plug-ins that go
with it. Runnable settings with their sources lie in `configs/methods/`; [parity.md](parity.md) describes the agreement
with published code.

No method is best everywhere. Published gains were measured with other encoders, splits and rules of selection than
yours, and change with them. Choose by what you need:

- **A first answer, or fewer than about 100 patients:** mean_pool, max_pool and abmil, all on the same folds. Go on
  only when the report's paired test shows that another method is better on *your* patients.
- **Small lesions in much tissue:** the families max-pooling and instance probability, dsmil, clam_sb, or acmil.
- **Few patients and small lesions:** `configs/small_cohort.yaml` (mean_pool, abmil, abmil+aem, acmil and focusmil, a
  fixed number of epochs), and max_pool beside them; the others of the line above when there are more patients.
  `configs/large_cohort.yaml` is for some hundred patients or more: validation chooses the epoch, three seeds a fold.
- **A map that is evidence:** `contribution` sums to the answer, `probability` speaks of each tile alone. `attention`
  says where the model looked, not what it saw there. rrt and psa mix each tile with its window or its neighbours before
  they pool, and so does `+sm` on features: there a tile's contribution or attention is that of the mixture, and part of
  it belongs to the tiles around.
- **More than two classes:** every method takes them. The head then has an output a class, also where the column
  *outputs* says 1. midam trains each class against the rest and is not calibrated; the tile probabilities of the
  prob_* methods are one against the rest too and need not sum to 1; ins takes the first class for background.
- **Survival, numbers, ordered classes, several targets** ([targets.md](targets.md)): every method that is not marked
  *classes only*, with its defaults; dsmil (loss bce, prediction mean), dtfd (distillation MaxS, MaxMinS) and mhim
  (score class, baseline dsmil) refuse them. Count events, not patients: around a C-index of 0.65 the 95 %
  interval is at best ±0.13 with 20 events in all test parts together, ±0.09 with 50, ±0.06 with 100 and ±0.045 with 200
  (simulated, 40 to 70 % censored); with fewer than 50 hardly any two methods can be told apart. `--loss cox` compares
  the bags of a step with each other and needs 8 or more (`train.bags_per_step`), better many more where events are
  rare; the default, hazards of intervals, takes any number. Maps of such targets are of attention and contribution
  only.
- **Attention that sits on a handful of tiles:** `+aem` or `+anchor` behind an attention method, or acmil, asmil, mhim.
- **Signs in the arrangement of tissue:** smabmil and psa use positions. A method whose *order matters* reads the order
  of the file as if it were an arrangement; shuffled tiles give another answer.
- **Several slides a patient:** spatial methods never look across slides; all others take the slides as one bag.
- **Very long bags:** no method holds every tile against every other in memory; abmilx and rrt still take time that
  grows with the square of the tiles. A method with a limit in the column *bags* refuses longer ones, and rrt those
  with more than `max_window` tiles a window (262,144 tiles a bag, as it is set).
  `train.tile_cap` draws tiles while training; evaluation uses all.

The scores of tiles (the first kind is drawn by default):

"""
_NUMBERS = """
The numbers lie in `RUN/instance_scores/METHOD/MODEL/SLIDE.h5`: dataset `scores` (tiles, columns), places in `coords`
and `grid_xy`, the names of the columns as JSON in the attribute `columns`. `wsi-mil heatmap RUN --column
probability:tumour` draws one of them. Every slide is scored by the model that did not see its patient. A probability
for each tile: """
_TRAITS = """
The columns: *order* says whether the order of tiles matters, and whether their positions are used. *Outputs* is the
width of the head for two classes (files always hold one probability a class). *Targets* says what can be predicted:
any kind, or classes only (one target, no order between the classes). *Bags* says how a step of several bags
is worked off: packed (all tiles at once) or one by one, which costs time, not memory; and the limit of tiles, if any.
"""
_WORKED = """
## Several published settings on the same folds

Each file of `configs/methods/` trains one method as published. To compare some of them, put their `methods` into one
file, with their `train` settings inside the method: these hold for it alone, those at the end for all. Settings of
`folds` and `task` are shared by all methods of a run, so a published `task` (clam_sb draws classes equally often) holds
for every one of them or for none. With few patients add `--selection none`: too small a validation part chooses
nothing (each file of `configs/methods/` says where that begins).

```yaml
# wsi-mil crossval labels.csv --config three.yaml --bags work/bags_* --out run --target label
methods:
- name: acmil
  params: {n_branches: 5, top_k: 10, mask_drop: 0.6}
  train: {epochs: 50, lr: 1.0e-4, weight_decay: 1.0e-5, schedule: cosine, metric: auc, patience: null}
- name: dsmil
  params: {nonlinear: true, query_dim: 128}
  objective: {max_weight: 0.5}
  train: {epochs: 50, lr: 1.0e-4, weight_decay: 1.0e-3, schedule: cosine, metric: auc, patience: 10}
- name: transmil
  params: {heads: 8, dropout: 0.1}
  train: {epochs: 200, lr: 2.0e-4, weight_decay: 1.0e-5, schedule: constant, metric: loss, patience: 10, accumulate: 2}
folds: {n_folds: 5, validation: 0.2, seed: 0}
train: {bags_per_step: 1, selection: validation, seeds: [0, 1, 2]}
```
"""
_NEEDED = ("summary", "family", "paper", "score_kinds")
_GIVEN = {"self", "in_dim", "n_outputs", "criterion", "inner"}
"""What a study gives; all other parameters are settings."""
_YAML = {"None": "null", "True": "true", "False": "false"}
_COLUMNS = 120
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


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting of a method, its objective or a plug-in, as a signature and its docstring tell it."""

    name: str
    kind: str
    default: str
    """As YAML spells it; `required` when there is none."""
    told: str


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


def _marks(told: Facts) -> list[str]:
    """What is special about a method, for the list."""
    usual = {"any", "packed", "order-free"}
    marks = (told.order.removeprefix("order-free, "), told.targets, told.memory)
    return [mark for mark in marks if mark not in usual]


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


def model_lines(models: Mapping[str, type[MILModel]]) -> list[str]:
    """An entry a method: what it is, family, scores of tiles, what is special about it, paper and year."""
    entries = {}
    for name, model in models.items():
        told = facts(name, model)
        traits = [told.family, f"scores: {told.scores}", *_marks(told)]
        paper = told.paper if str(told.year) in told.paper or not told.year else f"{told.paper} ({told.year})"
        entries[name] = f"{told.summary}\n{'; '.join(traits)}. {paper}"
    return _columns(entries)


def regulariser_lines(regularisers: Mapping[str, type[Regulariser]]) -> list[str]:
    """An entry a plug-in: what it does, and where it comes from."""
    return _columns({name: "\n".join(_of_plug_in(plug_in)) for name, plug_in in regularisers.items()})


def model_card(
    name: str, model: type[MILModel], *, plug_ins: Mapping[str, type[Regulariser]], files: Mapping[str, str]
) -> list[str]:
    """All that is known of one method. plug_ins: those that go with it.  files: what it is -> where it lies."""
    told = facts(name, model)
    outputs = "as many as the target needs" if told.outputs == 2 else "1 for two classes, else as many as are needed"
    fields = {
        "family": told.family,
        "paper": _paper(told.paper),
        "targets": "classes only (one target, no order)" if model.classes_only else "any kind",
        "outputs": outputs,
        "tiles": told.order,
        "bags": told.memory,
        **files,
    }
    lines = [f"{name}: {told.summary}", *_first_line_of(model, unlike=told.summary), *_fields(fields)]
    lines += ["", "scores of tiles (the first is drawn by default)"]
    lines += _fields({kind: MEANINGS[kind] for kind in model.score_kinds})
    lines += ["", "params", *_settings_lines(settings(model))]
    own = model.objective is not MILModel.objective
    lines += ["", f"objective: {_preface(model.objective) if own else 'the loss of the task alone'}"]
    lines += _settings_lines(settings(model.objective))
    lines += ["", f"plug-ins that go with it ({name}+PLUG_IN)"]
    return lines + (_fields({n: plug_in.summary for n, plug_in in plug_ins.items()}) or ["  none"])


def regulariser_card(
    name: str, plug_in: type[Regulariser], *, models: Sequence[str], files: Mapping[str, str]
) -> list[str]:
    """All that is known of one plug-in. models: the methods that it goes with.  files: as `model_card`."""
    summary = plug_in.summary or _first_line(plug_in)
    lines = [f"{name}: {summary}", *_first_line_of(plug_in, unlike=summary)]
    lines += _fields({"paper": _paper(plug_in.paper), "goes with": ", ".join(models) or "none", **files})
    return [*lines, "", "params", *_settings_lines(settings(plug_in))]


def encoder_card(name: str, declared: Declaration) -> list[str]:
    """All that an encoder's contract says."""
    transform = declared.transform
    seen = (
        f"resized to {transform.input_px} px ({transform.interpolation})" if transform.input_px else "tiles as they are"
    )
    fields = {
        "network": f"{declared.architecture}, weights {declared.hub_id or 'in this package'}",
        "features": f"{declared.dim} ({declared.output})",
        "mpp": "/".join(f"{value:g}" for value in declared.mpp) or "any",
        "tile_px": str(declared.tile_px or "any"),
        "input": f"{seen}, mean {list(transform.mean)}, std {list(transform.std)}",
        "trained on": "pathology" if declared.pathology else "not pathology",
        "licence": f"{declared.licence}{', gated' if declared.gated else ''}",
        "source": declared.source,
    }
    return [f"{name}: {declared.label}", *_fields(fields)]


def settings(function: Callable[..., Any]) -> list[Setting]:
    """What can be set of a method, a plug-in or an objective, with what the docstrings say of it."""
    parameters = inspect.signature(function).parameters.values()
    told = _sentences(function, [p.name for p in parameters])
    return [
        Setting(name=p.name, kind=_kind(p.annotation), default=_yaml(p.default), told=told.get(p.name, ""))
        for p in parameters
        if p.name not in _GIVEN and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def methods_page(models: Mapping[str, type[MILModel]], regularisers: Mapping[str, type[Regulariser]]) -> str:
    """The page that helps to choose a method, in Markdown."""
    of_tiles = [name for name, model in models.items() if "probability" in model.score_kinds]
    parts = [_INTRODUCTION, *(f"- `{kind}`: {text}.\n" for kind, text in MEANINGS.items())]
    parts += [_NUMBERS, f"{', '.join(of_tiles)}.\n", _TRAITS]
    told = {name: facts(name, model) for name, model in models.items()}
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
                parts.append(_row(f"`{name}`", *told_of, linked(fact.paper), str(fact.year or "")))
    parts.append("\n## Plug-ins\n\nWritten behind a method's name, several if need be: `abmil+aem`. ")
    parts.append("`wsi-mil list regularisers NAME` tells which methods one goes with.\n\n")
    parts += [_row("plug-in", "what it does", "source"), "|---|---|---|\n"]
    for name, plug_in in regularisers.items():
        does, source = _of_plug_in(plug_in)
        parts.append(_row(f"`+{name}`", does, linked(source)))
    return "".join([*parts, _WORKED])


def _in_order(families: set[str]) -> Sequence[str]:
    """The families that are described above in that order, then all others by the alphabet."""
    return [*(name for name in _FAMILIES if name in families), *sorted(families - set(_FAMILIES))]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _default(model: type[MILModel], name: str) -> int | None:
    parameter = inspect.signature(model).parameters.get(name)
    return parameter.default if parameter is not None and isinstance(parameter.default, int) else None


def _first_line(thing: object) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def _first_line_of(cls: type, *, unlike: str) -> list[str]:
    """The first line of a docstring as a line of a card, where it says more than the summary."""
    line = _first_line(cls)
    return [f"  {line}"] if line.rstrip(".") != unlike.rstrip(".") else []


def _of_plug_in(plug_in: type[Regulariser]) -> tuple[str, str]:
    """What it does, in the words of summary and docstring, and its source."""
    parts = [part.rstrip(".") for part in (plug_in.summary, _first_line(plug_in)) if part]
    return ". ".join(parts) + ".", plug_in.paper


def _paper(paper: str) -> str:
    return " ".join([paper, *addresses(paper)])


def _columns(texts: Mapping[str, str], *, indent: int = 0, widest: int = 24) -> list[str]:
    """Names and what is said of them in two columns, wrapped; a name wider than `widest` has a line of its own."""
    width = max((len(name) for name in texts if len(name) <= widest), default=0)
    rest = " " * (indent + width + 2)
    lines = []
    for name, text in texts.items():
        alone = len(name) > width
        wrapped = [
            fill(part, _COLUMNS - len(rest), break_long_words=False, break_on_hyphens=False)
            for part in text.splitlines()
        ]
        told = "\n".join(wrapped).replace("\n", "\n" + rest)
        lines.append(" " * indent + (f"{name}\n{rest}{told}" if alone else f"{name:<{width}}  {told}").rstrip())
    return lines


def _fields(fields: Mapping[str, str]) -> list[str]:
    """The fields of a card that are not empty."""
    return _columns({name: text for name, text in fields.items() if text}, indent=2)


def _settings_lines(found: Sequence[Setting]) -> list[str]:
    told = {f"{one.name}: {one.kind} = {one.default}": one.told for one in found}
    return _columns(told, indent=2, widest=52) or ["  none"]


def _preface(function: Callable[..., Any]) -> str:
    """What a docstring says before it turns to the parameters, in one line."""
    names = list(inspect.signature(function).parameters)
    text = " ".join((inspect.getdoc(function) or "").split())
    return re.split(_named(names), text, maxsplit=1)[0].strip().rstrip(".")


def _sentences(function: Callable[..., Any], names: Collection[str]) -> dict[str, str]:
    """What docstrings say of parameters, as `name, name: sentence`; the classes that a class is made of have their say.

    A sentence that only points to another class gives way to what that class says.
    """
    told: dict[str, str] = {}
    sources = reversed(inspect.getmro(function)) if inspect.isclass(function) else [function]
    for source in sources:
        text = " ".join((source.__doc__ or "").split())
        _, *parts = re.split(_named(names), text)
        for these, sentence in zip(parts[::2], parts[1::2], strict=True):
            if not sentence.startswith("as `"):
                said = "the head of the file tells" if sentence == "see above." else sentence.strip().rstrip(".")
                said = re.sub("|".join(_YAML), lambda found: _YAML[found.group()], said)
                told |= dict.fromkeys(these.split(", "), said)
    return told


def _named(names: Collection[str]) -> str:
    """A pattern of `name: ` and `name, name: ` at the start of a sentence of a docstring."""
    one = f"(?:{'|'.join(map(re.escape, names))})"
    return rf"(?:^|(?<=\s))({one}(?:, {one})*): "


def _kind(annotation: Any) -> str:
    """A type as a configuration spells its values: `fixed | bernoulli`, `float (above 0) | null`, `[int, ...]`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(map(str, parts))
    if origin in (Union, UnionType):
        return " | ".join(map(_kind, parts))
    if origin is Annotated:
        return f"{_kind(parts[0])} ({', '.join(map(str, parts[1:]))})"
    if origin in (tuple, list):
        return f"[{', '.join('...' if part is Ellipsis else _kind(part) for part in parts)}]"
    if annotation is NoneType:
        return "null"
    return "any" if annotation is inspect.Parameter.empty else inspect.formatannotation(annotation)


def _yaml(default: Any) -> str:
    """A default as a configuration spells it."""
    if default is inspect.Parameter.empty:
        return "required"
    try:
        return yaml.safe_dump(default, default_flow_style=True, width=math.inf).partition("\n")[0]
    except yaml.YAMLError:  # an object that only Python code can give
        return repr(default)
