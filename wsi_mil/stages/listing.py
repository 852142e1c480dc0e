"""`wsi-mil list`: what can be chosen by name, and the page that helps to choose a method."""

from pathlib import Path
from typing import Literal

from tiling.atomic import write_text
from wsi_mil.errors import ConfigError
from wsi_mil.outcomes import Summary


def listing(
    what: Literal["models", "encoders", "regularisers"] = "models",
    *,
    also: list[Path] | None = None,
    page: Path | None = None,
) -> Summary:
    """List what can be chosen by name, a line each.

    Args:
        what: models, encoders or regularisers
        also: files with methods of your own, listed with the models
        page: Markdown file to write the page that helps to choose a method to, instead of the lines (models only)
    """
    if page is not None and what != "models":
        raise ConfigError(f"there is a page for models only, not for {what}. Leave --page away.")
    if also and what != "models":
        raise ConfigError(f"--also names files with methods, but {what} are listed. Leave it away.")
    if page is not None:
        write_text(page, _page())
        return Summary(stage="list", out=page, notes=(f"The page that helps to choose a method: {page}",))
    lines = _models(also or []) if what == "models" else {"encoders": _encoders, "regularisers": _regularisers}[what]()
    return Summary(stage="list", out=Path(), notes=tuple(lines))


def _models(also: list[Path]) -> list[str]:
    from wsi_mil.guide import model_lines
    from wsi_mil.lookup import find_model, model_names

    return model_lines({name: find_model(name) for name in [*model_names(), *map(str, also)]})


def _regularisers() -> list[str]:
    from wsi_mil.guide import regulariser_lines
    from wsi_mil.lookup import find_regulariser, regulariser_names

    return regulariser_lines({name: find_regulariser(name) for name in regulariser_names()})


def _page() -> str:
    from wsi_mil.guide import methods_page
    from wsi_mil.lookup import find_model, find_regulariser, model_names, regulariser_names

    models = {name: find_model(name) for name in model_names()}
    return methods_page(models, {name: find_regulariser(name) for name in regulariser_names()})


def _encoders() -> list[str]:
    from wsi_mil.encoders import encoder_lines

    return list(encoder_lines())
