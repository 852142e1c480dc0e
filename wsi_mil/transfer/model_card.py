"""The model card of a bundle: what it is, for whom, and what is known of it, for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from wsi_mil.statistics.decisions import Threshold

RESEARCH_USE = "Research use only, not for diagnosis."
_ELSEWHERE = (
    "Figures with intervals come from patients of the training cohort that each model did not see; they say nothing "
    "about another hospital, scanner, stain or population. Validate on labelled slides of your own first."
)
_LIMITS = (
    "Slides far from the training slides are flagged (domain_shift.csv), but a slide that is near can still be wrong.",
    "Tile scores show where the model looked, which is not where the disease is.",
)
_UNTESTED = (
    "The models together were not tested: each figure is of single models on the patients of their own test fold, and "
    "every patient of the cohort trained some of them."
)


def model_card(facts: Mapping[str, Any], *, metrics: Mapping[str, Any] | None, intended_use: str) -> str:
    """Markdown. facts: the content of bundle.json; metrics: metrics.json of the run, None where it has no report."""
    task, encoder, training = facts["task"], facts["encoder"], facts["training"]
    classes = f" ({', '.join(map(str, task['classes']))})" if task["classes"] else ""
    n_models = len(facts["models"])
    parts = [
        f"# Model card: {task['target']} by {facts['method']['label']}",
        f"**{RESEARCH_USE}**",
        "## What it is",
        f"Predicts {task['target']}{classes} at level {task['level']} from whole-slide images, by "
        f"{n_models} trained model{'' if n_models == 1 else 's'} of method {facts['method']['label']}. "
        f"{facts['decision']}",
        "## Intended use",
        intended_use,
        "## Slides and encoder",
        _lines(_making(facts)),
        "## Trained on",
        _lines(_people(training)),
        "## Figures",
        _figures(facts["method"]["label"], metrics),
        "## Limits",
        _lines(_limits(facts)),
        "## Licence",
        f"Licence of the encoder's weights, which are not in this bundle: {encoder['licence'] or 'not stated'}. It may "
        "bind what is trained on their features.",
    ]
    return "\n\n".join(parts) + "\n"


def _making(facts: Mapping[str, Any]) -> list[str]:
    encoder, tiles = facts["encoder"], facts["tiles"]
    kind = "pathology" if encoder["pathology"] else "not trained on pathology"
    lines = [
        f"Tiles of {encoder['tile_px']} px at {encoder['mpp']:g} µm per pixel",
        f"Encoder {encoder['name']} ({kind}), weights {encoder['weights_sha256'][:12]}, precision "
        f"{encoder['precision']}; {encoder['transform']}",
    ]
    lines += [f"Departs from the encoder's contract: {breach}" for breach in encoder["contract_breach"]]
    if tiles is None:
        lines.append("How tissue was found is not known: it takes bags, not slides")
    return lines


def _people(training: Mapping[str, Any]) -> list[str]:
    low, median, high = training["mpp"]
    lines = [
        f"{training['patients']} patients, {training['slides']} slides, {training['sites'] or 'unknown'} sites",
        f"Slides of {low:g} to {high:g} µm per pixel, median {median:g}",
    ]
    if training["labels"]:
        counted = ", ".join(f"{n} {name}" for name, n in training["labels"].items())
        lines.append(f"Slides by label: {counted}")
    if training["patient_hashes"]:
        lines.append(
            "Salted hashes of patients and slides are in the bundle. They flag known patients; who has a list of ids "
            "can test it against them"
        )
    return lines


def _limits(facts: Mapping[str, Any]) -> list[str]:
    several = len(facts["models"]) > 1 and facts["training"]["kind"] == "crossval"
    return [_ELSEWHERE, *_cuts(facts["models"]), *_LIMITS, *([_UNTESTED] if several else [])]


def _cuts(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """What holds of thresholds that validation chose; nothing where 0.5 stands in, or where nothing is cut."""
    cuts = [Threshold(**cut) for model in models for cut in model["selection"]["thresholds"].values()]
    chosen = sum(cut.from_validation for cut in cuts)
    if not chosen:
        return []
    which = "The threshold was" if chosen == len(cuts) else f"{chosen} of {len(cuts)} thresholds were"
    return [
        f"{which} chosen on validation patients of the training cohort. At another prevalence or with another scanner "
        "the cut may lie elsewhere than wished."
    ]


def _figures(label: str, metrics: Mapping[str, Any] | None) -> str:
    if metrics is None:
        return "None: the run had no report when the bundle was made."
    rows = [row for about, found in _of_method(label, metrics) for row in _figure_rows(about, found)]
    if not rows:
        return f"None: the report of the run has no figure of {label}."
    heading = "From the cross-validation of the run, with 95% intervals; of its held-out patients.\n\n"
    return heading + "| figure | value | low | high |\n|---|---|---|---|\n" + "\n".join(rows)


def _of_method(label: str, metrics: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """(what is asked, the figures): one a target where the report has a chapter for each, named where several are."""
    targets = metrics.get("targets", {"": metrics})
    named = len(targets) > 1
    return [(name if named else "", one["methods"][label]) for name, one in targets.items() if label in one["methods"]]


def _figure_rows(name: str, one: Any) -> list[str]:
    """Every figure with an interval, however deep it lies; those at several times stand in a list."""
    if isinstance(one, list):
        one = {f"{item['time']:g}": item for item in one if isinstance(item, dict) and "time" in item}
    if not isinstance(one, dict):
        return []
    if {"value", "low", "high"} <= set(one):
        return [f"| {name} | {' | '.join(_number(one[part]) for part in ('value', 'low', 'high'))} |"]
    return [row for inner, deeper in one.items() for row in _figure_rows(f"{name} {inner}".strip(), deeper)]


def _number(value: float | None) -> str:
    return "not defined" if value is None else f"{value:.3f}"


def _lines(items: Sequence[str]) -> str:
    return "\n".join(f"- {item}" for item in items)
