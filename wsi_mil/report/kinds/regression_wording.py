"""Sentences about a predicted number."""

import numpy as np

from wsi_mil.report.designs import Design
from wsi_mil.report.kinds.regression import NumberFigures
from wsi_mil.report.kinds.regression_findings import NumberFindings
from wsi_mil.report.kinds.wording import about_left_out
from wsi_mil.report.wording import compared_words, number, span
from wsi_mil.statistics.regression import MIN_PATIENTS

_FIGURES = (
    "R²: 1 less the squared error over the squared distance of the measured values to their own mean, over all tested "
    "patients; 0 is no better than giving everyone that mean, below 0 is worse. MAE: mean absolute error. RMSE: root "
    "of the mean squared error; it weighs large errors more. Pearson: correlation. Spearman: correlation of ranks. "
    "Slope: of the line measured = a + b · predicted; 1 is calibrated."
)
_TESTS = "none below 10 patients. Paired tests: absolute error of the same patients, signs flipped at random."


def number_how(design: Design) -> tuple[str, ...]:
    """How the figures were computed."""
    if design.external:
        means = "A patient's prediction is the mean over slides and models. Intervals: bootstrap over patients; "
    else:
        means = (
            "Numbers of all fold models have the scale of the column, so patients of all folds stand together; a "
            "patient's prediction is the mean over slides, seeds and repeats. Intervals: bootstrap over patients, "
            "drawn within folds; "
        )
    return _FIGURES, f"{means}{_TESTS}"


def number_question(found: NumberFindings) -> str:
    """What was asked, of whom."""
    truth, digits = found.best.patients.truth, found.digits
    return (
        f"Can the tissue alone tell the value of “{found.study.target.name}”? Asked of {len(truth)} patients with "
        f"values from {number(truth.min(), digits)} to {number(truth.max(), digits)}, median "
        f"{number(float(np.median(truth)), digits)}."
    )


def number_verdict(found: NumberFindings) -> str:
    """The best method's figures and what they mean."""
    best, others = found.best, len(found.methods) > 1
    r2, mae = best.primary, best.figures["mae"]
    if not np.isfinite(r2.value):
        return (
            f"R² is not defined: {_why_no_r2(best)}. On average the predictions of {best.label} are off by "
            f"{number(mae.value, found.digits)}."
        )
    meaning = (
        f"about {round(100 * float(f'{r2.value:.2f}'))} % of the variation between patients is explained"
        if r2.value > 0
        else "giving every patient the mean value would do no worse"
    )
    return (
        f"{best.label} reached {'the highest R²' if others else 'an R²'}: {number(r2.value)} (95 % interval "
        f"{span(r2.interval)}). That means: {meaning}; 0 would be guessing the mean, 1 perfect. On average its "
        f"predictions are off by {number(mae.value, found.digits)} ({span(mae.interval, found.digits)})."
    )


def _why_no_r2(method: NumberFigures) -> str:
    return "there is a single patient" if len(method.patients.ids) == 1 else "all measured values are equal"


def largest_error(found: NumberFindings) -> str:
    """How far the best method is off where it is off most."""
    slope, label = found.best.figures["slope"].value, found.best.label
    if not np.isfinite(slope):
        return f"{label} predicts the same value for every patient." if len(found.best.patients.ids) > 1 else ""
    worst = np.argmax(np.abs(found.best.patients.off))
    off = float(found.best.patients.off[worst])
    way = "too high" if off > 0 else "too low"
    return f"The largest error of {label} is {number(abs(off), found.digits)} {way}."


def number_comparison(found: NumberFindings) -> str:
    """Whether the methods differ by more than chance."""
    return compared_words(found.comparisons, n_methods=len(found.methods), higher_is_better=False)


def number_warnings(found: NumberFindings) -> list[str]:
    """What to mind before trusting a figure."""
    lines = about_left_out(found.study, found.methods)
    constant = [m.label for m in found.methods if len(m.patients.ids) > 1 and not np.ptp(m.patients.predicted)]
    if constant:
        lines.append(f"{', '.join(constant)}: every patient got the same value, so correlations are not defined.")
    if len(found.best.patients.ids) < MIN_PATIENTS:
        lines.append(f"Only {len(found.best.patients.ids)} patients have a value, so no interval is claimed.")
    return lines
