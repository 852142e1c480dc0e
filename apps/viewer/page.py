"""The viewer's page, run by Streamlit at every interaction: the cases, and one slide with its heatmap."""

import math
from typing import Any

import pandas as pd
import streamlit as st

from apps.viewer.component import slide_viewer
from apps.viewer.heat import MEAN, colour_tables, heat_data, models_of, scores_of
from apps.viewer.library import Library, current
from apps.viewer.routes import BASE
from apps.viewer.tiles import OVERLAP_PX, TILE_PX, Pyramid
from wsi_mil.errors import RunError, UserError
from wsi_mil.heatmap import ScoreColumn, TileScores, caution, default_column
from wsi_mil.results.cases import Case, check_same_slide

_STYLE = """
<style>
  .stMainBlockContainer { padding: 0.9rem 1.25rem 0.5rem; }
  .stMain [data-testid="stVerticalBlock"] { gap: 0.5rem; }
  [data-testid="stSidebarHeader"] { height: 2rem; padding: 0.25rem 1rem 0; margin: 0; }
  [data-testid="stSidebarUserContent"] { padding-top: 0; padding-bottom: 0.5rem; }
  [data-testid="stHeader"] { height: 0; min-height: 0; }
  h3 { padding: 0 0 0.3rem !important; }
</style>
"""
_DISCLAIMER = "Research use only, not for diagnosis."


def main() -> None:
    """Draw the page."""
    st.set_page_config(page_title="wsi-mil viewer", layout="wide", initial_sidebar_state=410)
    st.html(_STYLE)
    library = current()
    try:
        with st.sidebar:
            method, cases = _choose_method(library)
            case = _choose_case(cases, method)
    except (UserError, OSError) as error:  # the run is being written anew, damaged, or gone
        st.error(_plain(str(error)))
        return
    if case is None:
        st.info("No case matches. Change the search or show all cases.")
        return
    _remember(slide=case.slide_id, method=method)
    try:
        _show(library, method, case)
    except (UserError, OSError) as error:
        _heading(case)
        st.error(_plain(str(error)))
    st.caption(_DISCLAIMER)


def _choose_method(library: Library) -> tuple[str, list[Case]]:
    config = library.run.config()
    task, methods = config["task"], library.run.methods()
    st.subheader(_plain(library.run.path.resolve().name), anchor=False)
    st.caption(_plain(f"{task['target']} · {task['level']} level · {' / '.join(map(str, task['classes']))}"))
    wanted = st.query_params.get("method")
    method = st.selectbox("Method", methods, index=methods.index(wanted) if wanted in methods else 0, key="method")
    return method, library.cases(method)


def _choose_case(cases: list[Case], method: str) -> Case | None:
    """The case list, the worst first, and the case that is picked in it, or was shown before."""
    left, right = st.columns([3, 2], vertical_alignment="bottom")
    text = left.text_input("Find", placeholder="slide, patient or site", key="find").strip().lower()
    errors = right.toggle("Errors only", key="errors")
    listed = [c for c in cases if (c.is_error or not errors) and text in f"{c.slide_id} {c.patient} {c.site}".lower()]
    wrong = sum(case.is_error for case in cases)
    known = any(case.label for case in cases)
    verdict = f"the worst first · {wrong} wrong" if known else "labels are not known"
    st.caption(f"{len(listed)} of {len(cases)} slides, {verdict}. Tick a box to open one.")
    shown = st.query_params.get("slide")
    before = next((index for index, case in enumerate(listed) if case.slide_id == shown), 0)
    picked = st.dataframe(
        _table(listed),
        hide_index=True,
        on_select="rerun",
        selection_mode="single-row",
        selection_default={"selection": {"rows": [before]}} if listed else None,
        row_height=30,
        height=min(640, 30 * len(listed) + 40),
        key=f"cases {method} {text} {errors}",
        column_config={
            "": st.column_config.TextColumn("", help="✗ where the prediction is not the label", width=20),
            "slide": st.column_config.TextColumn("slide", width=104),
            "label": st.column_config.TextColumn("label", width=62),
            "predicted": st.column_config.TextColumn("predicted", width=72),
            "p": st.column_config.NumberColumn("p(label)", help="Probability of the label", format="%.2f", width=62),
        },
    )
    rows = picked.selection.rows
    index = rows[0] if rows else before
    return listed[index] if index < len(listed) else None


