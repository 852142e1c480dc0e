"""The TRIPOD+AI items, and where this report answers each.

Collins et al., BMJ 2024;385:e078378 (CC BY 4.0). The items' wording here is our own and short; the statement's counts.
"""

from dataclasses import dataclass, replace
from typing import Any

from wsi_mil.report.findings import SharedFindings
from wsi_mil.report.pseudonyms import Names

TITLE = "TRIPOD+AI"
AUTHORS = "for the authors to write"


@dataclass(frozen=True, kw_only=True)
class Item:
    """One item of the checklist."""

    number: str
    topic: str
    asks: str
    sections: tuple[str, ...] = ()
    """Where the report answers it; nowhere: it is for the authors."""
    left: str = ""
    """What the report cannot know, and the authors add."""


def _item(number: str, topic: str, asks: str, *sections: str, left: str = "") -> Item:
    return Item(number=number, topic=topic, asks=asks, sections=sections, left=left)


ITEMS = (
    _item("1", "Title", "names the study as developing or evaluating a prediction model, its population and outcome"),
    _item("2", "Abstract", "follows the TRIPOD+AI list for abstracts", "summary", left="the abstract itself"),
    _item("3a", "Background", "the medical context, why the model, which models there are"),
    _item("3b", "Background", "for whom the model is meant, where in care, and who would use it"),
    _item("3c", "Background", "known inequalities in health between groups"),
    _item("4", "Objectives", "whether a model is developed, evaluated or both", "summary", left="the aim in context"),
    _item("5a", "Data", "where the data come from, why these, and how representative they are"),
    _item("5b", "Data", "dates of accrual and end of follow-up"),
    _item("6a", "Participants", "setting, number and place of the centres", "cohort", left="the setting"),
    _item("6b", "Participants", "criteria for taking part", "cohort", left="criteria applied before the table"),
    _item("6c", "Participants", "treatments received, and how they were handled"),
    _item("7", "Data preparation", "cleaning and quality checks", "cohort", "appendix", left="staining and scanning"),
    _item("8a", "Outcome", "what is predicted, how and when it was assessed", "summary", left="how it was assessed"),
    _item("8b", "Outcome", "who assessed it, with which training"),
    _item("8c", "Outcome", "blinding of the assessment"),
    _item("9a", "Predictors", "which were chosen and why", "cohort", left="why tissue alone"),
    _item("9b", "Predictors", "how and when they were measured", "cohort", "appendix", left="staining and scanner"),
    _item("9c", "Predictors", "who interpreted them, where that needs judgement"),
    _item("10", "Sample size", "how the size came about and whether it is enough", "cohort", left="its justification"),
    _item("11", "Missing data", "how missing data were handled, why cases were left out", "cohort"),
    _item("12a", "Analysis", "which data served for what: training, choosing, testing", "audit"),
    _item("12b", "Analysis", "how predictors were transformed", "cohort", "appendix"),
    _item(
        "12c", "Analysis", "kind of model, all steps of building it, tuning, internal validation", "audit", "appendix"
    ),
    _item("12d", "Analysis", "how differences between centres were handled", "audit", "subgroups"),
    _item("12e", "Analysis", "which measures of performance, and why", "how"),
    _item("12f", "Analysis", "recalibration or other updating of the model", "calibration", "audit"),
    _item("12g", "Analysis", "how predictions were computed when the model was evaluated", "how", "audit"),
    _item("13", "Class imbalance", "whether and how it was handled", "cohort", "appendix", left="the reason"),
    _item("14", "Fairness", "what was done to make the model fair", "subgroups", left="which groups matter, and why"),
    _item("15", "Model output", "what the model gives; how thresholds were chosen", "audit", "how"),
    _item("16", "Training and evaluation", "how the two sets of data differ", "audit", "cohort"),
    _item("17", "Ethics", "approval and consent"),
    _item("18a", "Open science", "funding and the funder's part"),
    _item("18b", "Open science", "conflicts of interest"),
    _item("18c", "Open science", "where the protocol is"),
    _item("18d", "Open science", "registration"),
    _item("18e", "Open science", "whether the data can be had"),
    _item("18f", "Open science", "whether the code can be had", "appendix", left="own code and where it is"),
    _item("19", "Patients and public", "how they were involved"),
    _item("20a", "Participants", "flow of participants, with numbers of outcomes", "cohort"),
    _item(
        "20b", "Participants", "their characteristics, by centre, with missing data", "cohort", left="age, sex, stage"
    ),
    _item("20c", "Participants", "distributions in development against evaluation data", "audit", left="of predictors"),
    _item("21", "Model development", "numbers of participants and outcomes in each analysis", "audit", "methods"),
    _item("22", "Model specification", "enough to make predictions for others", "appendix", left="where the bundle is"),
    _item("23a", "Performance", "with intervals, also of key groups", "compared", "calibration", "subgroups"),
    _item("23b", "Performance", "differences between centres", "subgroups"),
    _item("24", "Model updating", "results of updating, the model and its performance after it", "calibration"),
    _item(
        "25", "Interpretation", "the results in the light of aims and earlier studies", "summary", left="the context"
    ),
    _item("26", "Limitations", "of sample, data and methods, and what they do", "summary", left="those of the cohort"),
    _item("27a", "Usability", "how poor or missing input is handled in use", "cohort", left="the plan for use"),
    _item("27b", "Usability", "what users must do and know"),
    _item("27c", "Usability", "next steps, and whether it holds elsewhere"),
)


_ELSEWHERE: dict[str, tuple[tuple[str, ...], str]] = {
    "7": (("cohort", "shift", "appendix"), "staining and scanning"),
    "12a": (("known", "audit"), ""),
    "12c": (("appendix",), "how the model was built: its model card and the study that trained it"),
    "16": (("shift", "known", "cohort"), "how the patients differ"),
    "20c": (("shift",), "of patients and outcomes"),
    "21": (("cohort", "methods"), "those of the training cohort"),
    "27c": (("compared", "subgroups"), "next steps"),
}
"""Number -> (sections, what is left), where models that were trained elsewhere are tested."""


def items_for(found: SharedFindings) -> tuple[Item, ...]:
    """The items, as far as the design of the study has a say in where they are answered."""
    if found.study.external is None:
        return ITEMS
    kept = {item.number: (item.sections, item.left) for item in ITEMS} | _ELSEWHERE
    return tuple(replace(item, sections=kept[item.number][0], left=kept[item.number][1]) for item in ITEMS)


def context(found: SharedFindings, names: Names) -> dict[str, Any]:
    """The items with links into the page."""
    items = items_for(found)
    return {"items": items, "authors": AUTHORS, "alone": sum(not item.sections for item in items)}
