"""The audit before training: planted copies are found and judged by the folds, nothing else is accused."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

from tiling.slide import read_header
from wsi_mil.demo.textures import smooth_noise
from wsi_mil.errors import CohortError, RunError
from wsi_mil.folding.folds import Fold
from wsi_mil.leaks import search as leak_search
from wsi_mil.leaks import sketches
from wsi_mil.leaks.leakage import read_leakage, read_sketches, refuse_leaks
from wsi_mil.leaks.search import audit_before, find_same_slides
from wsi_mil.store import BagHeader, BagStore, write_bag
from wsi_mil.table.records import SlideRecord

HEADER = BagHeader(
    slide_id="",
    slide_fingerprint="",
    mpp=(0.5, 0.5),
    mpp_source="metadata",
    mpp_effective=(0.5, 0.5),
    level0_size=(900, 900),
    bounds_l0=(0, 0, 900, 900),
    tile_px=224,
    tile_um=112.0,
    tile_size_l0=(224, 224),
    stride_l0=(224, 224),
    origin_l0=(0, 0),
    encoder="synthetic",
    weights_sha256="00",
    transform_digest="00",
    precision="fp32",
    params_digest="00",
    icc_profile=False,
    n=0,
    dim=0,
)
PATIENTS = tuple(f"p{i}" for i in range(6))
FOLDS = [
    Fold(repeat=0, fold=0, train=("p2", "p3"), validation=("p4", "p5"), test=("p0", "p1")),
    Fold(repeat=0, fold=1, train=("p4", "p5"), validation=("p0", "p1"), test=("p2", "p3")),
    Fold(repeat=0, fold=2, train=("p0", "p1"), validation=("p2", "p3"), test=("p4", "p5")),
]
CLASSES = {patient: {"ab"[i % 2]} for i, patient in enumerate(PATIENTS)}


def slide_rgb(seed):
    """A piece of tissue on glass, 800 x 720 pixels of half a micron."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:72, 0:80]
    field = 1 - np.hypot((x - 40) / 27, (y - 36) / 25) + 0.1 * smooth_noise((80, 72), 8, rng)
    structure = sum(0.2 * smooth_noise((80, 72), cell, rng) for cell in (20, 10, 5))
    density = np.where(field > 0, np.clip(0.7 + structure, 0.15, 2), 0).astype(np.float32)
    density = cv2.resize(density, (800, 720), interpolation=cv2.INTER_LINEAR)
    return np.round(242 * 10 ** -(density[..., None] * np.float32([0.18, 0.62, 0.30]))).astype(np.uint8)


def features_of(seed, n=40):
    return (3 + np.random.default_rng(seed).normal(size=(n, 24))).astype(np.float32)


@pytest.fixture(scope="module")
def six(tmp_path_factory, make_pyramid):
    """Six different slides."""
    folder = tmp_path_factory.mktemp("six")
    return [make_pyramid(folder / f"s{i}.tif", slide_rgb(i)) for i in range(6)]


@pytest.fixture
def study(tmp_path, make_pyramid, six):
    """A cohort that grows: add(name, patient, rgb=..., features=...), then audit()."""
    return Study(tmp_path, make_pyramid, six)


class Study:
    def __init__(self, folder, make_pyramid, six):
        self.path, self.folder, self.make_pyramid, self.six = folder / "leakage.json", folder, make_pyramid, six
        (folder / "slides").mkdir()
        self.records, self.headers = [], {}
        (folder / "bags").mkdir()
        self.store = BagStore(folder / "bags")

    def add(self, name, patient, *, rgb=None, quality=90, file=None, features=None, fingerprint=None, site=None):
        seed = len(self.records)
        path = file
        if rgb is not None:
            path = self.make_pyramid(self.folder / "slides" / f"{name}.tif", rgb, quality=quality)
        if fingerprint is None:
            fingerprint = read_header(path).fingerprint if path else f"of {name}"
        rows = features_of(seed) if features is None else features
        grid = np.stack([np.arange(len(rows)), np.zeros(len(rows), int)], axis=1)
        header = replace(HEADER, slide_id=name, slide_fingerprint=fingerprint)
        write_bag(self.store.path(name), header, features=rows, coords_l0=grid * 224, grid_xy=grid)
        self.records.append(SlideRecord(slide_id=name, patient=patient, site=site, path=path))
        self.headers[name] = self.store.header(name)
        return path

    def whole(self, *, pictures=True):
        """One slide for each patient."""
        for i, patient in enumerate(PATIENTS):
            file = Path(shutil.copy(self.six[i], self.folder / "slides")) if pictures else None
            self.add(f"s{i}", patient, file=file)
        return self

    def audit(self, folds=FOLDS, classes_of=CLASSES):
        return audit_before(
            self.path,
            records=self.records,
            headers=self.headers,
            store=self.store,
            folds=folds,
            classes_of=classes_of,
            workers=2,
        )