def _table(cases: list[Case]) -> pd.DataFrame:
    rows = [
        {
            "": "✗" if case.is_error else "",
            "slide": case.slide_id,
            "label": case.label or "–",
            "predicted": case.predicted,
            "p": case.probabilities.get(case.label),
        }
        for case in cases
    ]
    return pd.DataFrame(rows, columns=["", "slide", "label", "predicted", "p"])


def _show(library: Library, method: str, case: Case) -> None:
    opaque = library.admit(case)
    models = models_of(library.run, method, case)
    if not models:
        raise RunError(
            f"{case.slide_id}: {method} stored no tile scores for it. Give the command that made the run again."
        )
    head, left, right = st.columns([6, 2.6, 1.7], vertical_alignment="bottom")
    with head:
        _heading(case)
    chosen = right.selectbox(
        "Model",
        models,
        format_func=lambda key: _model_name(key, len(models) - 1),
        key=f"model {method} {case.slide_id}",
    )
    scores = scores_of(library.run, method, case, chosen)
    column = _choose_column(scores, case, method=method, place=left)
    with library.slide(opaque) as slide:
        check_same_slide(slide, scores)
    address = {"method": method, "models": chosen, "column": column.name, "v": _changed(library, method, case)}
    slide_viewer(
        {
            "slide": _slide_data(library, opaque, scores),
            "heat": heat_data(scores, column, address=address, classed=bool(case.probabilities)),
            "colormaps": colour_tables(),
            "note": _note(library, column, chosen, case),
        }
    )


def _choose_column(scores: TileScores, case: Case, *, method: str, place: Any) -> ScoreColumn:
    names = [column.name for column in scores.columns]
    own = default_column(scores.columns, case.predicted)
    name = place.selectbox("Scores", names, index=names.index(own.name), key=f"scores {method} {case.slide_id}")
    return scores.columns[names.index(name)]


def _slide_data(library: Library, opaque: str, scores: TileScores) -> dict[str, Any]:
    width, height = scores.geometry.level0_size
    return {
        "id": scores.slide_id,
        "base": f"{BASE}/{opaque}",
        "token": library.signer.token(opaque),
        "width": width,
        "height": height,
        "topLevel": Pyramid(size_l0=(width, height)).top,
        "tilePx": TILE_PX,
        "overlapPx": OVERLAP_PX,
        "mpp": scores.geometry.mpp[0],
    }


def _heading(case: Case) -> None:
    said = f"predicted **{_plain(case.predicted)}**" + (f" ({_plain(case.how_sure)})" if case.how_sure else "")
    if case.label:
        verdict = "" if not case.probabilities else ":red[✗ wrong]" if case.is_error else ":green[✓ right]"
        loss = f" · loss {case.loss:.2f}" if math.isfinite(case.loss) else ""
        said = f"label **{_plain(case.label)}** · {said} {verdict}{loss}"
    st.subheader(_plain(case.slide_id), anchor=False)
    st.markdown(f"{said} · patient {_plain(case.patient)}" + (f" · site {_plain(case.site)}" if case.site else ""))


def _plain(text: str) -> str:
    """A name as it is, whatever signs of Markdown it holds."""
    return "".join(f"\\{letter}" if letter in r"\`*_{}[]()#+-.!|~$:<>&" else letter for letter in text)


def _model_name(key: str, count: int) -> str:
    return f"mean of {count}" if key == MEAN else key


def _note(library: Library, column: ScoreColumn, models: str, case: Case) -> str:
    who = f"model {models}" if models != MEAN else f"the mean of {len(case.keys)} models"
    seen = f"Out-of-fold: from {who} that did not see this patient."
    if library.run.config().get("kind") == "predict":
        seen = "From the models of another run, which were trained on another cohort."
    return f"{caution(column)} {seen}".strip()


def _changed(library: Library, method: str, case: Case) -> str:
    """Changes when the stored scores do, so the browser never shows old ones."""
    paths = [library.run.scores_path(method, key, case.slide_id) for key in case.keys]
    return f"{max(path.stat().st_mtime_ns for path in paths if path.is_file()):x}"


def _remember(**parts: str) -> None:
    """Keep the address in step, so that it can be given to a colleague."""
    for name, value in parts.items():
        if st.query_params.get(name) != value:
            st.query_params[name] = value


if __name__ == "__main__":
    main()
