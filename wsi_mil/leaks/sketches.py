"""Slides and bags -> sketches, by which the same content is found again: the bits of a picture, a bag's signature.

A thumbnail of at most 512 pixels takes some tenths of a second where the file is a pyramid (a single level is read
whole: a minute for a large slide), a bag as long as training needs to read it once. Memory: one bag as float32, and
about 50 MB for each worker. Both are kept, so a second look costs neither.
"""

import base64
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tiling.errors import UserError
from tiling.grid import TissueSpec
from tiling.slide import Slide
from tiling.tissue import find_tissue
from wsi_mil.bag_header import BagHeader
from wsi_mil.errors import SlideError
from wsi_mil.leaks.leakage import Sketch, Sketches
from wsi_mil.leaks.likeness import LEAST_PX, bag_signature, picture_bits
from wsi_mil.progress import progress
from wsi_mil.table.records import SlideRecord

if TYPE_CHECKING:
    from wsi_mil.store import BagStore

_FINEST_MPP = 4.0
_LONGEST_PX = 512
_SAVE_EVERY = 100


def sketch_slides(
    records: Iterable[SlideRecord],
    headers: Mapping[str, BagHeader],
    store: "BagStore",
    *,
    known: Sketches,
    save: Callable[[Sketches], None],
    workers: int,
) -> tuple[dict[str, Sketch], dict[str, str]]:
    """Sketch the slides that have a bag, and say of each that could not be compared in full why: slide id -> reason.

    known: sketches of a former look; those of the same slides and bags are used again.  save: called now and then with
    what there is.  A slide that cannot be read is no error.
    """
    sketches = {slide_id: _still_valid(known.get(slide_id), header) for slide_id, header in sorted(headers.items())}
    paths = {r.slide_id: r.path for r in records if r.path is not None and r.slide_id in headers}
    pictures = [slide_id for slide_id in sketches if slide_id in paths and not sketches[slide_id].picture]
    bags = [slide_id for slide_id, sketch in sketches.items() if not sketch.signature]
    problems: dict[str, str] = {}
    pool = ThreadPoolExecutor(workers)
    try:
        found = pool.map(lambda slide_id: _picture(paths[slide_id], headers[slide_id]), pictures)
        for slide_id, (picture, problem) in _watched("comparing pictures", pictures, found, lambda: save(sketches)):
            sketches[slide_id] = replace(sketches[slide_id], picture=picture)
            if problem:
                problems[slide_id] = problem
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C must not wait for a thousand slides
    signed = (_signature(store, slide_id) for slide_id in bags)
    for slide_id, (signature, problem) in _watched("comparing bags", bags, signed, lambda: save(sketches)):
        sketches[slide_id] = replace(sketches[slide_id], signature=signature)
        if problem:
            problems[slide_id] = problem
    return sketches, dict(sorted(problems.items()))


def _still_valid(sketch: Sketch | None, header: BagHeader) -> Sketch:
    """What of a sketch is of this slide and this bag; nothing where no fingerprint tells the slide."""
    bag = _bag_key(header)
    if sketch is None or not sketch.fingerprint or sketch.fingerprint != header.slide_fingerprint:
        return Sketch(fingerprint=header.slide_fingerprint, bag=bag)
    return sketch if sketch.bag == bag else replace(sketch, bag=bag, signature="")


def _bag_key(header: BagHeader) -> str:
    rows = (header.slide_fingerprint, header.params_digest, header.weights_sha256, header.precision, header.n)
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]


def _watched(
    title: str, names: Collection[str], results: Iterable[tuple[str, str]], save: Callable[[], None]
) -> Iterator[tuple[str, tuple[str, str]]]:
    """Each name with its result, under a progress bar; `save` is called now and then."""
    if not names:
        return
    with progress(title, len(names)) as bar:
        for count, (name, result) in enumerate(zip(names, results, strict=True), start=1):
            yield name, result
            bar.advance()
            if count % _SAVE_EVERY == 0:
                save()


def _picture(path: Path, header: BagHeader) -> tuple[str, str]:
    """The bits of a slide's picture as hex, or why there are none."""
    try:
        bits = read_picture(path, fingerprint=header.slide_fingerprint, mpp=header.mpp)
    except UserError as error:
        return "", str(error)
    except Exception as error:  # whatever a file does to its reader, a study does not end by its thumbnail
        return "", f"{path.name}: {type(error).__name__}: {error}"
    return np.packbits(np.concatenate([[False], bits])).tobytes().hex(), ""


def read_picture(path: Path, *, fingerprint: str, mpp: tuple[float, float]) -> NDArray[np.bool_]:
    """(255,) the bits of a slide's picture. Raises SlideError where it cannot be read or shows too little tissue.

    fingerprint: of the slide that is expected, "" where it is not known.  mpp: microns per level-0 pixel.
    """
    with Slide(path, cohort_mpp=mpp) as slide:
        if fingerprint and slide.info.fingerprint != fingerprint:
            raise SlideError(f"{path.name}: is not the file that was encoded, so its picture was not compared")
        longest_um = max(size * own for size, own in zip(slide.size_l0, slide.mpp, strict=True))
        coarse = max(_FINEST_MPP, longest_um / _LONGEST_PX)
        thumbnail = slide.thumbnail(mpp=coarse)
    bits = picture_bits(thumbnail, find_tissue(thumbnail, TissueSpec(), mpp=coarse))
    if bits is None:
        raise SlideError(
            f"{path.name}: its thumbnail shows less than {LEAST_PX} x {LEAST_PX} pixels of tissue, or nothing in it"
        )
    return bits


def _signature(store: "BagStore", slide_id: str) -> tuple[str, str]:
    """The signature of a bag in base64, or why there is none."""
    try:
        features: Any = store.bag(slide_id).features.numpy()
    except (UserError, OSError) as error:
        return "", str(error)
    return base64.b64encode(bag_signature(features).astype("<f4").tobytes()).decode(), ""


def bits_of(sketch: Sketch) -> NDArray[np.bool_]:
    """(255,) the picture's bits."""
    return np.unpackbits(np.frombuffer(bytes.fromhex(sketch.picture), np.uint8)).astype(bool)[1:]


def signature_of(sketch: Sketch) -> NDArray[np.float32]:
    """(129,) the bag's signature."""
    return np.frombuffer(base64.b64decode(sketch.signature), "<f4").astype(np.float32)
