"""Charts of heat maps: lesions found over false alarms (FROC), and answers with and without the marked tiles."""

from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from wsi_mil.report.faithful import MethodFaithfulness
from wsi_mil.report.figures import DASHES, STYLE, Chart, colour_of, svg
from wsi_mil.statistics.faithfulness import STEPS
from wsi_mil.statistics.froc import RATES, Froc


def froc_chart(curves: Sequence[Froc], labels: Sequence[str], places: Sequence[int]) -> Chart:
    """Share of lesions found over false alarms a slide. labels: of all methods.   places: of each curve's method."""
    with rc_context(STYLE):
        figure = Figure(figsize=(8.6, 4.2), layout="constrained")
        axes = figure.add_subplot()
        for curve, place in zip(curves, places, strict=True):
            line: dict[str, Any] = {"color": colour_of(place), "linestyle": DASHES[place % len(DASHES)]}
            axes.step(
                curve.false_positives, curve.sensitivity, where="post", label=labels[place], linewidth=2.0, **line
            )
        axes.set(xlim=(0, max(RATES)), ylim=(-0.02, 1.02))
        axes.set_xlabel("false alarms a slide")
        axes.set_ylabel("share of lesions found")
        axes.legend(loc="lower right", fontsize=10, framealpha=0.9)
        return Chart(uri=svg(figure), text="Lesions found over false alarms a slide")


def faithfulness_chart(methods: Sequence[MethodFaithfulness], places: Sequence[int]) -> Chart:
    """One panel a method: the answer over the share of tiles taken away or kept, marked tiles against random ones."""
    across = min(3, len(methods))
    down = -(-len(methods) // across)
    with rc_context(STYLE):
        figure = Figure(figsize=(3.5 * across, 2.9 * down), layout="constrained")
        grid = figure.subplots(down, across, squeeze=False).ravel()
        for axes, method, place in zip(grid, methods, places, strict=False):
            for name, style, title in (
                ("without_top", "-", "without the highest"),
                ("without_random", ":", "without random ones"),
                ("only_top", "--", "the highest alone"),
                ("only_random", "-.", "random ones alone"),
            ):
                colour = colour_of(place) if "top" in name else "#6b7480"
                axes.plot(STEPS, method.curves[name], linestyle=style, color=colour, linewidth=1.8, label=title)
            axes.set_xscale("log")
            axes.set_xticks(STEPS, [f"{step}" for step in STEPS])
            axes.minorticks_off()
            axes.set_title(method.method, loc="left", fontsize=11)
            axes.set_xlabel("% of tiles")
        for axes in grid[len(methods) :]:
            axes.set_visible(False)
        grid[0].set_ylabel("mean answer")
        handles, titles = grid[0].get_legend_handles_labels()
        figure.legend(handles, titles, loc="outside lower center", ncols=4, fontsize=9)
        return Chart(uri=svg(figure), text="Answer of the models with and without the tiles they mark")
