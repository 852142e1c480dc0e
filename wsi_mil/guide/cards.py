"""The lines of `wsi-mil list`: an entry a name, or all that is known of one."""

from collections.abc import Mapping, Sequence
from textwrap import fill

from wsi_mil.encoders._base import Declaration
from wsi_mil.guide.facts import MEANINGS, Facts, addresses, facts, first_line
from wsi_mil.guide.signatures import Setting, preface, settings
from wsi_mil.models._base import MILModel, Regulariser

_COLUMNS = 120


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
    return _columns({name: "\n".join(of_plug_in(plug_in)) for name, plug_in in regularisers.items()})


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
    lines += ["", f"objective: {preface(model.objective) if own else 'the loss of the task alone'}"]
    lines += _settings_lines(settings(model.objective))
    lines += ["", f"plug-ins that go with it ({name}+PLUG_IN)"]
    return lines + (_fields({n: plug_in.summary for n, plug_in in plug_ins.items()}) or ["  none"])


def regulariser_card(
    name: str, plug_in: type[Regulariser], *, models: Sequence[str], files: Mapping[str, str]
) -> list[str]:
    """All that is known of one plug-in. models: the methods that it goes with.  files: as `model_card`."""
    summary = plug_in.summary or first_line(plug_in)
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


def _marks(told: Facts) -> list[str]:
    """What is special about a method, for the list."""
    usual = {"any", "packed", "order-free"}
    marks = (told.order.removeprefix("order-free, "), told.targets, told.memory)
    return [mark for mark in marks if mark not in usual]


def _first_line_of(cls: type, *, unlike: str) -> list[str]:
    """The first line of a docstring as a line of a card, where it says more than the summary."""
    line = first_line(cls)
    return [f"  {line}"] if line.rstrip(".") != unlike.rstrip(".") else []


def of_plug_in(plug_in: type[Regulariser]) -> tuple[str, str]:
    """What it does, in the words of summary and docstring, and its source."""
    parts = [part.rstrip(".") for part in (plug_in.summary, first_line(plug_in)) if part]
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
