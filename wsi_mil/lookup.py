"""Name -> plug-in, and the list of names. The file name is the name; there is no other list.

A plug-in is a file of `wsi_mil/models` or `wsi_mil/regularisers`, a user's own file given by its path, or an entry
point of the group of the same name, offered by an installed package.
"""

import difflib
import hashlib
import sys
from collections.abc import Iterator
from importlib import import_module, util
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import TypeVar, cast

from wsi_mil.errors import ConfigError
from wsi_mil.models._base import MILModel, Regulariser

_MODELS = "wsi_mil.models"
_REGULARISERS = "wsi_mil.regularisers"
_Plugin = TypeVar("_Plugin", bound=type)


def model_names() -> list[str]:
    """Names of all methods, in alphabetical order."""
    return _names(_MODELS)


def regulariser_names() -> list[str]:
    """Names of all regularisers, in alphabetical order."""
    return _names(_REGULARISERS)


def find_model(name_or_path: str | Path) -> type[MILModel]:
    """The method of this name, or the one that a Python file defines.

    Raises ConfigError for an unknown name (with the nearest one), or a file that does not define exactly one method.
    """
    return _find(name_or_path, _MODELS, MILModel)


def find_regulariser(name_or_path: str | Path) -> type[Regulariser]:
    """The regulariser of this name, or the one that a Python file defines. Raises ConfigError as `find_model`."""
    return _find(name_or_path, _REGULARISERS, Regulariser)


def _find(name_or_path: str | Path, group: str, base: _Plugin) -> _Plugin:
    text = str(name_or_path)
    if text.endswith(".py") or isinstance(name_or_path, Path):
        return _only_class(load_file(Path(text)), base, where=text)
    if text in _file_names(group):
        return _only_class(import_module(f"{group}.{text}"), base, where=text)
    for point in entry_points(group=group, name=text):
        return _check_entry(point.load(), base, where=f"entry point {text!r} of {group}")
    names = _names(group)
    near = difflib.get_close_matches(text.lower().replace("-", "_"), names, n=1)
    what = group.rsplit(".", 1)[1].rstrip("s")
    meant = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"there is no {what} named {text!r}.{meant} There are {', '.join(names)}; "
        f"or give the path of a file, my_{what}.py."
    )


def _names(group: str) -> list[str]:
    return sorted({*_file_names(group), *(point.name for point in entry_points(group=group))})


def _file_names(group: str) -> list[str]:
    package = import_module(group)
    return [module.name for module in iter_modules(package.__path__) if not module.name.startswith("_")]


def load_file(path: Path) -> ModuleType:
    """Import a file under a name made of its path and content, so that the same file gives the same class.

    Raises ConfigError when it is not there, or cannot be imported.
    """
    if not path.is_file():
        raise ConfigError(
            f"{path}: no such file (a path counts from the folder where the command is given); give the path of a "
            "Python file, or one of the names without '.py'"
        )
    digest = hashlib.sha256(str(path.resolve()).encode() + b"\0" + path.read_bytes()).hexdigest()[:12]
    name = f"wsi_mil_plugin_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: not a Python file")
    module = util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{path}: it cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _classes(module: ModuleType, base: type) -> Iterator[type]:
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__:
            yield value


def _only_class(module: ModuleType, base: _Plugin, *, where: str) -> _Plugin:
    found = list(dict.fromkeys(_classes(module, base)))
    if len(found) != 1:
        names = ", ".join(cls.__name__ for cls in found) or "none"
        raise ConfigError(
            f"{where}: a plug-in file defines exactly one subclass of {base.__name__}; this one defines {names}."
        )
    return cast(_Plugin, found[0])


def _check_entry(found: object, base: _Plugin, *, where: str) -> _Plugin:
    if isinstance(found, ModuleType):
        return _only_class(found, base, where=where)
    if isinstance(found, type) and issubclass(found, base):
        return cast(_Plugin, found)
    raise ConfigError(f"{where}: gives {found!r}, which is neither a module nor a subclass of {base.__name__}")
