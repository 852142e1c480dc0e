"""What is told of methods is what their files say, and nothing is written twice; the examples of the pages run."""

import inspect
import re
import tomllib
from pathlib import Path
from typing import Annotated, Literal

import pytest
import yaml

from wsi_mil.encoders import encoder_names, find_declaration
from wsi_mil.errors import ConfigError
from wsi_mil.fitting.spec import TrainSpec
from wsi_mil.guide.cards import model_lines, regulariser_lines
from wsi_mil.guide.facts import addresses, linked, year_of
from wsi_mil.guide.page import RENEW, methods_page
from wsi_mil.guide.signatures import settings
from wsi_mil.lookup import find_model, find_regulariser, model_names, regulariser_names
from wsi_mil.methods import MethodSpec, resolve_methods
from wsi_mil.models.mean_pool import MeanPool
from wsi_mil.settings import Range, override
from wsi_mil.stages.listing import listing

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "methods.md"
PYTHON_PAGE = ROOT / "docs" / "python.md"
MODELS = {name: find_model(name) for name in model_names()}
PLUG_INS = {name: find_regulariser(name) for name in regulariser_names()}
OWN = """
from wsi_mil.models.mean_pool import MeanPool
from wsi_mil.models._base import MILModel

class Mine(MILModel):
    summary = "a method of my own"
    score_kinds = ("contribution",)
    __init__ = MeanPool.__init__
    forward = MeanPool.forward
"""


def made() -> str:
    return methods_page(MODELS, PLUG_INS)


def card(name: str, what: str = "models") -> str:
    return "\n".join(listing(what, name).notes)


def words(text: str) -> str:
    return " ".join(text.split())


def test_every_line_of_the_committed_page_is_one_that_the_files_make() -> None:
    stale = set(PAGE.read_text().splitlines()) - set(made().splitlines())
    assert not stale, f"docs/methods.md is out of date. Renew it: {RENEW}"
    assert PAGE.read_text().count("| `") >= 49


def test_the_command_that_renews_the_page_writes_it(tmp_path: Path) -> None:
    listing("models", page=tmp_path / "methods.md")
    assert (tmp_path / "methods.md").read_text() == made()
    with pytest.raises(ConfigError, match="of all models only"):
        listing("encoders", page=tmp_path / "encoders.md")


def test_an_entry_of_the_list_tells_family_scores_paper_year_and_what_is_special() -> None:
    entries = dict(zip(MODELS, model_lines(MODELS), strict=True))
    assert list(listing("models").notes[:-1]) == list(entries.values())
    for name, model in MODELS.items():
        entry = words(entries[name])
        assert entries[name].startswith(name)
        assert model.paper in entry
        assert all(word in entry for word in (model.family, *model.score_kinds, str(year_of(model.paper))))
        assert ("order matters" in entry) == model.order_matters
        assert ("classes only" in entry) == model.classes_only
        assert ("bag by bag" in entry) == model.loops_over_bags
        assert ("uses positions" in entry) == model.uses_positions
    assert "bag by bag, at most 32,768 tiles" in words(entries["abmilx"])


@pytest.mark.parametrize("what", ["models", "regularisers"])
def test_no_line_is_wider_than_a_terminal(what: str) -> None:
    lines = [line for note in listing(what).notes for line in note.splitlines()]
    lines += [
        line for name in (["ins", "mhim"] if what == "models" else ["sm"]) for line in card(name, what).splitlines()
    ]
    assert [line for line in lines if len(line) > 120 and "://" not in line] == []
    long_name = f"{'folder/' * 20}mine.py"
    assert model_lines({long_name: MeanPool})[0].splitlines()[0] == long_name


