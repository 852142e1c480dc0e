"""Charts of probabilities: whether they are true (reliability), and whether acting on them helps (decision curve)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from wsi_mil.report.benefit import Benefit
from wsi_mil.report.figures import DASHES, GREY, STYLE, Chart, colour_of, svg
from wsi_mil.report.method_figures import MethodFigures
from wsi_mil.report.ranking_figures import scored_columns
from wsi_mil.statistics import calibration, intervals
from wsi_mil.statistics.ranking import Bools, Floats

_MOST_ACROSS = 4


def reliability_chart(method: MethodFigures, place: int, classes: Sequence[str]) -> Chart:
    """Observed share over predicted probability of each scored class, before and after calibration."""
    versions = [("As the model gives them", method.patients.probabilities)]
    if method.calibrated_probabilities is not None:
        versions.append(("After calibration", method.calibrated_probabilities))
    columns = scored_columns(len(classes))
    panels = [(title, column, shares) for title, shares in versions for column in columns]
    across = len(versions) if len(columns) == 1 else min(len(columns), _MOST_ACROSS)
    with rc_context(STYLE):
        figure = Figure(figsize=(4.4 * across, 4.5 * -(-len(panels) // across)), layout="constrained")
        grid = figure.subplots(-(-len(panels) // across), across, squeeze=False).ravel()
        for axes, (title, column, shares) in zip(grid, panels, strict=False):
            _draw(axes, method.patients.targets == column, shares[:, column], colour_of(place))
            _finish(axes, title, classes[column])
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        return Chart(uri=svg(figure), text=f"Reliability of the probabilities of {method.label}")


def benefit_chart(benefits: Sequence[Benefit], places: Sequence[int]) -> Chart:
    """Net benefit of all methods over the threshold, with the two strategies that need no model. places: of colours."""
    with rc_context(STYLE):
        figure = Figure(figsize=(9.0, 4.6), layout="constrained")
        axes = figure.add_subplot()
        for one, place in zip(benefits, places, strict=True):
            line: dict[str, Any] = {"color": colour_of(place), "linestyle": DASHES[place % len(DASHES)]}
            axes.plot(one.curve.thresholds, one.curve.model, label=one.method, linewidth=2.0, **line)
        curve = benefits[0].curve
        axes.plot(curve.thresholds, curve.treat_all, color=GREY, linewidth=1.6, label="act on everybody")
        axes.axhline(0.0, color="#1c2430", linewidth=1.2, label="act on nobody")
        highest = max(float(np.nanmax([*one.curve.model, curve.treat_all[0]])) for one in benefits)
        axes.set_ylim(-0.25 * max(highest, 0.1), 1.1 * max(highest, 0.1))
        axes.set_xlim(0, 0.9)
        axes.set_xlabel("threshold: the probability from which one would act")
        axes.set_ylabel("net benefit (true positives a patient)")
        axes.legend(loc="upper right", fontsize=10, framealpha=0.9)
        return Chart(uri=svg(figure), text="Decision curves: net benefit of each method over the threshold")


def _draw(axes: Axes, truth: Bools, scores: Floats, colour: str) -> None:
    curve = calibration.calibration_curve(truth, scores, n_bins=int(np.clip(len(truth) // 8, 2, 10)))
    bounds = [
        intervals.wilson_interval(share, count, of="patients")
        for share, count in zip(curve.observed.tolist(), curve.counts.tolist(), strict=True)
    ]
    reach = np.array([[s - b.low, b.high - s] for s, b in zip(curve.observed, bounds, strict=True)]).reshape(-1, 2).T
    axes.errorbar(curve.predicted, curve.observed, yerr=reach, fmt="o-", color=colour, capsize=3, linewidth=2.0)
    axes.plot(scores, np.where(truth, 1.015, -0.015), "|", color=colour, alpha=0.5, markersize=7, clip_on=False)


def _finish(axes: Axes, title: str, name: str) -> None:
    axes.plot([0, 1], [0, 1], color=GREY, linestyle=":", linewidth=1.2)
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.04, 1.04), ylabel="observed share")
    axes.set_xlabel(f"predicted probability of “{name}”")
    axes.set_title(title, loc="left", fontsize=12)
    axes.set_aspect("equal")
