"""Findings of a run of any kind -> metrics.json and CSV tables, for machines."""

import re
from collections.abc import Sequence
from typing import Any

import pandas as pd

from wsi_mil.report.kinds.chapters import Chapter, interval_of
from wsi_mil.report.kinds.findings import RunFindings
from wsi_mil.report.kinds.macro_mean import macro_mean
from wsi_mil.report.metrics import SCHEMA_VERSION, plain, pointing_facts, run_facts
from wsi_mil.report.pseudonyms import Names
from wsi_mil.report.tables import run_tables as shared_tables
from wsi_mil.statistics.intervals import SMALL_SAMPLE_RULE


def run_metrics(found: RunFindings, chapters: Sequence[Chapter], names: Names) -> dict[str, Any]:
    """All numbers of the report, one entry a target; null where a figure is not defined."""
    parts = [part for _, part in found.targets]
    means = {label: macro_mean(parts, label) for label in found.shared.labels}
    plainly: dict[str, Any] = plain(
        {
            "kind": "metrics",
            "schema_version": SCHEMA_VERSION,
            "target": found.shared.study.target,
            "level": found.shared.study.level,
            "patients": found.shared.flow.patients,
            "slides": found.shared.flow.used,
            "intervals": {
                "level": 0.95,
                "small_sample_rule": SMALL_SAMPLE_RULE,
                "conditional_on": "the trained models; the spread over seeds stands apart",
            },
            "targets": {chapter.target.name: chapter.metrics for chapter in chapters},
            "patients_without_label": {
                target.name: missing
                for target, missing in zip(found.studies.targets, found.studies.unlabelled, strict=True)
            },
            "mean_auc_over_targets": {label: interval_of(mean) for label, mean in means.items() if mean} or None,
            "localisation": {label: pointing_facts(found.shared, label, names) for label in means},
            **run_facts(found.shared, names),
        }
    )
    return plainly


def run_tables(found: RunFindings, chapters: Sequence[Chapter], names: Names) -> dict[str, pd.DataFrame]:
    """Path below the folder of tables -> table; with several targets those of a target lie in a folder of its name."""
    own: dict[str, pd.DataFrame] = {}
    folders = folders_of([chapter.target.name for chapter in chapters]) if len(found.targets) > 1 else [""]
    for folder, chapter in zip(folders, chapters, strict=False):
        own |= {f"{folder}/{name}" if folder else name: table for name, table in chapter.tables.items()}
    return own | shared_tables(found.shared, names)


def folders_of(names: Sequence[str]) -> list[str]:
    """A folder name for each target: letters, digits, - and _ alone; all numbered where two would be the same."""
    plainly = [re.sub(r"[^\w-]+", "_", name, flags=re.ASCII).strip("_") for name in names]
    if all(plainly) and len({name.lower() for name in plainly}) == len(names):
        return plainly
    return [f"{place}_{name}".rstrip("_") for place, name in enumerate(plainly, start=1)]
