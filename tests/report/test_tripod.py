"""The list of TRIPOD+AI is whole, and points at sections that exist."""

import re

from wsi_mil.report.page import SECTIONS, anchor
from wsi_mil.report.sections.tripod import ITEMS


def test_the_27_items_and_their_52_parts_stand_in_order():
    numbers = [item.number for item in ITEMS]
    mains = [int(re.match(r"\d+", number).group()) for number in numbers]
    assert list(dict.fromkeys(mains)) == list(range(1, 28))
    assert len(set(numbers)) == len(numbers) == 52
    assert mains == sorted(mains)
    for main in set(mains):
        letters = "".join(
            number.lstrip("0123456789")
            for number in numbers
            if number.lstrip("0") and int(re.match(r"\d+", number).group()) == main
        )
        assert letters in ("", "abcdefgh"[: len(letters)])


def test_every_answer_stands_in_a_section_of_the_page():
    anchors = {anchor(section) for section in SECTIONS}
    assert {name for item in ITEMS for name in item.sections} <= anchors
    assert all(item.sections or not item.left for item in ITEMS), "what is wholly the authors' needs no further word"
