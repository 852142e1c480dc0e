"""Long bags: what the gradient needs is computed again, not kept from the forward pass."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

LONG = 20_000
"""Tiles above which a method computes again: below, time counts for more than memory."""
_ROWS = 4096

Result = TypeVar("Result")


def computed_again(function: Callable[..., Result], *given: Any) -> Result:
    """function(*given), which draws no random numbers and changes nothing; what its gradient needs is not kept."""
    result: Result = checkpoint(function, *given, use_reentrant=False, preserve_rng_state=False)
    return result


def row_by_row(function: Callable[[Tensor], Tensor], rows: Tensor, *, learned: Iterable[Tensor]) -> Tensor:
    """function(rows), which treats each row by itself; of long bags in pieces as `in_pieces` does."""
    if len(rows) <= LONG:
        return function(rows)
    return in_pieces(lambda some, _: function(some), rows, _ROWS, learned=learned)


def in_pieces(
    function: Callable[[Tensor, slice], Tensor], rows: Tensor, size: int, *, learned: Iterable[Tensor]
) -> Tensor:
    """function(some rows, which), `size` rows after the other, (n, ...) -> (n, ...); once more for the gradient.

    learned: exactly what else gets a gradient from `function`, which draws no random numbers. All pieces write into the
    same few tensors: what each leaves lying between its own would keep those of the next from their place in memory.
    """
    found: Tensor = _Pieces.apply(function, size, rows, *[part for part in learned if part.requires_grad])
    return found


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: Callable[[Tensor, slice], Tensor], size: int, rows: Tensor, *learned: Tensor
    ) -> Tensor:
        kind = rows.device.type
        ctx.function, ctx.size = function, size
        ctx.cast = {"dtype": torch.get_autocast_dtype(kind), "enabled": torch.is_autocast_enabled(kind)}
        ctx.save_for_backward(rows, *learned)
        found: Tensor | None = None
        for some in _slices(len(rows), size):
            piece = function(rows[some], some)
            found = piece.new_empty((len(rows), *piece.shape[1:])) if found is None else found
            found[some] = piece
        assert found is not None
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, *learned = ctx.saved_tensors
        of_rows, sums = torch.empty_like(rows), [torch.zeros_like(part) for part in learned]
        for some in _slices(len(rows), ctx.size):
            piece = rows[some].detach().requires_grad_()
            with torch.enable_grad(), torch.autocast(rows.device.type, **ctx.cast):
                found = ctx.function(piece, some)
            of_rows[some], *parts = torch.autograd.grad(found, (piece, *learned), gradients[0][some])
            for into, part in zip(sums, parts, strict=True):
                into += part
        return None, None, of_rows, *sums


def _slices(n: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, n, size)]
