"""Whether the figures hold in each site, and in each level of the other columns of the table."""

from itertools import groupby
from typing import Any

from wsi_mil.report.designs import design_of
from wsi_mil.report.findings import Findings
from wsi_mil.report.pseudonyms import Names
from wsi_mil.report.subgroup_chart import subgroup_chart
from wsi_mil.report.subgroups import Column, SubgroupFigures
from wsi_mil.report.wording import shown
from wsi_mil.statistics.intervals import FEW

TITLE = "Subgroups"


def context(found: Findings, names: Names) -> dict[str, Any]:
    """One forest and one table a column; none where no column has few levels."""
    return {
        "columns": [_column(found, column, names) for column in found.columns],
        "classes": found.study.classes,
        "auc": design_of(found.study).within("AUC"),
        "many": len(found.methods) > 1,
        "best": found.best.label,
    }


def _column(found: Findings, column: Column, names: Names) -> dict[str, Any]:
    levels = [(names.text(level), list(own)) for level, own in groupby(column.figures, key=lambda one: one.level)]
    chart = subgroup_chart(
        column.name,
        levels,
        auc=[method.primary.value for method in found.methods],
        right=[method.decided.accuracy.value for method in found.methods],
    )
    return {
        "name": column.name,
        "chart": chart,
        "rows": [_row(level, one) for level, own in levels for one in own if one.method == found.best.label],
    }


def _row(level: str, one: SubgroupFigures) -> dict[str, Any]:
    few = min(one.by_class) < FEW
    return {
        "level": level,
        "patients": one.patients,
        "by_class": one.by_class,
        "auc": shown(one.auc),
        "right": shown(one.right),
        "note": f"fewer than {FEW} in a class" if few else one.note,
    }
