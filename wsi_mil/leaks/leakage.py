"""The leakage audit of a run: what was found of the same content on two sides of a fold, before anything was trained.

Three looks at every pair of slides: the same file (fingerprint), the same picture (thumbnails, where slides are at
hand), the same tiles (features); what they find and what they cannot is measured in wsi_mil.leaks.likeness. Beside
them the folds themselves: patients in two parts, labels and sites that stand on one side only.

A `leak` is certain and reaches a test part: the same patient, file or tiles on two sides. It is refused. What is
`suspicious` needs a look: pictures that are alike, some tiles in common, the same content under two patients that no
fold tests against each other. A `note` concerns one patient, whose slide counts twice; sections that were cut one after
the other look alike and are notes where they belong to one patient.

leakage.json: kind, schema_version, finished, slides, patients, fingerprints, pictures, bags, left_out, findings,
not_compared, confined and association as in LeakageAudit (what is not defined is null), and sketches (slide -> Sketch),
so that the same command need not read the slides again.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tiling.atomic import write_text
from wsi_mil.errors import CohortError, RunError
from wsi_mil.folding.confinement import Association, Confined
from wsi_mil.results.reading import GIVE_AGAIN, read_json

KIND, SCHEMA_VERSION = "leakage_audit", 1
Kind = Literal["same patient", "same slide", "same tiles", "same picture"]
Severity = Literal["leak", "suspicious", "note"]
SEVERITIES: tuple[Severity, ...] = ("leak", "suspicious", "note")

_COUNTED: dict[Severity, str] = {"leak": "certain", "suspicious": "suspicious", "note": "within one patient"}
_SHOWN = 5
_STRONG_ASSOCIATION = 0.5


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """What is kept of one slide, to find it again under another name without reading it again."""

    fingerprint: str
    picture: str = ""
    """255 bits as hex; empty where the slide was not at hand or shows too little."""
    bag: str = ""
    """Digest of what the bag's rows depend on."""
    signature: str = ""
    """129 float32, little-endian, in base64; empty where the rows could not be read."""