def told(audit):
    return {(finding.kind, finding.severity, *finding.slides) for finding in audit.findings}


def test_different_slides_are_not_accused(study):
    audit = study.whole().audit()
    assert audit.findings == ()
    assert (audit.slides, audit.patients, audit.fingerprints, audit.pictures, audit.bags) == (6, 6, 6, 6, 6)
    assert audit.not_compared == {}
    refuse_leaks(audit.findings)
    assert audit.notes() == ("Leakage audit of 6 slides (6 by fingerprint, 6 by tiles, 6 by picture): nothing found.",)


def test_the_same_file_under_two_patients_is_refused_with_the_cure(study):
    study.whole()
    copied = study.folder / "slides" / "copied.tif"
    copied.write_bytes((study.folder / "slides" / "s0.tif").read_bytes())
    study.add("twin", "p2", file=copied)
    audit = study.audit()
    assert told(audit) == {("same slide", "leak", "s0", "twin")}
    sides = {side.fold: side.parts for side in audit.findings[0].sides}
    assert sides == {0: ("test", "train"), 1: ("validation", "test"), 2: ("train", "validation")}
    with pytest.raises(CohortError, match=r"s0 \(patient p0\) and twin \(patient p2\).*(?s:.*)fixes\.csv") as refused:
        refuse_leaks(audit.findings)
    assert "2 of 3 folds test one" in str(refused.value)
    assert find_same_slides(study.records, study.headers, FOLDS) == list(audit.findings)


def test_what_no_fold_tests_against_the_other_is_suspicious_and_goes_on(study):
    study.whole(pictures=False)
    study.add("beside", "p1", fingerprint="of s0")  # p0 and p1 are always in the same part
    audit = study.audit()
    assert told(audit) == {("same slide", "suspicious", "beside", "s0")}
    assert audit.findings[0].sides == ()
    refuse_leaks(audit.findings)


def test_training_against_validation_alone_is_suspicious(study):
    study.whole(pictures=False)
    study.add("twin", "p4", fingerprint="of s2")
    held_out = [Fold(repeat=0, fold=0, train=("p0", "p1", "p2", "p3"), validation=("p4", "p5"), test=())]
    assert told(study.audit(held_out)) == {("same slide", "suspicious", "s2", "twin")}


def test_a_slide_twice_in_one_patient_is_noted(study):
    study.whole(pictures=False)
    study.add("again", "p0", fingerprint="of s0", features=features_of(0))
    audit = study.audit()
    assert told(audit) == {("same slide", "note", "again", "s0")}
    refuse_leaks(audit.findings)


def test_slides_without_a_fingerprint_are_not_the_same(study):
    for i, patient in enumerate(PATIENTS):
        study.add(f"s{i}", patient, fingerprint="")
    audit = study.audit()
    assert (audit.findings, audit.fingerprints, audit.bags) == ((), 0, 6)


@pytest.mark.parametrize(
    "copy",
    [lambda rgb: rgb, lambda rgb: np.rot90(rgb), lambda rgb: rgb[:, ::-1]],
    ids=["saved again", "turned", "mirrored"],
)
def test_a_copy_with_other_bytes_is_suspicious_and_goes_on(study, copy):
    study.whole()
    study.add("copy", "p2", rgb=np.ascontiguousarray(copy(slide_rgb(0))), quality=70)
    audit = study.audit()
    assert told(audit) == {("same picture", "suspicious", "copy", "s0")}
    assert audit.findings[0].value < 40
    refuse_leaks(audit.findings)
    assert "copy (patient p2) and s0 (patient p0) look alike" in audit.notes()[1]


def test_the_same_tiles_in_another_order_are_a_leak(study):
    study.whole(pictures=False)
    rows = features_of(0)[np.random.default_rng(1).permutation(40)].astype(np.float16)
    study.add("shuffled", "p3", features=rows)
    audit = study.audit()
    assert told(audit) == {("same tiles", "leak", "s0", "shuffled")}
    assert audit.findings[0].value == 1
    with pytest.raises(CohortError, match="share 100% of the 40 tiles"):
        refuse_leaks(audit.findings)


