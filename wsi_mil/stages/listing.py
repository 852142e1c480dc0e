"""`wsi-mil list`: what can be chosen by name, all that is known of one, and the page that helps to choose a method."""

from pathlib import Path
from typing import Literal

import wsi_mil
from tiling.atomic import write_text
from wsi_mil.errors import ConfigError
from wsi_mil.outcomes import Summary

What = Literal["models", "encoders", "regularisers"]
_MORE = "`wsi-mil list {} NAME` tells all of one, with its settings."
_REHEARSED_DIM = 64
"""Width of the made-up features on which method and plug-in are tried together."""


def listing(
    what: What = "models",
    name: str | None = None,
    *,
    also: list[Path] | None = None,
    page: Path | None = None,
) -> Summary:
    """List what can be chosen by name, or tell all of one name.

    Args:
        what: models, encoders or regularisers
        name: one of them, or a file of your own: all that is known of it, with its settings
        also: files with methods of your own, listed with the models
        page: Markdown file to write the page that helps to choose a method to, instead of the lines (models only)
    """
    if page is not None and (what != "models" or name is not None):
        raise ConfigError(f"there is one page, of all models only, not of {name or what}. Leave --page away.")
    if also and (what != "models" or name is not None):
        raise ConfigError(
            f"--also adds files with methods to the list of models; {name or what} is asked. Leave it away."
        )
    if page is not None:
        write_text(page, _page())
        return Summary(stage="list", out=page, notes=(f"The page that helps to choose a method: {page}",))
    if name is not None:
        cards = {"models": _model, "regularisers": _regulariser, "encoders": _encoder}
        return Summary(stage="list", out=Path(), notes=tuple(cards[what](name)))
    lines = _models(also or []) if what == "models" else {"encoders": _encoders, "regularisers": _regularisers}[what]()
    return Summary(stage="list", out=Path(), notes=(*lines, _MORE.format(what)))


def _models(also: list[Path]) -> list[str]:
    from wsi_mil.guide.cards import model_lines
    from wsi_mil.lookup import find_model, model_names

    return model_lines({name: find_model(name) for name in [*model_names(), *map(str, also)]})


def _model(name: str) -> list[str]:
    from wsi_mil.guide.cards import model_card
    from wsi_mil.lookup import find_model, find_regulariser, regulariser_names

    model = find_model(name)
    plug_ins = {plug_in: find_regulariser(plug_in) for plug_in in regulariser_names() if _go_together(name, plug_in)}
    return model_card(name, model, plug_ins=plug_ins, files=_files(name, model))


def _regularisers() -> list[str]:
    from wsi_mil.guide.cards import regulariser_lines
    from wsi_mil.lookup import find_regulariser, regulariser_names

    return regulariser_lines({name: find_regulariser(name) for name in regulariser_names()})


def _regulariser(name: str) -> list[str]:
    from wsi_mil.guide.cards import regulariser_card
    from wsi_mil.lookup import find_regulariser, model_names

    plug_in = find_regulariser(name)
    models = [model for model in model_names() if _go_together(model, name)]
    return regulariser_card(name, plug_in, models=models, files=_files(name, plug_in))


def _go_together(model: str, plug_in: str) -> bool:
    """Whether a method takes its first step with a plug-in, both with their defaults."""
    from wsi_mil.methods import MethodSpec, rehearse
    from wsi_mil.tasks import class_task

    task = class_task("label", ("no", "yes"))
    try:
        rehearse(MethodSpec(name=model, regularisers={plug_in: {}}), in_dim=_REHEARSED_DIM, task=task, bags_per_step=2)
    except ConfigError:
        return False
    return True


def _files(name: str, plug_in: type) -> dict[str, str]:
    """Where a method or plug-in of this project lies, and the file that shows settings; a user's own has its path."""
    if not plug_in.__module__.startswith("wsi_mil."):
        return {}
    package = Path(wsi_mil.__file__).parent
    file = package.parent.joinpath(*plug_in.__module__.split(".")).with_suffix(".py")
    return {"file": str(file), "settings": str(package / "configs" / "methods" / f"{name}.yaml")}


def _page() -> str:
    from wsi_mil.guide.page import methods_page
    from wsi_mil.lookup import find_model, find_regulariser, model_names, regulariser_names

    models = {name: find_model(name) for name in model_names()}
    return methods_page(models, {name: find_regulariser(name) for name in regulariser_names()})


def _encoders() -> list[str]:
    from wsi_mil.encoders import encoder_lines

    return list(encoder_lines())


def _encoder(name: str) -> list[str]:
    from wsi_mil.encoders import find_declaration
    from wsi_mil.guide.cards import encoder_card

    return encoder_card(name, find_declaration(name))
