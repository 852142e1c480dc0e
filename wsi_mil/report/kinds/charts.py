"""Charts of numbers and of times to an event, in the manner of the other charts of the report."""

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from wsi_mil.report.figures import DASHES, GREY, STYLE, Chart, colour_of, svg
from wsi_mil.report.kinds.survival import RiskGroup
from wsi_mil.report.method_figures import Figure
from wsi_mil.statistics.ranking import Floats

GROUP_COLOURS = ("#0072B2", "#D55E00")


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One line of an interval chart."""

    label: str
    colour: str
    figure: Figure


def interval_chart(bars: Sequence[Bar], *, axis: str, reference: float | None) -> Chart:
    """A figure with its interval, one line each; dotted where guessing would stand."""
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=(8.6, 0.9 + 0.46 * len(bars)), layout="constrained")
        axes = canvas.add_subplot()
        for place, bar in enumerate(bars):
            value, interval = bar.figure.value, bar.figure.interval
            if not np.isfinite(value):
                continue
            ends = [interval.low, interval.high]
            axes.plot(ends, [place, place], color=bar.colour, linewidth=3, solid_capstyle="butt")
            axes.plot([value], [place], "o", color=bar.colour, markersize=9, markeredgecolor="white")
        if reference is not None:
            axes.axvline(reference, color=GREY, linestyle=":", linewidth=1.2)
        axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
        axes.set_ylim(len(bars) - 0.5, -0.5)
        axes.set_xlabel(axis)
        axes.grid(axis="y", visible=False)
        return Chart(uri=svg(canvas), text=axis)


def dots_chart(rows: Sequence[tuple[str, Sequence[float]]], *, axis: str, reference: float | None) -> Chart:
    """One dot a fold model; rows: (method, figures)."""
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=(8.6, 0.9 + 0.46 * len(rows)), layout="constrained")
        axes = canvas.add_subplot()
        for place, (_, values) in enumerate(rows):
            spread = np.linspace(-0.16, 0.16, len(values)) if len(values) > 1 else np.zeros(len(values))
            axes.plot(values, place + spread, "o", color=colour_of(place), markersize=7, alpha=0.75)
        if reference is not None:
            axes.axvline(reference, color=GREY, linestyle=":", linewidth=1.2)
        axes.set_yticks(range(len(rows)), [label for label, _ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel(axis)
        axes.grid(axis="y", visible=False)
        return Chart(uri=svg(canvas), text=axis)


def scatter_chart(truth: Floats, predicted: Floats, *, name: str, label: str, colour: str) -> Chart:
    """Predicted against measured with the line of a perfect prediction, and what was off against the predicted."""
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=(11.4, 5.2), layout="constrained")
        left, right = canvas.subplots(1, 2)
        ends = _ends(np.concatenate([truth, predicted]))
        left.plot(ends, ends, color=GREY, linestyle=":", linewidth=1.4)
        left.plot(truth, predicted, "o", color=colour, markersize=6, alpha=0.65, markeredgecolor="white")
        left.set(xlim=ends, ylim=ends, xlabel=f"measured {name}", ylabel=f"predicted {name}", aspect="equal")
        left.set_title("Predicted and measured (dotted: perfect)", loc="left", fontsize=12)
        right.axhline(0.0, color=GREY, linestyle=":", linewidth=1.4)
        right.plot(predicted, predicted - truth, "o", color=colour, markersize=6, alpha=0.65, markeredgecolor="white")
        right.set(xlabel=f"predicted {name}", ylabel="predicted minus measured")
        right.set_title("What was off (above the line: too high)", loc="left", fontsize=12)
        return Chart(uri=svg(canvas), text=f"Predicted and measured {name}, and residuals, of {label}")


def _ends(values: Floats) -> tuple[float, float]:
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    margin = 0.06 * (high - low) or 0.5
    return low - margin, high + margin


def groups_chart(groups: Sequence[RiskGroup], *, name: str, label: str) -> Chart:
    """Kaplan-Meier curves of the risk groups with censored patients as ticks and the numbers at risk below."""
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=(9.4, 5.6), layout="constrained")
        axes, table = canvas.subplots(2, 1, height_ratios=(5, 1), sharex=True)
        for place, group in enumerate(groups):
            _draw_group(axes, group, place)
        axes.set(ylim=(-0.02, 1.03), ylabel="share without event")
        axes.legend(loc="upper right", framealpha=0.9)
        axes.set_title("Kaplan-Meier curves by predicted risk, 95 % bands", loc="left", fontsize=12)
        ticks = [tick for tick in axes.get_xticks() if 0 <= tick <= max(_last(group) for group in groups)]
        axes.set_xlim(left=-0.03 * max(_last(group) for group in groups))
        _draw_at_risk(table, groups, ticks, name)
        return Chart(uri=svg(canvas), text=f"Kaplan-Meier curves by predicted risk of {label}")


def _last(group: RiskGroup) -> float:
    return float(group.times.max(initial=0.0))


def _draw_group(axes: Axes, group: RiskGroup, place: int) -> None:
    colour, curve = GROUP_COLOURS[place], group.curve
    times = np.concatenate([[0.0], curve.times, [_last(group)]])
    shares = np.concatenate([[1.0], curve.survival, curve.survival[-1:] if len(curve.times) else [1.0]])
    name = f"{group.name} risk: {len(group.times)} patients, {int(group.events.sum())} events"
    axes.step(times, shares, where="post", color=colour, linestyle=DASHES[place], linewidth=2.2, label=name)
    if len(curve.times):
        low, high = (np.concatenate([[1.0], end, end[-1:]]) for end in curve.band())
        axes.fill_between(times, low, high, step="post", color=colour, alpha=0.15, linewidth=0)
    censored = np.sort(group.times[~group.events])
    at = shares[np.searchsorted(times[:-1], censored, side="right") - 1]
    axes.plot(censored, at, "|", color=colour, markersize=8, markeredgewidth=1.4)


def _draw_at_risk(axes: Axes, groups: Sequence[RiskGroup], ticks: Sequence[float], name: str) -> None:
    for place, group in enumerate(groups):
        for tick in ticks:
            count = int((group.times >= tick).sum())
            axes.text(tick, place, str(count), ha="center", va="center", color=GROUP_COLOURS[place], fontsize=10.5)
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.set_yticks(range(len(groups)), [f"{group.name} risk" for group in groups])
    axes.set_xticks(ticks)
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0, labelbottom=True)
    axes.set_xlabel(f"time ({name}); numbers: patients still followed at that time")
