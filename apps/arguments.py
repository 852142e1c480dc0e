"""A stage's signature -> a command line. Everything a flag can say, a YAML file can say, and the other way round."""

import difflib
import inspect
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, get_args, get_origin

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from wsi_mil.errors import ConfigError

Stage = Callable[..., Any]

_SHORT_NAMES = (
    "The last part of a name is enough where it is the only one, and - may stand for _: --tile-px for --tiles.tile_px. "
    "A list takes several values: --methods abmil acmil."
)


class _Parser(ArgumentParser):
    """An argument parser that raises instead of printing its whole usage."""

    def error(self, message: str, exc: Exception | None = None) -> NoReturn:
        raise ConfigError(_with_nearest(message, _spellings(self)))


def parser_for(command: str, stage: Stage) -> ArgumentParser:
    """Build the parser of one command from its stage.

    Positional-or-keyword parameters of the stage are positionals, keyword-only ones are options, and parameters that
    are frozen specs become groups of options.
    """
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = _Parser(prog=f"wsi-mil {command}", description=(inspect.getdoc(stage) or "").split("\n\n")[0])
    parser.epilog = _SHORT_NAMES
    parser.add_argument("--config", action="config", help="YAML file with any of the options below")
    positionals = _positionals(stage)
    for parameter in positionals:
        required = parameter.default is inspect.Parameter.empty
        extra: dict[str, Any] = {} if required else {"nargs": "?", "default": parameter.default}
        parser.add_argument(parameter.name, type=parameter.annotation, help=_help_of(stage, parameter.name), **extra)
    # no group of the stage itself: it would be named like the stage, and `train` has options of that name
    parser.add_function_arguments(stage, as_group=False, skip={parameter.name for parameter in positionals})
    return parser


def parse(parser: ArgumentParser, arguments: Sequence[str]) -> dict[str, Any]:
    """The keyword arguments of the stage. Raises ConfigError with the nearest spelling."""
    namespace: Namespace = parser.parse_args(_normalise(arguments, parser))
    values = parser.instantiate(namespace)
    return {key: value for key, value in vars(values).items() if key not in ("config", "print_config")}


def _positionals(stage: Stage) -> list[inspect.Parameter]:
    parameters = inspect.signature(stage).parameters.values()
    return [p for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]


def _help_of(stage: Stage, name: str) -> str:
    """What the stage's docstring says of a parameter, in its `Args:` section."""
    found = re.search(rf"^ +{name}: (.+(?:\n {{8,}}.+)*)", inspect.getdoc(stage) or "", re.M)
    return " ".join(found.group(1).split()) if found else ""


def _spellings(parser: ArgumentParser) -> list[str]:
    return [option.removeprefix("--") for option in parser._option_string_actions if option.startswith("--")]


def _normalise(arguments: Sequence[str], parser: ArgumentParser) -> list[str]:
    """Allow hyphens, short names of grouped options, bare switches, and several values after a list option."""
    spellings = _spellings(parser)
    types = {action.dest: getattr(action, "_typehint", None) for action in parser._actions}
    lists = {name for name, hint in types.items() if _takes_several(hint)}
    switches = {name for name, hint in types.items() if hint is bool}
    result: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            result.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        name = _full_name(name.replace("-", "_"), spellings)
        if name in switches and not equals and rest[:1] not in (["true"], ["false"]):
            result.append(f"--{name}=true")
        elif name in lists and not equals:
            values = [rest.pop(0) for _ in range(_count_values(rest))]
            _extend_list(result, name, _unfolded(values))
        else:
            result.append(f"--{name}{equals}{value}")
    return result


def _takes_several(hint: Any) -> bool:
    """Whether a type is a list or tuple, or may be one (`list[str] | None`)."""
    return get_origin(hint) in (list, tuple) or any(get_origin(part) in (list, tuple) for part in get_args(hint))


def _full_name(name: str, spellings: list[str]) -> str:
    """`mpp` -> `tiles.mpp` when one group alone has it, the shallowest first."""
    if name in spellings:
        return name
    ends = sorted((s for s in spellings if s.endswith(f".{name}")), key=lambda s: s.count("."))
    alone = len(ends) == 1 or (len(ends) > 1 and ends[0].count(".") < ends[1].count("."))
    return ends[0] if alone else name


def _count_values(rest: Sequence[str]) -> int:
    return next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))


def _unfolded(values: list[str]) -> list[str]:
    """`a,b` as two values; a YAML list stays as it is."""
    if len(values) == 1 and not values[0].startswith(("[", "{")):
        return values[0].split(",")
    return values


def _extend_list(result: list[str], name: str, values: list[str]) -> None:
    """Append values to a list option; the same option given twice adds to the first."""
    if len(values) == 1 and values[0].startswith("["):
        result.append(f"--{name}={values[0]}")
        return
    prefix = f"--{name}="
    for i, word in enumerate(result):
        if word.startswith(prefix):
            result[i] = prefix + json.dumps(json.loads(word[len(prefix) :]) + values)
            return
    result.append(prefix + json.dumps(values))


def _with_nearest(message: str, spellings: list[str]) -> str:
    unknown = re.search(r"unrecognized arguments: --(\S+?)(?:[= ]|$)", message)
    group = re.search(r"Group '(\S+)' does not accept option '(\S+)'", message)
    key = re.search(r"[Oo]ption '(\S+)' is not accepted|Key '?\"?(\S+?)\"?'? is not expected", message)
    if unknown:
        word = unknown.group(1)
    elif group:
        word = f"{group.group(1)}.{group.group(2)}"
    elif key:
        word = key.group(1) or key.group(2)
    else:
        return f"{message.strip()} Run the command with --help to see what it takes."
    near = difflib.get_close_matches(word, spellings, n=1, cutoff=0.5)
    tail = [s for s in spellings if s.split(".")[-1] == word.split(".")[-1]] or near
    hint = f" Did you mean {tail[0]!r}?" if tail else ""
    return f"unknown option {word!r}.{hint} Run the command with --help to see what it takes."
