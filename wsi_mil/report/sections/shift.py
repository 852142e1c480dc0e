"""Of an external validation, how far its slides lie from those that the models were trained on."""

from typing import Any

import pandas as pd

from wsi_mil.report.findings import SharedFindings
from wsi_mil.report.pseudonyms import Names
from wsi_mil.report.shift import FAR
from wsi_mil.report.wording import number

TITLE = "Domain shift"
_SHOWN = 12


def context(found: SharedFindings, names: Names) -> dict[str, Any]:
    """The picture, the sentences and the farthest slides; `shift` is None where nothing was measured."""
    shift = found.shift
    if shift is None:
        return {"shift": None}
    return {
        "shift": shift,
        "far": f"{FAR:.0%}",
        "stain": bool(shift.slides["stain_distance"].notna().any()),
        "slides": len(shift.slides),
        "unlike": len(shift.unlike),
        "sentences": shift.sentences,
        "picture": shift.picture,
        "rows": [_row(row, names) for _, row in shift.unlike.head(_SHOWN).iterrows()],
        "more": len(shift.unlike) > _SHOWN,
    }


def _row(row: "pd.Series[Any]", names: Names) -> dict[str, str]:
    unlike = ", ".join(row["unusual"].split()).replace("mpp", "pixel size")
    words = {"slide": names.slide_or_text(row["slide"]), "unlike": unlike}
    for name in ("features", "stain"):
        words[name] = number(row[f"{name}_distance"])
        nearer = row[f"{name}_training_nearer"]
        words[f"{name}_nearer"] = f"{nearer:.0%}" if pd.notna(nearer) else "–"
    return words | {"mpp": f"{row['mpp']:.4g}"}
