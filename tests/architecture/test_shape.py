"""Sizes, names and words that hold for every file."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [path for package in ("tiling", "wsi_mil", "apps") for path in sorted((ROOT / package).rglob("*.py"))]

# Functions over 80 lines would stand here with their reason. There is none.
LONG_FUNCTIONS: dict[str, str] = {}
TOP_LEVEL = {"wsi_mil", "tiling", "apps", "configs", "tests", "docs"}


def functions() -> list[tuple[str, int]]:
    """Every function with its number of lines, the docstring not counted."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                first = node.body[0]
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                    lines -= (first.end_lineno or first.lineno) - first.lineno + 1
                found.append((f"{path.relative_to(ROOT)}:{node.name}", lines))
    return found


def test_functions_are_short() -> None:
    all_functions = functions()
    long = [item for item in all_functions if item[1] > 40]
    assert len(long) <= max(1, len(all_functions) // 100), long
    assert {name for name, lines in long if lines > 80} == set(LONG_FUNCTIONS)


def test_method_names_are_file_names_and_there_is_no_utils() -> None:
    assert not [path for path in SOURCES if path.stem in {"utils", "helpers", "common", "misc"}]


def tracked() -> list[Path]:
    names = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).exists()]


def test_git_ignores_no_file_of_the_packages() -> None:
    files = [
        path for package in ("tiling", "wsi_mil", "apps") for path in (ROOT / package).rglob("*") if path.is_file()
    ]
    names = "\0".join(str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts)
    words = ["git", "check-ignore", "-z", "--stdin"]
    assert not subprocess.run(words, input=names, capture_output=True, text=True, cwd=ROOT).stdout


def test_only_the_agreed_folders_stand_at_the_top() -> None:
    folders = {path.relative_to(ROOT).parts[0] for path in tracked() if len(path.relative_to(ROOT).parts) > 1}
    assert {name for name in folders if not name.startswith(".")} <= TOP_LEVEL


def test_no_file_speaks_of_a_machine() -> None:
    pattern = re.compile(r"(^|[^A-Za-z0-9_.])/(work|farm|root|home)/", re.M)
    texts = [path for path in tracked() if path.suffix in {".py", ".md", ".toml", ".yml", ".yaml", ".lock", ".html"}]
    texts = [path for path in texts if path != Path(__file__).resolve()]
    assert not [str(path) for path in texts if pattern.search(path.read_text())]


def test_conda_environment_and_pyproject_name_the_same_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    pip = next(item["pip"] for item in environment["dependencies"] if isinstance(item, dict))
    assert sorted(pip) == sorted(project["dependencies"])
    python = next(item for item in environment["dependencies"] if isinstance(item, str) and item.startswith("python"))
    assert python == f"python{project['requires-python']}"


def test_the_lock_pins_every_dependency_within_its_range() -> None:
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    for text in (*project["dependencies"], *project["optional-dependencies"]["dev"]):
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[requirement.name.lower()]), text
