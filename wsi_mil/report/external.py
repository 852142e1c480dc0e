"""An external validation: whom of those that `wsi-mil predict` scored the figures are of, and who is left out."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from wsi_mil.errors import RunError

USED = "used"
"""Status of a slide that takes part."""
TRAINED_ON = "the models were trained on this patient"


@dataclass(frozen=True, kw_only=True)
class External:
    """Who is left out of the figures of models that were trained elsewhere."""

    trained_on: Mapping[str, str]
    """Patient -> by what each is known as one that the models were trained on: patient, slide, file."""
    unlabelled: int
    """Patients, or slides at level slide, without a label."""
    flagging: bool | None
    """Whether the models knew whom they were trained on, so that these could be flagged; None where it is not told."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Admitted:
    """The tables of a run, of those whom the figures are of."""

    cohort: pd.DataFrame
    """All rows; who is left out has the reason as status."""
    folds: pd.DataFrame
    predictions: pd.DataFrame
    external: External | None
    """None of a cross-validation."""


def refuse_unlabelled(path: Path, config: Mapping[str, Any]) -> None:
    """Raise RunError unless the run holds predictions beside labels."""
    kind, target = config.get("kind"), config["task"]["target"]
    if kind == "crossval" or (kind == "predict" and config.get("labelled")):
        return
    if kind == "predict":
        raise RunError(
            f"{path} holds predictions without labels, so there is nothing to compare them with. Give the predict "
            f"command again with another --out and --table TABLE, a table with a column {target!r} "
            f"(--cohort.columns '{{{target}: NAME}}' where it has another name there), then report on that folder."
        )
    raise RunError(
        f"{path} holds a run of kind {kind!r}, which tests nobody; a report needs predictions of patients that were "
        f"not trained on, with labels. Give the folder of `wsi-mil crossval` or of `wsi-mil predict ... --table TABLE`."
    )


def admit(
    path: Path, config: Mapping[str, Any], *, cohort: pd.DataFrame, folds: pd.DataFrame, predictions: pd.DataFrame
) -> Admitted:
    """Everybody, of a cross-validation; of an external validation who has a label and was not trained on.

    A patient is left out as a whole when a single slide is known from training. Raises RunError where nobody is left.
    """
    if config["kind"] != "predict":
        return Admitted(cohort=cohort, folds=folds, predictions=predictions, external=None)
    key = "slide" if config["task"]["level"] == "slide" else "patient"
    used = cohort["status"] == USED
    flags = _flags(predictions)
    trained = cohort["patient"].isin(flags)
    silent = cohort[key].isin(_unlabelled(config, cohort[used], predictions, key)) & ~trained
    status = cohort["status"].mask(used & silent, "no label").mask(used & trained, TRAINED_ON)
    kept = cohort[status == USED]
    external = External(
        trained_on=flags,
        unlabelled=int(cohort[key][used & silent].nunique()),
        flagging=config.get("training_known"),
    )
    own = predictions[predictions[key].isin(kept[key])]
    if predictions.empty or own.empty:
        raise _nobody(path, external, scored=len(predictions))
    return Admitted(
        cohort=cohort.assign(status=status),
        folds=folds[folds["patient"].isin(kept["patient"])],
        predictions=own,
        external=external,
    )


def _flags(predictions: pd.DataFrame) -> dict[str, str]:
    """Patient -> the words of all its rows."""
    if "in_training" not in predictions.columns:
        return {}
    marked = predictions[predictions["in_training"] != ""]
    words: dict[str, dict[str, None]] = {}
    for patient, cell in marked[["patient", "in_training"]].itertuples(index=False):
        words.setdefault(patient, {}).update(dict.fromkeys(cell.split()))
    return {patient: " ".join(found) for patient, found in sorted(words.items())}


def _unlabelled(config: Mapping[str, Any], used: pd.DataFrame, predictions: pd.DataFrame, key: str) -> set[str]:
    """Patients or slides without any label; of those that could not be scored, the cells of the table tell."""
    told = set(predictions[key][predictions["target"] != ""])
    others = (f"value:{target['name']}" for target in config["task"]["targets"][1:])
    columns = ["target", *(name for name in others if name in used.columns)]
    filled = set(used[key][(used[columns] != "").any(axis=1)]) - set(predictions[key])
    return set(used[key]) - told - filled


def _nobody(path: Path, external: External, *, scored: int) -> RunError:
    if not scored:
        return RunError(f"{path}: no slide could be scored. Give the same predict command again to see why.")
    named = next(iter(external.trained_on.items()), None)
    such = f", such as {named[0]} (known by {named[1]})" if named else ""
    return RunError(
        f"{path}: nobody is left to test: {len(external.trained_on)} patients were trained on{such}, and "
        f"{external.unlabelled} more have no label. Give slides of other patients, with labels. Where other patients "
        f"merely bear the names of those trained on, give them names of their own in the table."
    )
