"""What rows are stratified by where the target is no class: quantiles of a number, and of times with events. Pure.

The names are for messages; they go where labels of classes go (`make_folds`, with `essential` to say which of them each
training part needs). A patient whose slides have several numbers has all of their strata, as it has several classes.
"""

import itertools

import numpy as np
from numpy.typing import NDArray

_FEWEST = 5
"""Rows a stratum; fewer could not be spread over the usual five folds."""


def strata_of_numbers(values: NDArray[np.float64], *, n_strata: int = 4) -> list[str]:
    """The quantile that each number is in, such as "2 of 4: 1.5 to 3"; an empty text for nan. values: (n,).

    Equal numbers are in the same stratum, so strata can be fewer or uneven; few numbers make few strata, or "any".
    """
    strata = [""] * len(values)
    there = np.flatnonzero(~np.isnan(values))
    if len(there):
        numbers = values[there]
        wished = max(1, min(n_strata, len(numbers) // _FEWEST))
        cuts = np.quantile(numbers, np.arange(1, wished) / wished, method="inverted_cdf")
        edges = sorted({float(cut) for cut in cuts if cut < numbers.max()})
        names = _names(edges)
        for row, place in zip(there, np.searchsorted(edges, numbers, side="left"), strict=True):
            strata[row] = names[place]
    return strata


def strata_of_survival(times: NDArray[np.float64], events: NDArray[np.float64], *, n_strata: int = 4) -> list[str]:
    """Event or censored, and the quantile of the time among the rows like it; an empty text where either is nan.

    times: (n,) to the event or the end of follow-up.  events: (n,) 1 or 0.
    """
    seen = strata_of_numbers(np.where(events == 1, times, np.nan), n_strata=n_strata)
    unseen = strata_of_numbers(np.where(events == 0, times, np.nan), n_strata=n_strata)
    return [
        f"event, {first}" if first else f"censored, {second}" if second else ""
        for first, second in zip(seen, unseen, strict=True)
    ]


def _names(edges: list[float]) -> list[str]:
    spans = [f"up to {edge:g}" for edge in edges[:1]]
    spans += [f"{low:g} to {high:g}" for low, high in itertools.pairwise(edges)]
    spans += [f"above {edge:g}" for edge in edges[-1:]]
    return [f"{i} of {len(spans)}: {span}" for i, span in enumerate(spans, start=1)] or ["any"]
