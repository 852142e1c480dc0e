"""A stage's signature -> a command line. Everything a flag can say, a YAML file can say, and the other way round."""

import difflib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from wsi_mil.errors import ConfigError
from wsi_mil.settings import typed

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
    """The keyword arguments of the stage. Raises ConfigError with the nearest spelling.

    What the command line says counts more than a file, wherever --config stands.
    """
    words = _normalise(arguments, parser)
    _check_records(words, parser)
    namespace: Namespace = parser.parse_args(words)
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
    """Allow hyphens, short names of grouped options, bare switches, and several values after a list option.

    Configuration files come first, so that every other word has the last say.
    """
    spellings = _spellings(parser)
    types = _types(parser)
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
        if name == "config" and not equals and rest:
            equals, value = "=", rest.pop(0)
        if name in switches and not equals and rest[:1] not in (["true"], ["false"]):
            result.append(f"--{name}=true")
        elif name in lists and value != "null":
            values = [value] if equals else [rest.pop(0) for _ in range(_count_values(rest))]
            _extend_list(result, name, _unfolded(values), of_records=_record_of(types[name]) is not None)
        else:
            result.append(f"--{name}{equals}{value}")
    return sorted(result, key=lambda word: not word.startswith("--config="))


def _types(parser: ArgumentParser) -> dict[str, Any]:
    """The declared type of each option; `--methods.help` says that it has the one of `--methods`, and takes nothing."""
    hints = {action.dest: getattr(action, "_typehint", None) for action in parser._actions}
    return {name: hint for name, hint in hints.items() if not name.endswith(".help")}


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
        return [value.strip() for value in values[0].split(",")]
    return values


def _extend_list(result: list[str], name: str, values: list[str], *, of_records: bool) -> None:
    """Append values to a list option; the same option given twice adds to the first. A record may be a YAML mapping."""
    prefix = f"--{name}="
    before = next((i for i, word in enumerate(result) if word.startswith(prefix)), None)
    text = values[0] if len(values) == 1 else ""
    if not text.startswith("["):
        text = json.dumps([_yaml(v) if of_records and v.startswith("{") else v for v in values], default=str)
    if before is None:
        result.append(prefix + text)
    else:
        both = [*_listed(_yaml(result[before].removeprefix(prefix))), *_listed(_yaml(text))]
        result[before] = prefix + json.dumps(both, default=str)


def _yaml(text: str) -> Any:
    """What a YAML text says; the text itself where it is no YAML."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _check_records(words: Sequence[str], parser: ArgumentParser) -> None:
    """Refuse, in one sentence, what a list of names and records (methods, further targets) cannot hold.

    The parser itself would tell of each type that an entry could have had. words: as `_normalise` gives them.
    """
    configs = {path: _config(path) for path in _values(words, "config")}
    for name, hint in _types(parser).items():
        record = _record_of(hint) if _takes_several(hint) else None
        if record is None:
            continue
        given = {f"--{name}": _yaml(text) for text in _values(words, name)}
        in_files = {path: found for path, config in configs.items() if (found := _at(config, name)) is not None}
        if len(in_files) > 1 and not given:
            each = ", each with its own `train:`" if "train" in get_type_hints(record) else ""
            raise ConfigError(
                f"{name} stands in {' and in '.join(in_files)}, and one would silently replace the other. "
                f"Write one file with all {name.rpartition('.')[2]}{each}."
            )
        for where, value in (given | {f"{path}, {name}": found for path, found in in_files.items()}).items():
            _check_list(where, value, record)


def _record_of(hint: Any) -> type | None:
    """The dataclass within a type: `MethodSpec` of `list[str | MethodSpec]`."""
    if isinstance(hint, type) and is_dataclass(hint):
        return hint
    return next(filter(None, map(_record_of, get_args(hint))), None)


def _values(words: Sequence[str], name: str) -> list[str]:
    return [word.partition("=")[2] for word in words if word.startswith(f"--{name}=")]


def _config(path: str) -> Any:
    """What a configuration file holds; nothing where the parser will say what is wrong with it."""
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None


def _at(config: Any, name: str) -> Any:
    """`{task: {others: x}}` at `task.others`; None where there is nothing."""
    for part in name.split("."):
        config = config.get(part) if isinstance(config, Mapping) else None
    return config


def _check_list(where: str, value: Any, record: type) -> None:
    """Refuse what is no list of names and mappings of a record's keys."""
    if not isinstance(value, list):
        example = "" if str(value).startswith("[") else f": [{value}]"
        raise ConfigError(f"{where} is {value!r}; a list is expected{example}.")
    for i, entry in enumerate(value, start=1):
        place = f"{where}, entry {i}"
        if isinstance(entry, Mapping):
            _check_record(place, entry, record)
        elif not isinstance(entry, str):
            raise ConfigError(f"{place} is {entry!r}; a name or a mapping is expected. Put a name into quotes.")
        if "name" in get_type_hints(record):
            _check_file(place, entry if isinstance(entry, str) else entry["name"])


def _check_record(place: str, entry: Mapping[Any, Any], record: type) -> None:
    typed(record, {str(key): value for key, value in entry.items()}, where=place)
    hints = get_type_hints(record)
    for one in fields(record):
        if one.default is MISSING and one.default_factory is MISSING and one.name not in entry:
            raise ConfigError(f"{place}: {one.name!r} is missing. There are {', '.join(hints)}.")
        if get_origin(hints[one.name]) is dict and not isinstance(entry.get(one.name, {}), Mapping):
            raise ConfigError(f"{place}: {one.name} is {entry[one.name]!r}; it must be a mapping, such as {{x: 1}}.")


def _check_file(place: str, name: str) -> None:
    """Refuse `my_method.py` or `my_method.py+aem` where there is no such file."""
    own = re.match(r"(.+\.py)(?:\+|$)", name)
    if own and not Path(own[1]).is_file():
        raise ConfigError(
            f"{place}: there is no file {own[1]}. Its path is relative to the folder where the command is given, "
            f"{Path.cwd()}."
        )


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
    spellings = [spelling for spelling in spellings if not spelling.endswith(".help")]
    near = difflib.get_close_matches(word, spellings, n=1, cutoff=0.5)
    tail = [s for s in spellings if s.split(".")[-1] == word.split(".")[-1]] or near
    hint = f" Did you mean {tail[0]!r}?" if tail else ""
    return f"unknown option {word!r}.{hint} Run the command with --help to see what it takes."
