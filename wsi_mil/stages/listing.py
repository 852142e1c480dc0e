"""`wsi-mil list`: what can be chosen by name."""

from pathlib import Path
from typing import Literal

from wsi_mil.outcomes import Summary


def listing(what: Literal["models", "encoders", "regularisers"] = "models") -> Summary:
    """List what can be chosen by name, a line each.

    Args:
        what: models, encoders or regularisers
    """
    lines = {"models": _models, "encoders": _encoders, "regularisers": _regularisers}[what]()
    return Summary(stage="list", out=Path(), notes=tuple(lines))


def _models() -> tuple[str, ...]:
    from wsi_mil.lookup import find_model, model_names

    lines = []
    for name in model_names():
        model = find_model(name)
        order = "order matters" if model.order_matters else "order-free"
        scores = ", ".join(model.score_kinds)
        lines.append(f"{name:<12} {model.family}; scores: {scores}; {order}. {model.summary} {model.paper}.")
    return tuple(lines)


def _regularisers() -> tuple[str, ...]:
    from wsi_mil.lookup import find_regulariser, regulariser_names

    return tuple(f"{name:<12} {_first_line(find_regulariser(name))}" for name in regulariser_names())


def _encoders() -> tuple[str, ...]:
    from wsi_mil.encoders import encoder_lines

    return tuple(encoder_lines())


def _first_line(thing: type) -> str:
    return (thing.__doc__ or "").strip().splitlines()[0]
