"""The page that helps to choose a method is what the methods' files say, and nothing is written twice."""

from pathlib import Path

import pytest

from wsi_mil.errors import ConfigError
from wsi_mil.guide import RENEW, methods_page, model_lines, year_of
from wsi_mil.lookup import find_model, find_regulariser, model_names, regulariser_names
from wsi_mil.models.mean_pool import MeanPool
from wsi_mil.stages.listing import listing

PAGE = Path(__file__).resolve().parents[2] / "docs" / "methods.md"
MODELS = {name: find_model(name) for name in model_names()}


def made() -> str:
    return methods_page(MODELS, {name: find_regulariser(name) for name in regulariser_names()})


def test_every_line_of_the_committed_page_is_one_that_the_files_make() -> None:
    stale = set(PAGE.read_text().splitlines()) - set(made().splitlines())
    assert not stale, f"docs/methods.md is out of date. Renew it: {RENEW}"
    assert PAGE.read_text().count("| `") >= 49


def test_the_command_that_renews_the_page_writes_it(tmp_path: Path) -> None:
    listing("models", page=tmp_path / "methods.md")
    assert (tmp_path / "methods.md").read_text() == made()
    with pytest.raises(ConfigError, match="models only"):
        listing("encoders", page=tmp_path / "encoders.md")


def test_one_line_a_method_tells_family_scores_order_paper_and_year() -> None:
    lines = dict(zip(MODELS, model_lines(MODELS), strict=True))
    assert list(listing("models").notes) == list(lines.values())
    for name, model in MODELS.items():
        assert lines[name].startswith(name)
        assert model.paper in lines[name]
        assert all(word in lines[name] for word in (model.family, *model.score_kinds, str(year_of(model.paper))))
        assert ("order matters" in lines[name]) == model.order_matters


def test_each_method_stands_once_under_its_family_with_a_year() -> None:
    page = methods_page(MODELS, {})
    sections = {part.splitlines()[0].lower(): part for part in page.split("\n## ")[1:]}
    for name, model in MODELS.items():
        family = model.family.split(",")[0].lower()
        assert page.count(f"| `{name}` |") == 1
        assert f"| `{name}` |" in sections[family]
        assert 1990 < year_of(model.paper) < 2100


def test_a_trait_that_changes_changes_the_page() -> None:
    class Changed(MeanPool):
        order_matters, loops_over_bags, uses_positions, family = True, True, True, "a family of its own"
        classes_only = True

        def __init__(self, *, in_dim: int, n_outputs: int, max_tiles: int = 4096) -> None:
            super().__init__(in_dim=in_dim, n_outputs=n_outputs)
            self.max_tiles = max_tiles

    page = methods_page({"mine": Changed}, {})
    assert "\n## A family of its own\n" in page
    assert "| order matters, uses positions | 2 | classes only | bag by bag, at most 4,096 tiles |" in page


def test_the_year_is_the_venues_else_that_of_the_preprint() -> None:
    assert year_of("Ilse et al., ICML 2018, arXiv:1802.04712, section 2") == 2018
    assert year_of("FocusMIL, arXiv:2408.09449") == 2024
    assert year_of("Wang, Li and Metze, ICASSP 2019, arXiv:1810.09050") == 2019
    assert year_of("example") == 0
