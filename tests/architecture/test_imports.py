"""The rooms and who may open whose door. The rules are data; ARCHITECTURE.md says them in words."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("tiling", "wsi_mil", "apps")

# room -> what nothing in it may import. A ban on an outer room holds in all rooms inside it.
BANS: dict[str, tuple[str, ...]] = {
    "tiling": ("torch", "torchvision", "timm", "lightning", "streamlit", "wsi_mil", "apps"),
    "wsi_mil": ("apps", "streamlit"),
    "wsi_mil.models": ("lightning", "timm", "h5py", "pandas", "openslide", "pathlib", "tiling"),
    "wsi_mil.regularisers": ("lightning", "timm", "h5py", "pandas", "openslide", "pathlib", "tiling"),
    "wsi_mil.bags": ("lightning", "timm", "h5py", "pandas", "pathlib", "tiling"),
    "wsi_mil.statistics": ("torch", "lightning", "h5py", "pandas", "pathlib", "openslide", "tiling"),
    "wsi_mil.splits": ("torch", "lightning", "h5py", "openslide"),
    "wsi_mil.heatmap": ("torch", "lightning", "h5py", "pandas", "pathlib", "openslide"),
    "wsi_mil.runs": ("torch", "lightning", "timm"),
    "wsi_mil.report": ("torch", "lightning", "timm"),
    "tiling.geometry": ("h5py", "openslide", "cv2", "pathlib"),
    "tiling.tissue": ("h5py", "openslide", "pathlib"),
    "apps.viewer": ("torch", "lightning", "timm"),
}

# library -> the only files that may import it.
OWNERS: dict[str, tuple[str, ...]] = {
    "openslide": ("tiling.slide",),
    "lightning": ("wsi_mil.training",),
    "h5py": ("tiling.store", "wsi_mil.store", "wsi_mil.results.score_files"),
    "streamlit": ("apps.viewer",),
    "timm": ("wsi_mil.encoders",),
    "jsonargparse": ("apps.arguments",),
    "pickle": (),
}

# Inside wsi_mil only stages may use stages, and nobody else may.
STAGES = "wsi_mil.stages"


def modules() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(part for part in parts if part != "__init__"), path


def imports(path: Path) -> set[str]:
    """Every module that a file imports anywhere in it, type-checking blocks left out."""
    tree = ast.parse(path.read_text())
    skipped = {id(n) for block in ast.walk(tree) if _is_type_checking(block) for n in ast.walk(block)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def inside(name: str, room: str) -> bool:
    return name == room or name.startswith(f"{room}.")


MODULES = dict(modules())


@pytest.mark.parametrize("module", MODULES)
def test_nobody_opens_a_door_that_is_closed_to_them(module: str) -> None:
    used = imports(MODULES[module])
    for room, banned in BANS.items():
        if inside(module, room):
            broken = sorted(name for name in used if any(inside(name, ban) for ban in banned))
            assert not broken, f"{module} is in {room} and must not import {broken}"
    if not inside(module, STAGES) and not inside(module, "apps"):
        assert not [name for name in used if inside(name, STAGES)], f"{module} must not import stages"


@pytest.mark.parametrize("module", MODULES)
def test_a_library_with_an_owner_is_imported_by_it_alone(module: str) -> None:
    used = imports(MODULES[module])
    for library, owners in OWNERS.items():
        if any(inside(name, library) for name in used):
            assert any(inside(module, owner) for owner in owners), f"{module} imports {library}; only {owners} may"


def test_the_rules_name_rooms_that_exist() -> None:
    for room in (*BANS, *(owner for owners in OWNERS.values() for owner in owners)):
        assert any(inside(module, room) for module in MODULES), f"no such room: {room}"


def test_imports_are_absolute() -> None:
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.ImportFrom) and node.level), (
                f"{module}: relative import, line {node.lineno}"
            )


# File names inside a run that could mean nothing else. Only RunDir spells them.
RUN_FILES = {
    "checkpoint.ckpt",
    "config.yaml",
    "environment.json",
    "heatmaps",
    "metrics.json",
    "predictions.csv",
    "pseudonym_salt.txt",
    "report.html",
    "selection.json",
    "tables",
    "tensorboard",
    "validation.csv",
}
TEMPLATES = {"wsi_mil.report.page": {"report.html"}}
"""The page's template has the name of what is made of it."""


@pytest.mark.parametrize("module", MODULES)
def test_only_the_run_folder_spells_its_file_names(module: str) -> None:
    words = {node.value for node in ast.walk(ast.parse(MODULES[module].read_text())) if isinstance(node, ast.Constant)}
    if module != "wsi_mil.runs":
        assert not (words & RUN_FILES) - TEMPLATES.get(module, set()), f"{module}: ask RunDir for these paths"


@pytest.mark.parametrize(
    ("imported", "absent"),
    [
        ("apps.viewer.launch, wsi_mil.runs, wsi_mil.heatmap", "torch lightning timm"),
        ("wsi_mil, tiling, apps.cli", "torch lightning timm streamlit openslide pandas"),
    ],
)
def test_light_doors_load_no_heavy_library(imported: str, absent: str) -> None:
    code = f"import sys, {imported}; print([m for m in '{absent}'.split() if m in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert printed.strip() == "[]"
