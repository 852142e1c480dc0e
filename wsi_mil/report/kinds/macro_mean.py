"""Several yes-or-no targets in one model: the plain mean of their AUCs; its interval knows that they share patients."""

from collections.abc import Sequence

from wsi_mil.report.kinds.class_chapter import ClassFindings
from wsi_mil.report.kinds.findings import TargetFindings
from wsi_mil.report.method_figures import Figure
from wsi_mil.report.ranking_figures import within_folds
from wsi_mil.statistics import intervals
from wsi_mil.statistics.concordance import mean_concordance


def macro_mean(parts: Sequence[TargetFindings | None], label: str) -> Figure | None:
    """Of one method; None unless all targets are binary and there are two or more.

    A patient's influence on the mean is the mean of the patient's influences on the targets, so targets that go
    together make the interval as wide as it must be. Undefined targets are left out.
    """
    binary = [part for part in parts if isinstance(part, ClassFindings) and part.target.kind == "binary"]
    own = [method for part in binary for method in part.found.methods if method.label == label]
    if len(binary) < len(parts) or len(parts) < 2 or not own:
        return None
    everyone = tuple(sorted({patient for method in own for patient in method.patients.ids}))
    mean = mean_concordance([within_folds(method.rows, everyone) for method in own])
    return Figure(value=mean.auc, interval=intervals.auc_interval(mean))