def test_all_of_a_method_is_told_by_its_name() -> None:
    told = card("acmil")
    for said in (
        MODELS["acmil"].summary,
        "Zhang et al., ECCV 2024, arXiv:2311.07125 https://arxiv.org/abs/2311.07125",
        "configs/methods/acmil.yaml",
        "wsi_mil/models/acmil.py",
        "any kind",
        "a tile's share of the bag's logit",
    ):
        assert said in words(told)
    params, objective, plug_ins = re.split(r"\n(?=params|objective|plug-ins)", told)[1:]
    assert re.search(r"mask_drop: float.* = 0.6\s+p, the share of them that is\n", params)
    assert re.search(r"masking: fixed \| bernoulli = fixed\s+exactly int\(K p\) of them, or each with", params)
    assert re.search(r"hidden: int.* \| null = null\s+width of the first layer; null takes the published one", params)
    assert re.search(r"diversity_weight: float.* = 1.0\s+of the term between them\n", objective)
    assert "in_dim:" not in params
    assert "criterion:" not in objective
    assert "  attention_diversity  " in plug_ins
    assert "  attention_diversity  " not in card("abmil")
    assert "classes only" in card("midam")
    assert "1 for two classes" in card("midam")
    assert "the loss of the task alone\n  none" in card("abmil")


@pytest.mark.parametrize("name", model_names())
def test_every_setting_is_told_with_its_default(name: str) -> None:
    model = MODELS[name]
    for function in (model, model.objective):
        signature = inspect.signature(function).parameters
        found = {one.name: one for one in settings(function)}
        assert set(found) == set(signature) - {"self", "in_dim", "n_outputs", "criterion"}
        for one in found.values():
            assert yaml.safe_load(one.default) == yaml.safe_load(yaml.safe_dump(_plain(signature[one.name].default)))
            assert not one.told.startswith("as `")


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def test_what_a_base_class_says_of_a_setting_is_told_of_the_method() -> None:
    told = {one.name: one.told for one in settings(MODELS["gem"])}
    assert told["p"] == "the exponent at the start, at least 1"
    assert told["hidden"].startswith("width of the first layer; null takes the published one")
    assert {one.name: one.told for one in settings(MODELS["prob_max"])}["prior"].startswith("the tile probability")


def test_types_and_ranges_are_told_as_a_configuration_spells_them() -> None:
    class Changed(MeanPool):
        """Example. heads: so many.  act: after it. Not of the parts.  widths, more: of the parts."""

        def __init__(
            self,
            *,
            in_dim: int,
            n_outputs: int,
            heads: Annotated[int, Range(1)] | None,
            act: Literal["relu", "gelu"] = "relu",
            widths: tuple[Annotated[float, Range(0)], ...] = (1e-5, 2.0),
            loose=None,
            **more: int,
        ) -> None: ...

    assert [(one.name, one.kind, one.default, one.told) for one in settings(Changed)] == [
        ("heads", "int (at least 1) | null", "required", "so many"),
        ("act", "relu | gelu", "relu", "after it. Not of the parts"),
        ("widths", "[float (at least 0), ...]", "[1.0e-05, 2.0]", "of the parts"),
        ("loose", "any", "null", ""),
    ]


def test_all_of_a_plug_in_and_of_an_encoder_is_told_by_its_name() -> None:
    told = card("aem", "regularisers")
    assert "https://arxiv.org/abs/2406.15303" in told
    assert re.search(r"weight: float.* = 0.1\s+lambda at the start", told)
    goes_with = words(told.partition("goes with")[2].partition(" file ")[0]).split(", ")
    assert (
        {"abmil", "acmil", "transmil"} <= set(goes_with) <= {m for m in MODELS if "attention" in MODELS[m].score_kinds}
    )
    for name in encoder_names():
        declared = find_declaration(name)
        assert all(
            str(fact) in words(card(name, "encoders")) for fact in (declared.dim, declared.licence, declared.label)
        )


def test_an_unknown_name_gets_the_nearest_one() -> None:
    for what, name, near in (
        ("models", "acmill", "acmil"),
        ("regularisers", "aeem", "aem"),
        ("encoders", "unii", "uni"),
    ):
        with pytest.raises(ConfigError, match=f"Did you mean '{near}'"):
            listing(what, name)
    for options in ({"page": Path("page.md")}, {"also": [Path("mine.py")]}):
        with pytest.raises(ConfigError, match="Leave"):
            listing("models", "acmil", **options)


