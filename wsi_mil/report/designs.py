"""What kind of test a report is of, in the words that the sections share."""

from dataclasses import dataclass

from wsi_mil.report.external import External
from wsi_mil.report.study import Study


@dataclass(frozen=True, kw_only=True)
class Design:
    """Words that follow from how patients came to be tested."""

    name: str
    headline: str
    """What the page is, below its title."""
    external: bool
    one_group: bool
    """All are tested together: there are no folds within which, or over which, a figure is counted."""
    auc: str
    unseen: str
    """Why the models did not know the patients."""
    again: str
    """Which command fills gaps."""


def design_of(study: Study) -> Design:
    """The design of a run."""
    if study.external is not None:
        return Design(
            name="external validation",
            headline="External validation of whole-slide image models: they were trained elsewhere, and nothing was "
            "fitted here.",
            external=True,
            one_group=True,
            auc="AUC",
            unseen=_unseen(study.external),
            again="predict",
        )
    one = study.one_group
    return Design(
        name="one test part" if one else "cross-validation",
        headline=f"{'Study with one held-out test part' if one else 'Cross-validated study'} of whole-slide images.",
        external=False,
        one_group=one,
        auc="AUC" if one else "AUC within folds",
        unseen="Every patient was judged by models that had never seen any of that patient's slides.",
        again="crossval",
    )


def _unseen(external: External) -> str:
    trained = "The models were trained elsewhere, and nothing was fitted here."
    if external.flagging:
        return f"{trained} None of these patients is known as one that the models were trained on."
    return f"{trained} Whether they were trained on any of these patients cannot be told from the models."
