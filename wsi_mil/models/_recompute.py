"""Long bags: what the gradient needs is computed again, not kept from the forward pass."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils.checkpoint import checkpoint

LONG = 20_000
"""Tiles above which a method computes again: below, time counts for more than memory."""

Result = TypeVar("Result")


def computed_again(function: Callable[..., Result], *given: Any) -> Result:
    """function(*given), which draws no random numbers and changes nothing; what its gradient needs is not kept."""
    result: Result = checkpoint(function, *given, use_reentrant=False, preserve_rng_state=False)
    return result
