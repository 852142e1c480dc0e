"""Where the methods look: tiles of unseen slides against the annotated outline, and against the models' answers."""

from collections.abc import Sequence
from typing import Any

from wsi_mil.report import figures
from wsi_mil.report.detection import Detection
from wsi_mil.report.faithful import MethodFaithfulness
from wsi_mil.report.findings import SharedFindings
from wsi_mil.report.pointing import LESION_TILE, Pointing
from wsi_mil.report.pointing_charts import faithfulness_chart, froc_chart
from wsi_mil.report.pseudonyms import Names
from wsi_mil.report.wording import number, signed, span
from wsi_mil.statistics.faithfulness import STEPS
from wsi_mil.statistics.froc import RATES

TITLE = "Where they look"


def context(found: SharedFindings, names: Names) -> dict[str, Any]:
    """One row a method and kind of score; detections and faithfulness of the score that heat maps draw."""
    labels = found.labels
    detected = [
        (one, one.detection) for one in found.pointing if one.detection is not None and one.detection.froc.n_lesions
    ]
    places = [labels.index(one.method) for one, _ in detected]
    return {
        "pointing": [_row(one, labels) for one in found.pointing],
        "lesion_tile": f"{LESION_TILE:.0%}",
        "cuts": list(dict.fromkeys(one.overlap.cut for one in found.pointing if one.overlap.figures is not None)),
        "detected": [_detection(one, detection, labels) for one, detection in detected],
        "negatives": detected[0][1].negatives_are if detected else "",
        "rates": [f"{rate:g}" for rate in RATES],
        "froc": froc_chart([detection.froc for _, detection in detected], labels, places) if detected else None,
        "faithful": [_faithful(one, labels) for one in found.faithfulness],
        "faithful_chart": faithfulness_chart(
            found.faithfulness, [labels.index(one.method) for one in found.faithfulness]
        )
        if found.faithfulness
        else None,
        "steps": ", ".join(f"{step}" for step in STEPS),
    }


def _row(one: Pointing, labels: Sequence[str]) -> dict[str, Any]:
    together, dice = one.together, one.overlap.figures
    return {
        "method": one.method,
        "colour": figures.colour_of(labels.index(one.method)),
        "kind": one.kind,
        "own": one.own,
        "slides": together.n_slides,
        "tiles": f"{together.n_tiles:,}",
        "prevalence": number(together.mean_prevalence, 3),
        "pooled_prevalence": number(together.prevalence, 3),
        "auc": number(together.mean_auc),
        "span": span(one.interval),
        "ap": number(together.mean_average_precision),
        "pooled_auc": number(together.pooled_auc),
        "pooled_ap": number(together.pooled_average_precision),
        "dice": number(dice.mean) if dice else "–",
        "dice_span": span(one.overlap.interval) if dice else "",
    }


def _detection(one: Pointing, detection: Detection, labels: Sequence[str]) -> dict[str, Any]:
    froc = detection.froc
    return {
        "method": one.method,
        "colour": figures.colour_of(labels.index(one.method)),
        "kind": one.kind,
        "slides": f"{froc.n_slides} ({froc.n_without_lesion})",
        "lesions": froc.n_lesions,
        "isolated": froc.n_isolated,
        "score": number(froc.score),
        "span": span(detection.interval),
        "at": [number(value) for value in froc.at_rates],
    }


def _faithful(one: MethodFaithfulness, labels: Sequence[str]) -> dict[str, Any]:
    return {
        "method": one.method,
        "colour": figures.colour_of(labels.index(one.method)),
        "patients": one.figures.n_patients,
        "bags": one.figures.n_bags,
        "mean": signed(one.figures.mean, 3),
        "span": span(one.figures.interval, 3),
        "deletion": signed(one.figures.deletion, 3),
        "insertion": signed(one.figures.insertion, 3),
    }
