"""How much of a model's answer hangs on the tiles that a heat map marks: deletion and insertion against chance.

Petsiuk et al., BMVC 2018, arXiv:1806.07421, on tiles. The answer is asked again without the top tiles, and with
the top tiles alone; the same is done with tiles drawn at random. Both figures are differences of the answer, so that 0
is no better than random and a negative one is worse:

deletion:  mean over the steps of (answer without random tiles - answer without the top tiles)
insertion: mean over the steps of (answer with the top tiles alone - answer with random tiles alone)

The mean over the steps is the area between the two curves with the steps at equal distances; they stand closest where a
heat map makes its claim, at few tiles. The faithfulness of a bag is the mean of the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wsi_mil.statistics.intervals import Interval
from wsi_mil.statistics.localisation import mean_interval
from wsi_mil.statistics.ranking import Floats, macro

STEPS = (1, 2, 5, 10, 20, 50)
"""Per cent of the tiles that are taken away, or kept. At 0 all curves are the answer itself."""
CURVES = ("without_top", "without_random", "only_top", "only_random")


@dataclass(frozen=True, kw_only=True, eq=False)
class Perturbed:
    """The answers for one bag at STEPS, each (6,); NaN where too few tiles would be left for the model."""

    without_top: Floats
    without_random: Floats
    """Mean over the random orders."""
    only_top: Floats
    only_random: Floats
    """Mean over the random orders."""

    @property
    def deletion(self) -> float:
        """How much lower the answer is without the top tiles than without random ones."""
        return macro(self.without_random - self.without_top)

    @property
    def insertion(self) -> float:
        """How much higher the answer is with the top tiles alone than with random ones alone."""
        return macro(self.only_top - self.only_random)

    @property
    def faithfulness(self) -> float:
        """Mean of the two, or the one that could be measured."""
        return macro(np.array([self.deletion, self.insertion]))


@dataclass(frozen=True, kw_only=True)
class Faithfulness:
    """Figures over the bags that were measured."""

    n_bags: int
    n_patients: int
    mean: float
    deletion: float
    insertion: float
    interval: Interval
    """Of the mean, by resampling patients; not defined below 10 patients."""


def summarise(
    deletion: Floats, insertion: Floats, faithfulness: Floats, patients: Sequence[str], *, seed: int = 0
) -> Faithfulness:
    """Plain means over the measurements, of which a patient may have several.

    All (n,); NaN is a bag that was too small, and is left out.
    """
    measured = np.isfinite(faithfulness)
    return Faithfulness(
        n_bags=int(measured.sum()),
        n_patients=len({patient for patient, there in zip(patients, measured, strict=True) if there}),
        mean=macro(faithfulness),
        deletion=macro(deletion),
        insertion=macro(insertion),
        interval=mean_interval(faithfulness, patients, seed=seed),
    )
