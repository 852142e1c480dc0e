"""Stable stand-ins for patient and slide ids, so that a report can leave the hospital."""

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tiling.atomic import write_text

WITHHELD = "(withheld)"
_SHORTEST_ANYWHERE = 4
"""Shorter ids are replaced where they stand alone: inside a word they are mere letters."""
_SHORTEST_TOLD_APART = 3
"""Of still shorter ids nobody can tell whether `7` is the patient or a count: such a sentence is withheld."""
_PATH_KEYS = frozenset({"table", "slides", "bags", "file", "fixes", "out", "path", "weights", "mask", "annotation"})
_PATH = re.compile(r"[/\\]\S")


class Names:
    """How ids are shown. Without a salt they stand as they are."""

    def __init__(self, patients: Collection[str], slides: Collection[str], *, salt: str | None = None) -> None:
        self.hidden = salt is not None
        self._patients = _stand_ins("P", patients, salt)
        self._slides = _stand_ins("S", slides, salt)
        known = {**self._patients, **self._slides} if self.hidden else {}
        # a slide's id is its path; messages name its file, which is the last part of it
        known = {name.rpartition("__")[2]: self._slides[name] for name in slides if self.hidden} | known
        known.pop("", None)
        self._known = known
        longest_first = sorted(known, key=lambda n: (-len(n), n))
        self._pattern = re.compile("|".join(map(_alone_if_short, longest_first))) if longest_first else None

    def patient(self, name: str) -> str:
        """The patient's id, or its stand-in."""
        return self._patients[name]

    def slide(self, name: str) -> str:
        """The slide's id, or its stand-in."""
        return self._slides[name]

    def item(self, name: str) -> str:
        """What a failure is about: a slide or a patient by its stand-in, anything else as `text`."""
        return self._slides.get(name) or self._patients.get(name) or self.text(name)

    def slide_or_text(self, name: str) -> str:
        """The slide's id or its stand-in; of another name, `text`."""
        return self._slides.get(name) or self.text(name)

    def text(self, sentence: str) -> str:
        """A sentence from the run with every id in it replaced.

        It is withheld as a whole when it names a path, since folders and files are often named after people, or when
        an id of one or two characters may stand in it.
        """
        if self._pattern is None:
            return sentence
        if _PATH.search(sentence) or any(len(id_) < _SHORTEST_TOLD_APART for id_ in self._pattern.findall(sentence)):
            return WITHHELD
        return self._pattern.sub(lambda match: self._known[match.group()], sentence)

    def facts(self, value: Any, *, key: str = "") -> Any:
        """A configuration as it is, or without paths and ids where these are to be hidden."""
        if isinstance(value, dict):
            return {str(name): self.facts(inner, key=str(name)) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.facts(inner, key=key) for inner in value]
        if not self.hidden or not isinstance(value, str):
            return value
        return WITHHELD if key in _PATH_KEYS else self.text(value)


def _alone_if_short(name: str) -> str:
    escaped = re.escape(name)
    return escaped if len(name) >= _SHORTEST_ANYWHERE else rf"(?<!\w){escaped}(?!\w)"


def salt_of(path: Path) -> str:
    """The secret beside the run that makes its pseudonyms stable; made at the first call. Keep it out of the report."""
    if not path.is_file():
        write_text(path, secrets.token_hex(16) + "\n")
    return path.read_text(encoding="utf-8").strip()


def _stand_ins(letter: str, names: Collection[str], salt: str | None) -> dict[str, str]:
    if salt is None:
        return {name: name for name in names}
    digests = {name: _digest(f"{letter}:{name}", salt) for name in sorted(set(names))}
    length = 6
    while len({digest[:length] for digest in digests.values()}) < len(digests):
        length += 2
    return {name: f"{letter}-{digest[:length]}" for name, digest in digests.items()}


def _digest(text: str, salt: str) -> str:
    return hmac.new(salt.encode(), text.encode(), hashlib.sha256).hexdigest()
