"""Settings from a file or the command line -> what a signature declares: names, types and ranges are checked.

A range stands in the type, so that a signature says it and nobody checks it again:

    def __init__(self, *, heads: Count = 8, dropout: Rate = 0.0) -> None: ...
"""

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, wraps
from numbers import Integral, Real
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from wsi_mil.errors import ConfigError

_Spec = TypeVar("_Spec")


@dataclass(frozen=True)
class Range:
    """Which numbers are allowed."""

    low: float = -math.inf
    high: float = math.inf
    without_low: bool = False
    without_high: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.without_low else value >= self.low
        below = value < self.high if self.without_high else value <= self.high
        return math.isfinite(value) and above and below

    def __str__(self) -> str:
        low = f"{'above' if self.without_low else 'at least'} {self.low:g}" if math.isfinite(self.low) else ""
        high = f"{'below' if self.without_high else 'at most'} {self.high:g}" if math.isfinite(self.high) else ""
        return " and ".join(filter(None, (low, high))) or "finite"


Count = Annotated[int, Range(1)]
"""How many there are, at least one: heads, branches, a width."""
Amount = Annotated[int, Range(0)]
"""How many there are; none is allowed."""
Share = Annotated[float, Range(0, 1)]
"""A part of a whole."""
Rate = Annotated[float, Range(0, 1, without_high=True)]
"""The share that is dropped; never all."""
Weight = Annotated[float, Range(0)]
"""What a loss term is multiplied by; 0 switches it off."""
Positive = Annotated[float, Range(0, without_low=True)]
"""A temperature, a radius, a power: nothing at 0."""
Finite = Annotated[float, Range()]
"""Any number."""


def override(spec: _Spec, values: Mapping[str, Any], *, where: str) -> _Spec:
    """A frozen spec with some fields changed; names and types are checked. Raises ConfigError."""
    return replace(spec, **typed(type(spec), values, where=where))  # type: ignore[type-var]


def typed(
    function: Callable[..., Any], values: Mapping[str, Any], *, where: str, without: Iterable[str] = ()
) -> dict[str, Any]:
    """`values` as the types that the signature of `function` declares. without: parameters that are no settings.

    where: begins each message, such as "method abmil, params".  Raises ConfigError.
    """
    allowed = [name for name in inspect.signature(function).parameters if name not in {"self", *without}]
    _refuse_unknown(values, allowed, where=where)
    hints = _hints(function.__init__ if inspect.isclass(function) else function)
    return {name: _one(value, hints.get(name, Any), name=name, where=where) for name, value in values.items()}


def holds_its_ranges(cls: type) -> None:
    """Make a class refuse numbers out of the ranges of its constructor wherever it is built, in Python as in a study.

    It then raises ConfigError. The constructor keeps its signature.
    """
    if "__init__" not in vars(cls):
        return
    init = vars(cls)["__init__"]

    @wraps(init)
    def checked(self: Any, *args: Any, **settings: Any) -> None:
        for name, wanted in _hints(init).items():
            if name in settings and not _in_range(settings[name], wanted):
                raise ConfigError(f"{cls.__name__}: {name} is {settings[name]!r}; it must be {_in_words(wanted)}.")
        init(self, *args, **settings)

    cls.__init__ = checked  # type: ignore[misc]


@cache
def _hints(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The declared types; those that exist for type checkers alone, as a user's own file may have, are left out."""
    names = inspect.unwrap(function).__globals__
    found: dict[str, Any] = {}
    for name, declared in function.__annotations__.items():
        one = SimpleNamespace(__annotations__={name: declared})
        with suppress(NameError, AttributeError, TypeError):
            found |= get_type_hints(one, globalns=names, include_extras=True)
    return found


def _in_range(value: Any, wanted: Any) -> bool:
    origin, parts = get_origin(wanted), get_args(wanted)
    if origin is Annotated and isinstance(value, Real):
        return all(float(value) in extra for extra in parts[1:] if isinstance(extra, Range))
    if origin in (Union, UnionType):
        return any(_in_range(value, part) for part in parts if part is not NoneType) or value is None
    if origin is tuple and isinstance(value, tuple | list):
        return all(_in_range(item, parts[0]) for item in value)
    return True


def _one(value: Any, wanted: Any, *, name: str, where: str) -> Any:
    try:
        return _converted(value, wanted)
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: {name} is {value!r}; it must be {_in_words(wanted)}.") from None


def _in_words(wanted: Any) -> str:
    """A type as a message names it: `int, at least 1`, `None or float, from 0 to 1`."""
    origin, parts = get_origin(wanted), get_args(wanted)
    if origin is Annotated:
        return f"{_in_words(parts[0])}, {', '.join(str(extra) for extra in parts[1:])}"
    if origin in (Union, UnionType):
        return " or ".join(sorted(map(_in_words, parts), key="None".__ne__))
    if origin is Literal:
        return f"one of {', '.join(map(repr, parts))}"
    if wanted is NoneType:
        return "None"
    return wanted.__name__ if inspect.isclass(wanted) and not parts else str(wanted).replace("typing.", "")


def _converted(value: Any, wanted: Any) -> Any:
    """A value of a YAML file as the type that a signature declares; types that we do not know pass as they are.

    Raises ValueError or TypeError when it does not fit.
    """
    origin, parts = get_origin(wanted), get_args(wanted)
    if origin is Annotated:
        found = _converted(value, parts[0])
        return found if all(found in extra for extra in parts[1:] if isinstance(extra, Range)) else _refuse(value)
    if origin in (Union, UnionType):
        fitting = [part for part in parts if _fits(value, part)]
        return _converted(value, fitting[0]) if fitting else _refuse(value)
    if origin is Literal:
        return value if value in parts else _refuse(value)
    if origin in (tuple, list) and not isinstance(value, str):
        if origin is tuple and Ellipsis not in parts and len(value) != len(parts):
            _refuse(value)
        return origin(_converted(item, parts[0]) for item in value)
    if wanted is float and not isinstance(value, bool):
        return float(value)  # a string too: YAML takes 1e-4 for one
    if wanted is int:
        return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else _refuse(value)
    if wanted in (bool, str, NoneType):
        return value if type(value) is wanted or (value is None and wanted is NoneType) else _refuse(value)
    return value


def _fits(value: Any, wanted: Any) -> bool:
    try:
        _converted(value, wanted)
    except (TypeError, ValueError):
        return False
    return True


def _refuse(value: Any) -> Any:
    raise ValueError(value)


def _refuse_unknown(names: Iterable[str], allowed: Sequence[str], *, where: str) -> None:
    for name in names:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{where}: there is no setting {name!r}. There are {', '.join(allowed) or 'none'}.{hint}")
