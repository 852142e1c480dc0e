"""From what a table row says to the slide it means. Nothing is guessed: a hit is applied, a likeness is only proposed.

Names are compared by their parts from the right, without the known suffix: the row `b/c.svs` means the slide `a/b/c`,
and the row `/old/share/a/b/c.svs` as well; `x/c.svs` means neither. A file name alone, `c.svs` or `c`, means the slide
of that name in any folder, and two of them are for the user to decide. A DICOM series that is alone in its folder is
also meant by the folder's name.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath, PureWindowsPath

from tiling.discovery import SlideSource, slide_id_of

_NUMBER = re.compile(r"[+-]?\d+([.,]\d+)?([eE][+-]?\d+)?")
_DICOM = ".dcm"
_SIGNIFICANT = ".14e"  # Excel keeps 15 digits of a number

Parts = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Match:
    """What one text means. One hit: found. Several: ambiguous. None: missing, and `proposals` look alike."""

    hits: tuple[str, ...]
    exact: str | None = None
    """The hit whose whole relative path or id the text is, when there are others that only share its name."""
    proposals: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SlideIndex:
    """The slides of a study, by every tail of their path."""

    ids: frozenset[str]
    by_path: Mapping[str, str]
    by_parts: Mapping[Parts, tuple[str, ...]]
    by_tail: Mapping[Parts, tuple[str, ...]]
    by_likeness: Mapping[str, tuple[str, ...]] = field(repr=False)

    def find(self, text: str) -> Match:
        """The slides that `text` (a path, a relative path, a file name or an id, suffix or not) can mean."""
        for spelling in dict.fromkeys((text, text.strip())):
            hits, exact = self._hits(spelling)
            if hits:
                return Match(hits=tuple(sorted(hits)), exact=exact)
        alike = self.by_likeness.get(_likeness(_parts(text.strip())[-1]), ()) if text.strip() else ()
        return Match(hits=(), proposals=tuple(sorted(alike)))

    def _hits(self, text: str) -> tuple[set[str], str | None]:
        if text in self.by_path:
            return {self.by_path[text]}, self.by_path[text]
        if not text or not PurePath(text).name:
            return set(), None
        for parts in dict.fromkeys((_parts(text), _parts(PureWindowsPath(text).as_posix()))):
            whole = "__".join(parts)
            exact = text if text in self.ids else whole if whole in self.ids else None
            hits = set(self.by_tail.get(parts, ())) | ({exact} if exact else set())
            if not hits:
                tails = (self.by_parts.get(parts[i:], ()) for i in range(1, len(parts)))
                hits = set(next((found for found in tails if found), ()))
            if hits:
                return hits, exact
        return set(), None


def index_sources(sources: Iterable[SlideSource], root: PurePath) -> SlideIndex:
    """Index of slides that lie as files below `root`."""
    sources = tuple(sources)
    parts = {s.slide_id: _parts(s.path.relative_to(root).as_posix()) for s in sources if s.path.is_relative_to(root)}
    parts |= {s.slide_id: (s.slide_id,) for s in sources if s.slide_id not in parts}
    series = Counter(s.path.parent for s in sources if s.path.suffix.lower() == _DICOM)
    alone = [s.slide_id for s in sources if s.path.suffix.lower() == _DICOM and series[s.path.parent] == 1]
    folders = {slide_id: parts[slide_id][:-1] for slide_id in alone if len(parts[slide_id]) > 1}
    return _index(parts, folders, by_path={str(s.path): s.slide_id for s in sources})


def index_ids(ids: Iterable[str]) -> SlideIndex:
    """Index of slides of which only the ids are known; a double underscore is taken for a folder."""
    return _index({slide_id: tuple(slide_id.split("__")) for slide_id in ids}, {}, by_path={})


def _index(parts_of: Mapping[str, Parts], also: Mapping[str, Parts], *, by_path: Mapping[str, str]) -> SlideIndex:
    """Index of slides by their parts, and by those in `also` for some of them."""
    by_parts: dict[Parts, tuple[str, ...]] = {}
    by_tail: dict[Parts, tuple[str, ...]] = {}
    by_likeness: dict[str, tuple[str, ...]] = {}
    for slide_id, parts in [*sorted(parts_of.items()), *sorted(also.items())]:
        by_parts[parts] = (*by_parts.get(parts, ()), slide_id)
        for i in range(len(parts)):
            by_tail[parts[i:]] = (*by_tail.get(parts[i:], ()), slide_id)
        key = _likeness(parts[-1])
        by_likeness[key] = (*by_likeness.get(key, ()), slide_id)
    return SlideIndex(
        ids=frozenset(parts_of), by_path=by_path, by_parts=by_parts, by_tail=by_tail, by_likeness=by_likeness
    )


def _parts(text: str) -> Parts:
    """Folders and name of a path, the name without the known suffix, whatever its case."""
    path = PurePath(text)
    return (*path.parts[:-1], slide_id_of(PurePath(path.name))) if path.name else ("",)


def _likeness(name: str) -> str:
    """Equal for names that a spreadsheet or a careless hand turns into each other: 0012, 12 and 12.0; A7 and a7."""
    if _NUMBER.fullmatch(name):
        return format(float(name.replace(",", ".")), _SIGNIFICANT)
    return re.sub(r"[\s_.-]+", "", name).casefold()
