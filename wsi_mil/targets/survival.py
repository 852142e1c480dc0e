"""A time until an event that not everybody had: hazards of intervals (default), or Cox's partial likelihood.

Discrete time: the training part's event times are cut at their quantiles; the last cut is its largest time. Output j is
the logit of the hazard of interval (c_(j-1), c_j]. The likelihood is that of Gensheimer and Narasimhan 2019 (PeerJ,
eq. 2): who is censored counts as having survived the intervals of which at least half was seen. `survival_j` is the
predicted survival at `cut_j`; between them it is read on a straight line (1 at time 0), after the last cut it stays.
Cox: one output, the log hazard ratio; Breslow's form for ties. A step must hold a risk set, so small ones are refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from wsi_mil.bags import full_precision
from wsi_mil.errors import CohortError
from wsi_mil.folding.strata import strata_of_survival
from wsi_mil.models._base import Criterion
from wsi_mil.statistics.censoring import survival_at
from wsi_mil.statistics.survival_concordance import survival_concordance
from wsi_mil.table.files import EVENT_CELLS
from wsi_mil.targets._base import MIN_PATIENTS, Answers, Cells, Target, Values, labelled, number_in

N_INTERVALS = 4
MIN_RISK_SET = 8
"""Bags in a step, at least, for Cox's partial likelihood."""


@dataclass(frozen=True, kw_only=True)
class _TimeTarget(Target):
    """What both forms share: how a time with its event is read, stratified and measured."""

    event: str
    """Column with 1 (the event was seen) or 0 (censored)."""

    n_values: ClassVar[int] = 2
    figure: ClassVar[Literal["auc", "r2", "c_index"]] = "c_index"

    @property
    def kind(self) -> str:
        """survival."""
        return "survival"

    @property
    def columns(self) -> tuple[str, ...]:
        """Time and event."""
        return (self.name, self.event)

    def encode(self, cells: Cells) -> tuple[float, ...]:
        """(time, event); NaN where either is missing."""
        time, event = cells.get(self.name), cells.get(self.event)
        if time is None or event is None:
            return (np.nan, np.nan)
        value = number_in(time, self.name)
        if value <= 0:
            raise CohortError(f"column {self.name!r}: a time of {time} is not after the start; it must be above 0.")
        seen = EVENT_CELLS.get(event.strip().lower())
        if seen is None:
            raise CohortError(f"column {self.event!r}: {event!r} is neither 1 (the event was seen) nor 0 (censored).")
        return (value, float(seen))

    def decode(self, values: Sequence[float]) -> dict[str, object]:
        """Time and event."""
        if np.isnan(values[0]):
            return {"target": "", "event": ""}
        return {"target": float(values[0]), "event": int(values[1])}

    def fitted(self, values: Values) -> Self:
        """The same. Raises CohortError for a training part without an event, from which nothing can be learnt."""
        if not (values[labelled(values), 1] == 1).any():
            raise CohortError(f"{self.name}: a training part holds no event, so no hazard can be learnt from it.")
        return self

    def strata(self, values: Values) -> list[str]:
        """Event and quantile of the time."""
        return strata_of_survival(values[:, 0], values[:, 1])

    def measure(self, values: Values, logits: Tensor) -> float:
        """Harrell's C."""
        everyone = np.arange(len(values))
        return survival_concordance(
            values[:, 0],
            values[:, 1] == 1,
            self.answers(logits)["risk"],
            groups=np.zeros_like(everyone),
            patients=everyone,
            n_patients=len(values),
        ).auc

    def too_few(self, patients: Sequence[str], values: Values) -> str | None:
        """Fewer than ten patients with an event."""
        events = len({p for p, row in zip(patients, values, strict=True) if row[1] == 1})
        return f"fewer than {MIN_PATIENTS} patients with an event ({events})" if events < MIN_PATIENTS else None


