"""What kind of test a report is of, in the words that the sections share."""

from dataclasses import dataclass
from typing import Any, Protocol

import pandas as pd

from wsi_mil.report.external import External


class Tested(Protocol):
    """As much of a study as its design hangs on."""

    @property
    def external(self) -> External | None:
        """Of an external validation, who is left out."""

    @property
    def folds(self) -> pd.DataFrame:
        """Columns repeat, fold, patient, part."""

    @property
    def config(self) -> dict[str, Any]:
        """Of the run."""


@dataclass(frozen=True, kw_only=True)
class Design:
    """Words that follow from how patients came to be tested."""

    name: str
    headline: str
    """What the page is, below its title."""
    external: bool
    one_group: bool
    """All are tested together: there are no folds within which, or over which, a figure is counted."""
    unseen: str
    """Why the models did not know the patients."""
    again: str
    """Which command fills gaps."""
    by_site: bool = False
    """Each site was left out once, so that no model knew the site that it judged."""

    def within(self, figure: str) -> str:
        """What a figure over pairs of patients is called."""
        return figure if self.one_group else f"{figure} within folds"


def design_of(study: Tested) -> Design:
    """The design of a run."""
    if study.external is not None:
        return Design(
            name="external validation",
            headline="External validation of whole-slide image models: they were trained elsewhere, and nothing was "
            "fitted here.",
            external=True,
            one_group=True,
            unseen=_unseen(study.external),
            again="predict",
        )
    tested = study.folds[study.folds["part"] == "test"]
    if (study.config.get("folds") or {}).get("leave_one_site_out"):
        return Design(
            name="leave-one-site-out cross-validation",
            headline="Cross-validated study of whole-slide images, each site left out once.",
            external=False,
            one_group=False,
            unseen="Each site was judged by models that had never seen a slide of it (leave-one-site-out).",
            again="crossval",
            by_site=True,
        )
    one = len(tested[["repeat", "fold"]].drop_duplicates()) == 1
    return Design(
        name="one test part" if one else "cross-validation",
        headline=f"{'Study with one held-out test part' if one else 'Cross-validated study'} of whole-slide images.",
        external=False,
        one_group=one,
        unseen="Every patient was judged by models that had never seen any of that patient's slides.",
        again="crossval",
    )


def _unseen(external: External) -> str:
    trained = "The models were trained elsewhere, and nothing was fitted here."
    if external.flagging:
        return f"{trained} None of these patients is known as one that the models were trained on."
    return f"{trained} Whether they were trained on any of these patients cannot be told from the models."
