"""Forest of subgroups: each level of a column with its interval, all methods beside each other."""

from collections.abc import Sequence

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from wsi_mil.report import method_figures
from wsi_mil.report.figures import GREY, STYLE, Chart, colour_of, svg
from wsi_mil.report.subgroups import SubgroupFigures

Levels = Sequence[tuple[str, Sequence[SubgroupFigures]]]


def subgroup_chart(name: str, levels: Levels, *, auc: Sequence[float], right: Sequence[float]) -> Chart:
    """AUC where any level has one, and the share called rightly. One group of lines a level, one line a method.

    levels: (name as shown, figures in the order of the methods).   auc, right: of each method over all patients.
    """
    ranked = any(np.isfinite(one.auc.value) for _, figures in levels for one in figures)
    n = len(right)
    with rc_context(STYLE):
        figure = Figure(figsize=(10.4 if ranked else 6.6, 1.1 + (0.15 * n + 0.3) * len(levels)), layout="constrained")
        panels = figure.subplots(1, 2 if ranked else 1, squeeze=False, sharey=True)[0]
        if ranked:
            _draw(panels[0], [[one.auc for one in figures] for _, figures in levels], auc)
            panels[0].axvline(0.5, color=GREY, linestyle=":", linewidth=1.2)
            panels[0].set_xlabel("AUC")
        _draw(panels[-1], [[one.right for one in figures] for _, figures in levels], right)
        panels[-1].set_xlabel("share called rightly")
        panels[0].set_yticks(
            range(len(levels)), [f"{level} ({max(one.patients for one in figures)})" for level, figures in levels]
        )
        panels[0].set_ylim(len(levels) - 0.5, -0.5)
        return Chart(uri=svg(figure), text=f"Figures in each level of {name}, with intervals")


def _draw(axes: Axes, rows: Sequence[Sequence[method_figures.Figure]], overall: Sequence[float]) -> None:
    n = len(overall)
    for row, figures in enumerate(rows):
        for place, one in enumerate(figures):
            if not np.isfinite(one.value):
                continue
            y, colour = row + (place - (n - 1) / 2) * 0.7 / n, colour_of(place)
            ends = [one.interval.low, one.interval.high]
            axes.plot(ends, [y, y], color=colour, linewidth=2.2, solid_capstyle="butt")
            axes.plot([one.value], [y], "o", color=colour, markersize=6, markeredgecolor="white")
        if not any(np.isfinite(one.value) for one in figures):
            axes.text(0.5, row, " too few", va="center", color=GREY, fontsize=10)
    for place, value in enumerate(overall):
        axes.plot([value], [len(rows) - 0.5], "^", color=colour_of(place), markersize=8, clip_on=False, zorder=5)
    axes.set_xlim(-0.02, 1.02)
    axes.grid(axis="y", visible=False)
