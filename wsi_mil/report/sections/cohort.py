"""Who took part: from the rows of the table to the slides, why others did not, sites, pixel sizes, encoder."""

from typing import Any

import numpy as np

from wsi_mil.report import figures
from wsi_mil.report.findings import SharedFindings
from wsi_mil.report.pseudonyms import Names
from wsi_mil.report.wording import spread

TITLE = "Cohort"
NO_LABEL = "no label"
"""How the status of a slide without a label begins."""
_SHOWN_ITEMS = 12
_COUNTS = {
    "rows": "rows of the table",
    "matched": "slide file found",
    "missing": "slide file missing",
    "unlabelled": "without a label",
    "excluded": "excluded by hand",
    "extra": "slide files without a row",
}


def context(found: SharedFindings, names: Names) -> dict[str, Any]:
    """The flow of the cohort, with every left-out slide under its reason."""
    encoder = found.study.config.get("encoder") or {}
    return {
        "flow": found.flow,
        "left_out": found.flow.rows - found.flow.used,
        "level": found.study.level,
        "classes": found.study.classes,
        "reasons": [
            (names.text(reason), count, _few([names.slide(item) for item in items]))
            for reason, count, items in found.flow.reasons
        ],
        "by_site": [(names.text(site), counts) for site, counts in found.flow.by_site],
        "mpp": figures.mpp_chart(found.flow.mpp) if found.flow.mpp else None,
        "mpp_words": _mpp(found.flow.mpp, found.flow.used),
        "tiles": _tiles(found.flow.tiles),
        "counts": _counts((found.study.config.get("cohort") or {}).get("counts") or {}, _unlabelled(found)),
        "encoder": {name: value for name, value in names.facts(encoder).items() if _is_told(value)},
        "pathology": encoder.get("pathology"),
        "warnings": [names.text(str(line)) for line in (found.study.config.get("cohort") or {}).get("warnings") or ()],
    }


def _is_told(value: Any) -> bool:
    """A contract repeats the rest, and what is empty says nothing."""
    return not isinstance(value, dict) and value not in (None, "", [])


def _counts(counts: dict[str, Any], unlabelled: int) -> list[tuple[str, Any]]:
    """What was counted when the table was read and its files were looked for, in words.

    unlabelled: rows left out for want of a label; the count of the table may be of another column's cells.
    """
    told = {name: unlabelled if name == "unlabelled" else counts[name] for name in _COUNTS if name in counts}
    return [(_COUNTS[name], count) for name, count in told.items()]


def _unlabelled(found: SharedFindings) -> int:
    return sum(count for reason, count, _ in found.flow.reasons if reason.startswith(NO_LABEL))


def _few(items: list[str]) -> str:
    shown = sorted(items)[:_SHOWN_ITEMS]
    more = len(items) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _tiles(tiles: tuple[int, ...]) -> str:
    if not tiles:
        return ""
    return f"{sum(tiles):,} tiles, {min(tiles):,} to {max(tiles):,} a slide, median {int(np.median(tiles)):,}"


def _mpp(mpp: tuple[float, ...], slides: int) -> str:
    known = f"Known of {len(mpp)} of {slides} slides: {spread(mpp)} µm per pixel." if mpp else ""
    return f"{known} Two peaks mean two kinds of scan; tiles are cut at one physical size all the same."