Sketches = Mapping[str, Sketch]
"""Slide id -> what is kept of it."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """A fold that has the two on two sides."""

    repeat: int
    fold: int
    parts: tuple[str, str]
    """Of the first and the second; of one patient, the parts it is in."""


@dataclass(frozen=True, kw_only=True)
class LeakageFinding:
    """Two slides with the same content, or a patient in two parts."""

    kind: Kind
    severity: Severity
    slides: tuple[str, ...]
    patients: tuple[str, ...]
    """Of each slide."""
    sides: tuple[Side, ...]
    value: float | None
    """same picture: bits apart, of 255; same tiles: share of tiles, from 0 to 1; else None."""
    reason: str
    """A sentence; it names slides and patients as the table does."""


@dataclass(frozen=True, kw_only=True)
class LeakageAudit:
    """What was compared, and what was found: leaks first."""

    findings: tuple[LeakageFinding, ...]
    slides: int
    patients: int
    fingerprints: int
    """Slides whose fingerprint is known."""
    pictures: int
    """Slides whose picture was compared."""
    bags: int
    """Slides whose tiles were compared."""
    left_out: int
    """Pairs alike in picture, or perhaps in tiles, beyond the first 500 of each."""
    not_compared: Mapping[str, str]
    """Slide -> why its picture or bag could not be read."""
    confined: tuple[Confined, ...]
    association: Association

    def of(self, severity: Severity) -> tuple[LeakageFinding, ...]:
        """The findings of one severity."""
        return tuple(finding for finding in self.findings if finding.severity == severity)

    def notes(self) -> tuple[str, ...]:
        """What the user should know, in sentences."""
        looked = f"{self.fingerprints} by fingerprint, {self.bags} by tiles, {self.pictures} by picture"
        counts = [f"{len(self.of(severity))} {word}" for severity, word in _COUNTED.items() if self.of(severity)]
        sentences = [f"Leakage audit of {self.slides} slides ({looked}): {', '.join(counts) or 'nothing found'}."]
        for severity in SEVERITIES[:2]:
            found = self.of(severity)
            sentences += [f"  {severity}: {finding.reason}" for finding in found[:_SHOWN]]
            if len(found) > _SHOWN:
                sentences.append(f"  and {len(found) - _SHOWN} more that are {severity}.")
        if self.not_compared:
            name, reason = next(iter(self.not_compared.items()))
            sentences.append(f"  {len(self.not_compared)} slides could not be compared in full: {name} ({reason}).")
        if not self.pictures:
            sentences.append(
                "  Copies that were scanned or saved again show in pictures alone: give --slides to compare them."
            )
        if self.left_out:
            sentences.append(f"  {self.left_out} more likenesses were not followed up.")
        return (*sentences, *_confinement_notes(self.confined, self.association))


def refuse_leaks(findings: Iterable[LeakageFinding]) -> None:
    """Raise CohortError when one of them is a leak, with the cure."""
    leaks = [finding for finding in findings if finding.severity == "leak"]
    if not leaks:
        return
    shown = "\n".join(f"  {finding.reason}" for finding in leaks[:_SHOWN])
    more = f"\n  and {len(leaks) - _SHOWN} more" if len(leaks) > _SHOWN else ""
    raise CohortError(
        "The same content is on two sides of a fold, so a model would be tested on what it was trained on "
        f"({len(leaks)} found):\n{shown}{more}\nExclude one slide of each pair in fixes.csv, or, where it is one "
        "patient, give both slides one patient in the table. Then give the command again, with another --out where "
        "this run was begun."
    )


def read_leakage(path: Path) -> LeakageAudit:
    """The audit of a run. Raises RunError when it is missing, unfinished, damaged or of another version."""
    data = read_json(path)
    if (data.get("kind"), data.get("schema_version")) != (KIND, SCHEMA_VERSION):
        there = f"{data.get('kind')}, version {data.get('schema_version')}"
        raise RunError(f"{path} is no leakage audit of version {SCHEMA_VERSION}: it says {there}. {GIVE_AGAIN}")
    if not data.get("finished"):
        raise RunError(f"{path} is not finished: give the same command again to go on.")
    try:
        return _audit_from(data)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path} is damaged ({type(error).__name__}: {error}). {GIVE_AGAIN}") from error


def write_leakage(path: Path, audit: LeakageAudit | None, sketches: Sketches) -> None:
    """Store an audit, or with None what an unfinished one has read so far. The same audit gives the same bytes."""
    data: dict[str, Any] = {"kind": KIND, "schema_version": SCHEMA_VERSION, "finished": audit is not None}
    data |= _plain(asdict(audit)) if audit is not None else {}
    data["sketches"] = {slide_id: asdict(sketches[slide_id]) for slide_id in sorted(sketches)}
    write_text(path, json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_sketches(path: Path) -> dict[str, Sketch]:
    """What an earlier audit kept; nothing where there is none that can be used."""
    if not path.is_file():
        return {}
    try:
        data = read_json(path)
        if (data["kind"], data["schema_version"]) != (KIND, SCHEMA_VERSION):
            return {}
        return {slide_id: Sketch(**kept) for slide_id, kept in data["sketches"].items()}
    except (RunError, KeyError, TypeError, AttributeError):
        return {}


def _audit_from(data: Mapping[str, Any]) -> LeakageAudit:
    found = [
        LeakageFinding(
            **finding
            | {name: tuple(finding[name]) for name in ("slides", "patients")}
            | {"sides": tuple(Side(**side | {"parts": tuple(side["parts"])}) for side in finding["sides"])}
        )
        for finding in data["findings"]
    ]
    association: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else math.nan if value is None else value
        for name, value in data["association"].items()
    }
    counts = ("slides", "patients", "fingerprints", "pictures", "bags", "left_out")
    return LeakageAudit(
        findings=tuple(found),
        not_compared=dict(data["not_compared"]),
        confined=tuple(Confined(**one | {"parts": tuple(one["parts"])}) for one in data["confined"]),
        association=Association(**association),
        **{name: int(data[name]) for name in counts},
    )


def _plain(value: Any) -> Any:
    """The same in what JSON knows; what is not defined is null."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _confinement_notes(confined: Iterable[Confined], association: Association) -> list[str]:
    """A sentence for labels that a fold does not learn or test, and one where the site tells the label."""
    sentences: list[str] = []
    for word, of_part in (("learnt from", "train"), ("tested", "test")):
        odd = Counter(one.name for one in confined if one.kind == "label" and of_part not in one.parts)
        sentences += [
            f"  Label {name} cannot be {word} in {folds} fold{'' if folds == 1 else 's'}."
            for name, folds in odd.most_common(_SHOWN)
        ]
    if association.corrected_v >= _STRONG_ASSOCIATION:
        sentences.append(
            f"  Site and label go together (Cramer's V {association.corrected_v:.2f} over {association.n} patients): "
            "a model may learn the site. Folds by site (folds.by_site) show whether it did."
        )
    return sentences