def test_some_tiles_in_common_or_too_few_to_tell_are_suspicious(study):
    study.whole(pictures=False)
    study.add("mixed", "p3", features=np.concatenate([features_of(0)[:20], features_of(77)[:20]]))
    study.add("few", "p4", features=features_of(50, n=8))
    study.add("few_too", "p2", features=features_of(50, n=8)[::-1].copy())
    audit = study.audit()
    assert told(audit) == {
        ("same tiles", "suspicious", "mixed", "s0"),
        ("same tiles", "suspicious", "few", "few_too"),
    }
    assert {finding.slides[0]: finding.value for finding in audit.findings} == {"mixed": 0.5, "few": 1}


def test_a_pair_is_told_once_by_its_strongest_proof(study):
    study.whole()
    twin = study.folder / "slides" / "twin.tif"
    twin.write_bytes((study.folder / "slides" / "s0.tif").read_bytes())
    study.add("twin", "p2", file=twin, features=features_of(0))
    study.add("saved", "p4", rgb=slide_rgb(1), quality=70, features=features_of(1))
    assert told(study.audit()) == {("same slide", "leak", "s0", "twin"), ("same tiles", "leak", "s1", "saved")}


def test_slides_that_cannot_be_read_are_recorded_and_the_others_compared(study):
    study.whole()
    paths = {record.slide_id: record.path for record in study.records}
    paths["s1"].write_bytes(b"no slide")
    paths["s2"].unlink()
    study.make_pyramid(paths["s3"], slide_rgb(33))
    blank = np.full((720, 800, 3), 242, np.uint8)
    study.add("blank", "p5", rgb=blank)
    audit = study.audit()
    assert set(audit.not_compared) == {"s1", "s2", "s3", "blank"}
    assert "not the file that was encoded" in audit.not_compared["s3"]
    assert "tissue" in audit.not_compared["blank"]
    assert (audit.pictures, audit.bags) == (3, 7)
    assert audit.findings == ()
    study.add("copy", "p2", rgb=slide_rgb(0), quality=70)
    assert told(study.audit()) == {("same picture", "suspicious", "copy", "s0")}


def test_a_bag_that_cannot_be_read_is_recorded(study):
    study.whole(pictures=False)
    study.store.path("s3").write_bytes(b"nothing")
    audit = study.audit()
    assert set(audit.not_compared) == {"s3"}
    assert audit.bags == 5


def test_whatever_a_file_does_to_its_reader_is_recorded(study, monkeypatch):
    study.whole()
    slide = sketches.Slide

    def broken(path, **more):
        if path.stem == "s4":
            raise ZeroDivisionError("of a reader")
        return slide(path, **more)

    monkeypatch.setattr(sketches, "Slide", broken)
    audit = study.audit()
    assert audit.not_compared == {"s4": "s4.tif: ZeroDivisionError: of a reader"}
    assert any("1 slides could not be compared in full: s4" in note for note in audit.notes())


def _refuse(*args, **kwargs):
    raise SystemExit("read again")  # no Exception, so nobody records it and goes on


def test_the_same_audit_reads_nothing_twice_and_writes_the_same_bytes(study, monkeypatch):
    study.whole()
    study.add("copy", "p2", rgb=slide_rgb(0), quality=70)
    first, written = study.audit(), study.path.read_bytes()
    monkeypatch.setattr(sketches, "Slide", _refuse)
    monkeypatch.setattr(study.store, "bag", _refuse, raising=False)
    assert repr(study.audit()) == repr(first)
    assert study.path.read_bytes() == written


def test_a_slide_or_bag_that_changed_is_read_again(study, monkeypatch):
    study.whole()
    study.audit()
    read = []
    picture, signature = sketches._picture, sketches._signature
    monkeypatch.setattr(sketches, "_picture", lambda path, header: read.append(path.stem) or picture(path, header))
    monkeypatch.setattr(
        sketches, "_signature", lambda store, name: read.append(f"bag {name}") or signature(store, name)
    )
    study.headers["s1"] = replace(study.headers["s1"], params_digest="other")
    study.headers["s2"] = replace(study.headers["s2"], slide_fingerprint="other")
    study.audit()
    assert sorted(read) == ["bag s1", "bag s2", "s2"]


