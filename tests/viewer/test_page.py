"""The page as Streamlit runs it, without a browser."""

from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

import apps.viewer
from apps.viewer.library import Library

PAGE = Path(apps.viewer.__file__).with_name("page.py")


@pytest.fixture
def page(library: Library) -> AppTest:
    return AppTest.from_file(str(PAGE), default_timeout=30).run()


def test_the_worst_case_is_listed_first_and_shown(page: AppTest) -> None:
    assert not page.exception
    table = page.dataframe[0].value
    assert table["slide"].tolist() == ["Präparat 07 #1 & <b>", "gone", "fiducials"]
    assert table["p"].tolist() == pytest.approx([0.3, 0.6, 0.9])
    assert table[""].tolist() == ["✗", "", ""]
    assert page.query_params["slide"] == "Präparat 07 #1 & <b>"
    assert any("✗ wrong" in text.value for text in page.markdown)
    assert any("not for diagnosis" in text.value for text in page.caption)
    assert any(element.type == "bidi_component" for element in page.main)


def test_a_slide_without_its_file_says_which_and_how_to_mend(library: Library) -> None:
    page = AppTest.from_file(str(PAGE), default_timeout=30)
    page.query_params["slide"] = "gone"
    page.run()
    assert not page.exception
    assert "gone.tif" in page.error[0].value.replace("\\", "")
    assert "--slides DIR" in page.error[0].value.replace("\\", "")


def test_errors_only_and_search_narrow_the_list(page: AppTest) -> None:
    page.toggle[0].set_value(True).run()
    assert page.dataframe[0].value["slide"].tolist() == ["Präparat 07 #1 & <b>"]
    page.toggle[0].set_value(False).run()
    page.text_input[0].set_value("FIDU").run()
    assert page.dataframe[0].value["slide"].tolist() == ["fiducials"]
    page.text_input[0].set_value("nobody").run()
    assert "No case matches" in page.info[0].value
    assert not page.exception


def test_a_class_wise_method_opens_with_the_predicted_class(page: AppTest) -> None:
    page.selectbox(key="method").set_value("acmil").run()
    assert not page.exception
    labels = {box.label: box for box in page.selectbox}
    assert labels["Scores"].value == "probability:tumour", (
        "tumour is predicted for this slide, though its label is normal"
    )
    assert labels["Model"].options == ["mean of 2", "r0_f0_s0", "r0_f0_s1"], (
        "the model that saw the patient is not offered"
    )
    assert page.query_params["method"] == "acmil"
