"""Stable stand-ins for patient and slide ids, so that a report can leave the hospital."""

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection
from pathlib import Path

from tiling.atomic import write_text

WITHHELD = "(withheld)"
_SHORTEST_IN_TEXT = 4
_PATH = re.compile(r"[/\\]\S")


class Names:
    """How ids are shown. Without a salt they stand as they are."""

    def __init__(self, patients: Collection[str], slides: Collection[str], *, salt: str | None = None) -> None:
        self.hidden = salt is not None
        self._patients = _stand_ins("P", patients, salt)
        self._slides = _stand_ins("S", slides, salt)
        known = {**self._patients, **self._slides} if self.hidden else {}
        longest_first = sorted((name for name in known if len(name) >= _SHORTEST_IN_TEXT), key=lambda n: (-len(n), n))
        self._known = known
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def patient(self, name: str) -> str:
        """The patient's id, or its stand-in."""
        return self._patients[name]

    def slide(self, name: str) -> str:
        """The slide's id, or its stand-in."""
        return self._slides[name]

    def text(self, sentence: str) -> str:
        """A sentence from the run with every id in it (of four characters or more) replaced.

        A sentence that names a path is withheld as a whole: folders and files are often named after people.
        """
        if self._pattern is None:
            return sentence
        if _PATH.search(sentence):
            return WITHHELD
        return self._pattern.sub(lambda match: self._known[match.group()], sentence)


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