def test_an_interrupted_audit_goes_on_where_it_stopped(study, monkeypatch):
    study.whole()
    monkeypatch.setattr(sketches, "_SAVE_EVERY", 1)
    signature = sketches._signature

    def stop(store, name):
        if name == "s3":
            raise KeyboardInterrupt
        return signature(store, name)

    monkeypatch.setattr(sketches, "_signature", stop)
    with pytest.raises(KeyboardInterrupt):
        study.audit()
    with pytest.raises(RunError, match="not finished"):
        read_leakage(study.path)
    kept = read_sketches(study.path)
    assert [name for name, sketch in kept.items() if sketch.picture] == [f"s{i}" for i in range(6)]
    assert [name for name, sketch in kept.items() if sketch.signature] == ["s0", "s1", "s2"]
    monkeypatch.setattr(sketches, "_signature", signature)
    monkeypatch.setattr(sketches, "Slide", _refuse)
    assert study.audit().bags == 6


def test_what_is_written_is_read(study):
    study.whole()
    study.add("copy", "p2", rgb=slide_rgb(0), quality=70)
    study.add("again", "p0", fingerprint=study.headers["s0"].slide_fingerprint)
    audit = study.audit()
    assert len(audit.findings) == 2
    assert math.isnan(audit.association.cramers_v)  # nobody has a site
    assert repr(read_leakage(study.path)) == repr(audit)
    data = json.loads(study.path.read_text())
    assert (data["kind"], data["schema_version"], data["association"]["cramers_v"]) == ("leakage_audit", 1, None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data | {"schema_version": 9}, "version 1"),
        (lambda data: data | {"kind": "other"}, "no leakage audit"),
        (lambda data: {name: value for name, value in data.items() if name != "findings"}, "damaged"),
        (lambda data: data | {"slides": "many"}, "damaged"),
    ],
)
def test_a_file_that_is_no_audit_is_refused_and_made_anew(study, change, said):
    study.whole(pictures=False)
    audit = study.audit()
    study.path.write_text(json.dumps(change(json.loads(study.path.read_text()))))
    with pytest.raises(RunError, match=said):
        read_leakage(study.path)
    assert repr(study.audit()) == repr(audit)
    study.path.write_text("no json")
    assert repr(study.audit()) == repr(audit)
    assert repr(read_leakage(study.path)) == repr(audit)


def test_a_patient_in_two_parts_is_a_leak(study):
    study.whole(pictures=False)
    folds = [replace(FOLDS[0], train=("p0", "p2", "p3")), *FOLDS[1:]]
    audit = study.audit(folds)
    assert [(f.kind, f.severity, f.patients) for f in audit.findings] == [("same patient", "leak", ("p0",))]
    assert [(side.fold, side.parts) for side in audit.findings[0].sides] == [(0, ("train", "test"))]
    with pytest.raises(CohortError, match="patient p0 is in two parts"):
        refuse_leaks(audit.findings)


def test_a_cohort_full_of_copies_is_told_in_bounds_and_those_of_two_patients_first(study, monkeypatch):
    monkeypatch.setattr(leak_search, "_MOST", 3)
    for i in range(6):
        study.add(f"s{i}", PATIENTS[0 if i < 5 else 2], features=features_of(0))
    audit = study.audit()
    assert len(audit.findings) == 3
    assert {finding.slides[1] for finding in audit.findings} == {"s5"}
    assert audit.left_out == 12
    assert any("12 more" in note for note in audit.notes())


def test_labels_and_sites_that_stand_on_one_side_are_told(study):
    for i, patient in enumerate(PATIENTS):
        study.add(f"s{i}", patient, site="east" if patient in ("p0", "p2", "p4") else "west")
    audit = study.audit()
    assert audit.confined == ()
    assert audit.association.cramers_v == 1
    assert any("a model may learn the site" in note for note in audit.notes())
    rare = CLASSES | {"p0": {"rare"}}
    notes = study.audit(classes_of=rare).notes()
    assert any("Label rare cannot be tested in 2 folds" in note for note in notes)
    assert any("Label rare cannot be learnt from in 2 folds" in note for note in notes)


def test_without_slides_the_notes_say_how_to_compare_pictures(study):
    notes = study.whole(pictures=False).audit().notes()
    assert any("--slides" in note for note in notes)
