"""From a folder to the slides in it: names only; no slide is opened here.

A slide id is the path below the root without the known suffix, "/" as "__"; nothing else of a name is cut or changed.
"""

import logging
import os
import unicodedata
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from tiling.errors import WrongUse
from tiling.readers.dicom import DicomError, Instance, read_instance

SUFFIXES = (
    ".svs", ".tif", ".tiff", ".btf", ".tf8", ".ndpi", ".vms", ".vmu", ".scn", ".mrxs", ".bif", ".svslide", ".dcm",
)  # fmt: skip
"""What OpenSlide reads, in lower case; case does not matter in a file's name."""

MAX_ID_BYTES = 200
"""Every file that is made of a slide is named by its id, with additions; file systems allow 255 bytes a name."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SlideSource:
    """One slide to work on, and what the cohort says about it."""

    slide_id: str
    path: Path
    slide_mpp: tuple[float, float] | None = None
    mask: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """The slides of a folder, sorted by id, and what could not be taken as one: (relative path, reason)."""

    root: Path
    sources: tuple[SlideSource, ...]
    problems: tuple[tuple[str, str], ...] = ()


@dataclass(kw_only=True)
class _Found:
    """What a walk has met so far."""

    root: Path
    files: list[Path] = field(default_factory=list)
    linked_files: list[Path] = field(default_factory=list)
    linked_folders: list[Path] = field(default_factory=list)
    problems: list[tuple[Path, str]] = field(default_factory=list)
    seen: set[tuple[int, int]] = field(default_factory=set)
    """Device and inode of every folder and slide file, so that none counts twice."""


def known_suffix(name: str) -> str:
    """The known suffix of a file name as it is spelled there; empty when it has none."""
    suffix = PurePath(name).suffix
    return suffix if suffix.lower() in SUFFIXES else ""


def slide_id_of(relative: PurePath) -> str:
    """The slide id of a path below the root."""
    return "__".join([*relative.parts[:-1], relative.name.removesuffix(known_suffix(relative.name))])


def find_slides(root: Path) -> Discovery:
    """Find the slides below a folder (or take the one file that is given).

    Linked folders are followed, each folder once; a file that can be reached in several ways is one slide, named by
    the way without links. Hidden names are passed over, and the data folders that belong to .mrxs files are not
    entered. The .dcm files of one series are one slide, named by its largest file. Two slides that would have one id
    are problems, both. Raises WrongUse when `root` does not exist.
    """
    root = Path(root)
    if root.is_file():
        return Discovery(root=root.parent, sources=(SlideSource(slide_id=slide_id_of(PurePath(root.name)), path=root),))
    if not root.is_dir():
        raise WrongUse(f"{root}: there is no such folder. Give the folder that holds the slides.")
    found = _walk(root)
    plain = [path for path in found.files if path.suffix.lower() != ".dcm"]
    paths = plain + _series([path for path in found.files if path.suffix.lower() == ".dcm"], found.problems)
    by_id: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        by_id[slide_id_of(path.relative_to(root))].append(path)
    sources = tuple(SlideSource(slide_id=key, path=hits[0]) for key, hits in sorted(by_id.items()) if len(hits) == 1)
    found.problems += _collisions(by_id, root)
    problems = sorted((_text(path.relative_to(root)), reason) for path, reason in found.problems)
    return Discovery(root=root, sources=sources, problems=tuple(problems))


def _walk(root: Path) -> _Found:
    """Collect slide files: first those that need no link, then linked files, then linked folders one by one."""
    found = _Found(root=root)
    folders = [root]
    while folders or found.linked_files or found.linked_folders:
        if folders:
            folders += _enter(folders.pop(0), found)
        elif found.linked_files:
            _take_link(found.linked_files.pop(0), found)
        else:
            folders.append(found.linked_folders.pop(0))
    return found


def _enter(folder: Path, found: _Found) -> list[Path]:
    """Take the slide files of one folder; return its folders."""
    try:
        entries = sorted(folder.iterdir()) if _first_time(folder, found.seen) else []
    except OSError as error:
        found.problems.append((folder, f"the folder cannot be read: {error.strerror}"))
        return []
    data_folders = {path.name.removesuffix(path.suffix) for path in entries if path.suffix.lower() == ".mrxs"}
    below: list[Path] = []
    for path in entries:
        if path.name.startswith("."):
            continue
        try:
            if path.is_dir():
                if path.name not in data_folders:
                    (found.linked_folders if path.is_symlink() else below).append(path)
            elif path.is_symlink():
                found.linked_files.append(path)
            elif known_suffix(path.name):
                _take(path, found)
        except OSError as error:
            found.problems.append((path, f"it cannot be read: {error.strerror}"))
    return below


def _take_link(path: Path, found: _Found) -> None:
    if not path.exists():
        found.problems.append((path, f"the link leads to {_text(path.readlink())}, which does not exist"))
    elif known_suffix(path.name):
        _take(path, found)


def _take(path: Path, found: _Found) -> None:
    try:
        str(path.relative_to(found.root)).encode()
    except UnicodeEncodeError:
        found.problems.append((path, "the name is not valid UTF-8; rename it"))
        return
    if len(slide_id_of(path.relative_to(found.root)).encode()) > MAX_ID_BYTES:
        text = f"its id would have more than {MAX_ID_BYTES} bytes; shorten the name, or give a folder deeper down"
        found.problems.append((path, text))
    elif not path.is_file():
        found.problems.append((path, "it is no ordinary file"))
    elif _first_time(path, found.seen):
        found.files.append(path)
    else:
        _log.info("%s is another way to a file that is already there", _text(path))


def _first_time(path: Path, seen: set[tuple[int, int]]) -> bool:
    status = path.stat()
    key = (status.st_dev, status.st_ino)
    if key in seen:
        return False
    seen.add(key)
    return True


def _series(paths: list[Path], problems: list[tuple[Path, str]]) -> list[Path]:
    """One path for each DICOM series: its largest file, which is level 0 or a part of it."""
    series: dict[str, list[Instance]] = defaultdict(list)
    for path in paths:
        try:
            instance = read_instance(path)
        except (DicomError, OSError) as error:
            problems.append((path, f"not a DICOM slide: {error}"))
            continue
        if not instance.is_slide_image:
            problems.append((path, "not a DICOM slide: its class is not VL Whole Slide Microscopy"))
            continue
        series[f"{path.parent}/{instance.series}"].append(instance)
    chosen = []
    for instances in series.values():
        volumes = [instance.path for instance in instances if instance.is_volume]
        if volumes:
            chosen.append(max(volumes, key=lambda path: (path.stat().st_size, path.name)))
        else:
            problems.append((instances[0].path, "its DICOM series has a label or overview, but no slide image"))
    return chosen


def _collisions(by_id: dict[str, list[Path]], root: Path) -> Iterator[tuple[Path, str]]:
    for slide_id, hits in by_id.items():
        for path in hits if len(hits) > 1 else ():
            others = ", ".join(_text(other.relative_to(root)) for other in hits if other != path)
            yield path, f"its id {slide_id!r} is also the id of {others}; rename or move one of them"


def _text(path: PurePath) -> str:
    """A path that can be written anywhere, in one line."""
    text = os.fspath(path).encode("utf-8", "backslashreplace").decode()
    return "".join(c if unicodedata.category(c) != "Cc" else repr(c)[1:-1] for c in text)
