"""Charts as SVG text. matplotlib's object interface only: no global state, the same bytes for the same numbers."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from wsi_mil.report.method_figures import MethodFigures
from wsi_mil.report.pictures import data_uri
from wsi_mil.report.ranking_figures import scored_columns
from wsi_mil.statistics import intervals, ranking
from wsi_mil.statistics.ranking import Bools, Floats

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#7A5C00", "#56B4E9", "#E69F00", "#333333")
"""After Okabe and Ito: told apart by colour-blind readers; the line styles tell them apart in black and white."""
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (7, 2)), (0, (3, 3)))
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "wsi-mil",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e6ea",
    "axes.axisbelow": True,
    "text.parse_math": False,
}
GREY = "#6b7480"
_GRID = np.linspace(0.0, 1.0, 101)


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A drawn chart and what a reader who cannot see it is told."""

    uri: str
    text: str


def colour_of(place: int) -> str:
    """The colour of the method at this place of the run."""
    return COLOURS[place % len(COLOURS)]


def forest_chart(methods: Sequence[MethodFigures]) -> Chart:
    """Primary AUC with interval, one line a method."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.6, 0.9 + 0.46 * len(methods)), layout="constrained")
        axes = figure.add_subplot()
        for place, method in enumerate(methods):
            value, interval = method.primary.value, method.primary.interval
            if not np.isfinite(value):
                continue
            colour = colour_of(place)
            axes.plot([interval.low, interval.high], [place, place], color=colour, linewidth=3, solid_capstyle="butt")
            axes.plot([value], [place], "o", color=colour, markersize=9, markeredgecolor="white")
        axes.axvline(0.5, color=GREY, linestyle=":", linewidth=1.2)
        axes.set_yticks(range(len(methods)), [method.label for method in methods])
        axes.set_ylim(len(methods) - 0.5, -0.5)
        ends = [m.primary.interval.low for m in methods if np.isfinite(m.primary.interval.low)]
        axes.set_xlim(max(0.0, min([0.45, *ends]) - 0.03), 1.01)
        axes.set_xlabel("AUC with 95 % interval (dotted line: chance)")
        axes.grid(axis="y", visible=False)
        return Chart(uri=svg(figure), text="AUC of each method with its interval")


def curves_chart(methods: Sequence[MethodFigures], classes: Sequence[str]) -> Chart:
    """ROC and precision-recall curves of all methods over all patients; averaged one-vs-rest has no single curve."""
    with matplotlib.rc_context(STYLE):
        n_classes = methods[0].patients.probabilities.shape[1]
        columns = list(scored_columns(n_classes))
        figure = Figure(figsize=(10.4, 5.4 * len(columns)), layout="constrained")
        grid = figure.subplots(len(columns), 2, squeeze=False)
        for (roc_axes, pr_axes), column in zip(grid, columns, strict=True):
            for place, method in enumerate(methods):
                truth, scores = one_vs_rest(method, column)
                line = {"color": colour_of(place), "linestyle": DASHES[place % len(DASHES)], "linewidth": 2.0}
                roc, pr = ranking.roc_curve(truth, scores), _outer(ranking.precision_recall_curve(truth, scores))
                roc_axes.plot(roc.x, roc.y, label=f"{method.label}  {_two(ranking.auc(truth, scores))}", **line)
                average = ranking.average_precision(truth, scores)
                pr_axes.step(pr.x, pr.y, where="pre", label=f"{method.label}  {_two(average)}", **line)
            title = "" if n_classes == 2 else f", “{classes[column]}” against the rest"
            _finish_roc(roc_axes, f"ROC{title}")
            _finish_pr(pr_axes, _share(one_vs_rest(methods[0], column)[0]), f"Precision and recall{title}")
            roc_axes.legend(loc="lower right", title="AUC over all patients", fontsize=10, framealpha=0.9)
            pr_axes.legend(loc="lower left", title="average precision", fontsize=10, framealpha=0.9)
        return Chart(uri=svg(figure), text="ROC and precision-recall curves of all methods")


def method_chart(method: MethodFigures, place: int, classes: Sequence[str]) -> Chart:
    """ROC and precision-recall with bootstrap bands of one method."""
    with matplotlib.rc_context(STYLE):
        columns = list(scored_columns(method.patients.probabilities.shape[1]))
        figure = Figure(figsize=(10.4, 4.6 * len(columns)), layout="constrained")
        for row, column in zip(figure.subplots(len(columns), 2, squeeze=False), columns, strict=True):
            _draw_bands(row[0], row[1], method, column, colour_of(place))
            if len(columns) > 1:
                row[0].set_title(f"ROC, “{classes[column]}” against the rest", loc="left", fontsize=12)
        return Chart(uri=svg(figure), text=f"ROC and precision-recall curves of {method.label}")


def folds_chart(methods: Sequence[MethodFigures]) -> Chart:
    """AUC of each fold model: how much one figure may move."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.6, 0.9 + 0.46 * len(methods)), layout="constrained")
        axes = figure.add_subplot()
        for place, method in enumerate(methods):
            values = np.array([fold.auc for fold in method.folds])
            spread = np.linspace(-0.16, 0.16, len(values)) if len(values) > 1 else np.zeros(1)
            axes.plot(values, place + spread, "o", color=colour_of(place), markersize=7, alpha=0.75)
        axes.axvline(0.5, color=GREY, linestyle=":", linewidth=1.2)
        axes.set_yticks(range(len(methods)), [method.label for method in methods])
        axes.set_ylim(len(methods) - 0.5, -0.5)
        axes.set_xlim(-0.02, 1.02)
        axes.set_xlabel("AUC of each fold model (dotted line: chance)")
        axes.grid(axis="y", visible=False)
        return Chart(uri=svg(figure), text="AUC of each fold model")