def test_a_file_of_ones_own_is_told_and_one_that_says_too_little_gets_the_cure(tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text(OWN)
    for asked in ({"also": [own]}, {"name": str(own)}):
        with pytest.raises(ConfigError, match=r"does not say its family, paper. `wsi-mil check .*mine.py`"):
            listing("models", **asked)
    own.write_text(OWN + '    family, paper = "pooling", "none"\n')
    assert "a method of my own" in card(str(own))
    assert "configs/" not in card(str(own))


def test_a_plug_in_of_ones_own_needs_no_more_than_a_docstring(tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text(
        "from wsi_mil.regularisers.aem import Aem\n"
        "class Mine(Aem):\n"
        '    """Adds little.\n\n    weight: of what is added.\n    """\n'
        '    summary = paper = ""\n'
        "    def __init__(self, inner, *, weight: float = 0.5) -> None:\n"
        "        super().__init__(inner, weight=weight)\n"
    )
    told = card(str(own), "regularisers")
    assert told.count("Adds little") == 1
    assert "weight: float = 0.5  of what is added" in told
    assert "goes with  abmil, " in told
    assert "paper" not in told


def test_every_method_and_plug_in_can_be_cited() -> None:
    for name, plug_in in (MODELS | PLUG_INS).items():
        assert plug_in.summary, name
        assert addresses(plug_in.paper), name
        assert linked(plug_in.paper) in made()
        assert re.search(r"[A-Z]\w+( et al\.| and \w+|,)", plug_in.paper), name
    assert linked("Xiang, OpenReview 01Km") == "Xiang, [OpenReview 01Km](https://openreview.net/forum?id=01Km)"
    for name, entry in zip(PLUG_INS, regulariser_lines(PLUG_INS), strict=True):
        assert PLUG_INS[name].paper in words(entry)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])


def test_the_page_names_what_there_is() -> None:
    page = made()
    for path in re.findall(r"`(configs/\S+)`", page):
        assert (ROOT / path).exists()
    for name in re.findall(r"\]\((\w+\.md)\)", page):
        assert (PAGE.parent / name).exists()
    small = yaml.safe_load((ROOT / "configs" / "small_cohort.yaml").read_text())["methods"]
    listed = words(page).partition("`configs/small_cohort.yaml` (")[2].partition(", a fixed")[0]
    assert {name.removeprefix("abmil+") for name in re.split(r", | and ", listed)} == {
        one if isinstance(one, str) else one["name"] for one in small
    } | {plug_in for one in small if isinstance(one, dict) for plug_in in one.get("regularisers", {})}
    of_tiles = words(page).partition("A probability for each tile: ")[2].partition(". The columns")[0].split(", ")
    assert of_tiles == [name for name, model in MODELS.items() if "probability" in model.score_kinds]


def test_the_worked_example_is_the_published_settings_on_one_set_of_folds() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", made(), flags=re.DOTALL)
    written = yaml.safe_load(block)
    shared = override(TrainSpec(), written["train"] | {"seeds": [0]}, where="train")
    methods = resolve_methods([MethodSpec(**one) for one in written["methods"]])
    for method in methods:
        published = yaml.safe_load((ROOT / "configs" / "methods" / f"{method.name}.yaml").read_text())
        (alone,) = resolve_methods([MethodSpec(**one) for one in published["methods"]])
        assert (method.params, method.objective) == (alone.params, alone.objective)
        assert override(shared, method.train, where=method.name) == override(TrainSpec(), published["train"], where="")
    assert len(methods) == 3


def test_the_examples_in_python_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PYTHON_PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) >= 6
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PYTHON_PAGE), "exec"), names)
    stable = {"Bag", "pack", "find_model", "load_bag", "open_encoder", "make_folds", "Slide", "TileSpec", "tile_slide"}
    assert stable <= set(names)


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
