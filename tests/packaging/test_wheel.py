"""The wheel holds the three packages and all they need, and works from any folder."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    names = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    for name in filter(None, names.split("\0")):
        if name.split("/")[0] in {"wsi_mil", "tiling", "apps", "pyproject.toml", "README.md", "LICENSE"}:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy  # the link to configs is a folder
            copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    words = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        str(source),
    ]
    subprocess.run(words, check=True, cwd=out)
    return next(out.glob("*.whl"))


def test_it_holds_exactly_the_three_packages_with_their_data(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"wsi_mil", "tiling", "apps"}
    for needed in (
        "wsi_mil/encoders/data/tf_efficientnet_lite0.in1k.fp16.safetensors",
        "wsi_mil/demo/data/CMU-1-Small-Region.svs",
        "wsi_mil/demo/data/SOURCES.md",
        "wsi_mil/demo/data/crc_tiles/index.csv",
        "wsi_mil/demo/data/lesions.json",
        "apps/viewer/component/index.js",
        "apps/viewer/component/openseadragon.min.js",
        "apps/viewer/component/openseadragon.LICENSE.txt",
        "wsi_mil/report/report.html",
        "wsi_mil/report/style.css",
        "wsi_mil/report/sections/summary.html",
        "wsi_mil/report/kinds/chapter.html",
        "wsi_mil/configs/small_cohort.yaml",
        "wsi_mil/configs/methods/acmil.yaml",
        "wsi_mil/py.typed",
        "tiling/py.typed",
    ):
        assert needed in names, needed
    assert sum(name.startswith("wsi_mil/demo/data/crc_tiles/") and name.endswith(".jpg") for name in names) == 149


def test_it_works_from_any_folder(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); sys.argv = ['wsi-mil', *sys.argv[2:]]; "
        "from apps.cli import main; import wsi_mil, tiling; "
        "assert 'site' in wsi_mil.__file__ and 'site' in tiling.__file__; sys.exit(main())"
    )
    for words, said in (
        (["list", "models"], "acmil"),
        (["list", "encoders"], "ImageNet"),
        (["list", "models", "acmil"], "acmil.yaml"),
    ):
        command = [sys.executable, "-c", code, str(tmp_path / "site"), *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