def mpp_chart(mpp: Sequence[float]) -> Chart:
    """How fine the slides were scanned."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.2, 2.5), layout="constrained")
        axes = figure.add_subplot()
        low, high = min(mpp), max(mpp)
        margin = max(0.05, 0.1 * (high - low))
        axes.hist(mpp, bins=np.linspace(low - margin, high + margin, 25).tolist(), color="#4a6fa5")
        axes.set_xlabel("microns per pixel at full resolution")
        axes.set_ylabel("slides")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        return Chart(uri=svg(figure), text="Histogram of the slides' microns per pixel")


def one_vs_rest(method: MethodFigures, column: int) -> tuple[Bools, Floats]:
    """Who has the class, and its probability."""
    return method.patients.targets == column, method.patients.probabilities[:, column]


def _share(truth: Bools) -> float:
    return float(truth.mean()) if len(truth) else float("nan")


def _draw_bands(roc_axes: Axes, pr_axes: Axes, method: MethodFigures, column: int, colour: str) -> None:
    truth, _ = one_vs_rest(method, column)
    if len(truth):
        _draw_curves(roc_axes, pr_axes, method, column, colour)
    _finish_roc(roc_axes, "ROC with 95 % band")
    _finish_pr(pr_axes, _share(truth), "Precision and recall")


def _draw_curves(roc_axes: Axes, pr_axes: Axes, method: MethodFigures, column: int, colour: str) -> None:
    truth, scores = one_vs_rest(method, column)
    hits, alarms, _ = intervals.bootstrap_curves(truth, scores, weights=method.patients.weights)
    kept = (hits[:, -1] > 0) & (alarms[:, -1] > 0)
    roc, pr = [], []
    for hit, alarm in zip(hits[kept], alarms[kept], strict=True):
        recall = hit / hit[-1]
        roc.append(np.interp(_GRID, np.append(0.0, alarm / alarm[-1]), np.append(0.0, recall)))
        precision = np.divide(hit, hit + alarm, out=np.ones_like(hit), where=hit + alarm > 0)
        reached = np.searchsorted(recall, _GRID, side="left").clip(max=len(recall) - 1)
        pr.append(precision[reached])
    for axes, samples in ((roc_axes, roc), (pr_axes, pr)):
        if samples:
            low, high = np.quantile(np.array(samples), [0.025, 0.975], axis=0)
            axes.fill_between(_GRID, low, high, color=colour, alpha=0.18, linewidth=0)
    curve = ranking.roc_curve(truth, scores)
    roc_axes.plot(curve.x, curve.y, color=colour, linewidth=2.2)
    curve = _outer(ranking.precision_recall_curve(truth, scores))
    pr_axes.step(curve.x, curve.y, where="pre", color=colour, linewidth=2.2)


def _finish_roc(axes: Axes, title: str) -> None:
    axes.plot([0, 1], [0, 1], color=GREY, linestyle=":", linewidth=1.2)
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), xlabel="1 - specificity", ylabel="sensitivity")
    axes.set_title(title, loc="left", fontsize=12)
    axes.set_aspect("equal")


def _finish_pr(axes: Axes, prevalence: float, title: str) -> None:
    axes.axhline(prevalence, color=GREY, linestyle=":", linewidth=1.2)
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), xlabel="recall (sensitivity)", ylabel="precision")
    axes.set_title(title, loc="left", fontsize=12)
    axes.set_aspect("equal")


def _outer(curve: ranking.Curve) -> ranking.Curve:
    """The first point of each recall: later ones have lower precision and would draw spikes below the steps."""
    kept = np.diff(curve.x, prepend=-1.0) > 0
    x, y = curve.x[kept], curve.y[kept].copy()
    y[:1] = y[1:2] if len(y) > 1 else y[:1]
    return ranking.Curve(x=x, y=y, thresholds=curve.thresholds[kept])


def _two(value: float) -> str:
    return f"{value:.2f}" if np.isfinite(value) else "not defined"


def svg(figure: Figure) -> str:
    """A drawn figure as a data: URI."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return data_uri("image/svg+xml", buffer.getvalue().encode())
