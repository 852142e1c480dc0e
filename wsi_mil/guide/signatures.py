"""The settings of a method, a plug-in or an objective, read off its signature and docstrings."""

import inspect
import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml

_GIVEN = {"self", "in_dim", "n_outputs", "criterion", "inner"}
"""What a study gives; all other parameters are settings."""
_YAML = {"None": "null", "True": "true", "False": "false"}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting of a method, its objective or a plug-in, as a signature and its docstring tell it."""

    name: str
    kind: str
    default: str
    """As YAML spells it; `required` when there is none."""
    told: str


def settings(function: Callable[..., Any]) -> list[Setting]:
    """What can be set of a method, a plug-in or an objective, with what the docstrings say of it."""
    parameters = inspect.signature(function).parameters.values()
    told = _sentences(function, [p.name for p in parameters])
    return [
        Setting(name=p.name, kind=_kind(p.annotation), default=_yaml(p.default), told=told.get(p.name, ""))
        for p in parameters
        if p.name not in _GIVEN and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def preface(function: Callable[..., Any]) -> str:
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