@dataclass(frozen=True, kw_only=True)
class SurvivalTarget(_TimeTarget):
    """Survival in discrete time."""

    cuts: tuple[float, ...] = tuple(float(i) for i in range(1, N_INTERVALS + 1))
    """Ends of the intervals, learnt from the training part."""

    def fitted(self, values: Values) -> Self:
        """With cuts at the quantiles of the event times; the last is the largest time, seen or censored."""
        super().fitted(values)
        there = values[labelled(values)]
        times = there[there[:, 1] == 1, 0]
        inner = np.quantile(times, np.linspace(0, 1, N_INTERVALS + 1)[1:-1])
        return replace(self, cuts=tuple(map(float, _rising([*inner, there[:, 0].max()]))))

    def n_outputs(self, binary_outputs: int) -> int:
        """One an interval."""
        return N_INTERVALS

    def criterion(self, n_outputs: int, class_weights: Tensor | None = None) -> Criterion:
        """Negative log-likelihood of the hazards."""
        return DiscreteHazards(self.cuts)

    def answers(self, logits: Tensor) -> Answers:
        """`risk`, survival at each cut, and the cuts.

        risk: minus the mean share of the time up to the last cut that is survived, from -1 to 0. A share, since the
        last cut is the largest time of a training part, and risks of models with other ones are averaged.
        """
        survival = F.logsigmoid(-logits.double()).cumsum(dim=1).exp().numpy()
        before = np.concatenate([np.ones((len(survival), 1)), survival[:, :-1]], axis=1)
        widths = np.diff([0.0, *self.cuts]) / self.cuts[-1]
        risk = -((before + survival) / 2 * widths).sum(axis=1)
        cuts = np.broadcast_to(self.cuts, survival.shape)
        columns = [risk, *survival.T, *cuts.T]
        return dict(zip(self.answer_columns(), columns, strict=True))

    def answer_columns(self) -> list[str]:
        """risk, survival_1 ..., cut_1 ..."""
        places = range(1, N_INTERVALS + 1)
        return ["risk", *(f"survival_{i}" for i in places), *(f"cut_{i}" for i in places)]

    def combined(self, each: Sequence[Answers]) -> Answers:
        """Mean risk, and the mean of the survival curves read at the cuts of the first model."""
        names = [name for name in each[0] if name.startswith("survival")]
        cuts = [name for name in each[0] if name.startswith("cut")]
        curves = [(_columns(one, cuts)[0], _columns(one, names)) for one in each]
        told = {"risk": np.mean([one["risk"] for one in each], axis=0)}
        for name, at in zip(names, curves[0][0].tolist(), strict=True):
            told[name] = np.mean([survival_at(ends, curve, at=at) for ends, curve in curves], axis=0)
        return told | {cut: each[0][cut] for cut in cuts}

    def output_names(self, n_outputs: int) -> tuple[str, ...]:
        """The intervals."""
        return tuple(f"interval {i + 1}" for i in range(n_outputs))


@dataclass(frozen=True, kw_only=True)
class CoxTarget(_TimeTarget):
    """Survival by proportional hazards."""

    def n_outputs(self, binary_outputs: int) -> int:
        """One."""
        return 1

    def criterion(self, n_outputs: int, class_weights: Tensor | None = None) -> Criterion:
        """Cox's partial likelihood."""
        return CoxPartialLikelihood()

    def answers(self, logits: Tensor) -> Answers:
        """`risk`, the log hazard ratio."""
        return {"risk": logits[:, 0].double().numpy()}

    def answer_columns(self) -> list[str]:
        """risk."""
        return ["risk"]

    def output_names(self, n_outputs: int) -> tuple[str, ...]:
        """The risk."""
        return ("risk",)


class DiscreteHazards(Criterion):
    """-log p of what was seen of each bag's time, mean over bags."""

    cuts: Tensor

    def __init__(self, cuts: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("cuts", torch.tensor(cuts, dtype=torch.float64))

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean loss. logits: (b, intervals).  target: (b, 2) time and event."""
        logits = full_precision(logits)
        time, seen = target[:, :1].double(), target[:, 1:] == 1
        starts = torch.cat([self.cuts.new_zeros(1), self.cuts[:-1]])
        inside = (time > starts) & (time <= self.cuts)
        survived = torch.where(seen, time > self.cuts, time >= (starts + self.cuts) / 2)
        died = inside & seen
        losses = -(F.logsigmoid(logits) * died + F.logsigmoid(-logits) * survived)
        return losses.sum(dim=1).mean()


class CoxPartialLikelihood(Criterion):
    """-log of the partial likelihood over the bags of a step, mean over its events (Breslow's form for ties).

    A step without an event has no likelihood: its loss is 0, with a gradient of 0.
    """

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean loss. logits: (b, 1).  target: (b, 2) time and event."""
        risk = full_precision(logits)[:, 0]
        time, seen = target[:, 0], target[:, 1] == 1
        at_risk = time[None, :] >= time[:, None]
        masked = risk.expand(len(risk), -1).masked_fill(~at_risk, torch.finfo(risk.dtype).min)
        losses = masked.logsumexp(dim=1) - risk
        return (losses * seen).sum() / seen.sum().clamp(min=1)


def _rising(cuts: Sequence[float]) -> list[float]:
    """Strictly rising, where many equal times make cuts fall together."""
    found: list[float] = []
    for cut in cuts:
        found.append(cut if not found or cut > found[-1] else float(np.nextafter(found[-1], np.inf)))
    return found


def _columns(answers: Answers, names: Sequence[str]) -> np.ndarray:
    """(n, columns)"""
    return np.stack([answers[name] for name in names], axis=1)
