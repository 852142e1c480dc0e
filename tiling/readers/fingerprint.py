"""What tells one slide from another without reading it: OpenSlide's quickhash and the byte count of all its files."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from tiling.readers.dicom import series_files

_HEAD_BYTES = 65_536


def fingerprint(path: Path, properties: Mapping[str, str], level_sizes: tuple[tuple[int, int], ...]) -> str:
    """32 hex digits that do not depend on the file's name or place.

    They cover OpenSlide's quickhash (the smallest level's data and the metadata; where a format has none, the file's
    first 64 KiB, the properties and the level sizes) and the number of bytes of all the slide's files, so a copy that
    was cut or is still growing has another fingerprint. Costs milliseconds: a change of pixels in the large levels
    that keeps the byte count is not seen.
    """
    digest = hashlib.sha256()
    quickhash = properties.get("openslide.quickhash-1")
    if quickhash:
        digest.update(quickhash.encode())
    else:
        with path.open("rb") as handle:
            digest.update(handle.read(_HEAD_BYTES))
        digest.update(repr((sorted(properties.items()), level_sizes)).encode())
    digest.update(str(sum(file.stat().st_size for file in slide_files(path, properties))).encode())
    return digest.hexdigest()[:32]


def slide_files(path: Path, properties: Mapping[str, str]) -> list[Path]:
    """All files that make up the slide: one for most formats; a folder, a list or a series for some."""
    vendor = properties.get("openslide.vendor")
    if vendor == "dicom":
        return series_files(path)
    if vendor == "mirax":
        folder = path.with_suffix("")
        return [path, *(sorted(file for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else ())]
    if vendor == "hamamatsu" and path.suffix.lower() in (".vms", ".vmu"):
        named = {path.parent / value for key, value in properties.items() if key.startswith("hamamatsu.") and value}
        return [path, *sorted(file for file in named - {path} if _is_file(file))]
    return [path]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
