"""How far the slides of another cohort lie from those a model was trained on: features, stain, pixel size.

A distance is the root mean square of standardised differences, over the mean features of a slide or the mean optical
density of its tissue. What is far is read off the training slides: the distance of each from all the others.
"""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from tiling.slide import Slide
from wsi_mil.bag_header import BagHeader
from wsi_mil.bags import Bag

Floats = NDArray[np.float64]

LEAST_SLIDES = 3
"""Fewer training slides do not say how far one lies from the others."""
FAR = 0.95
"""A slide farther from the training slides than this share of them are from each other is called far."""
_CHANCE = 0.01
"""A cohort is called shifted where chance would make so many slides far less often than this."""
_MPP_TOLERANCE = 0.05
_STAIN_MPP = 8.0
_GLASS_OD = 0.05
"""Mean optical density below which a pixel under a tile is glass."""
_SMALLEST_SPREAD = 0.01
"""Features that hardly vary among the training slides count as varying this much of what the usual one does."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Reference:
    """Where the training slides lie in one kind of measure, and how far each lies from all the others."""

    mean: Floats
    std: Floats
    """(d,) over slides, not over tiles."""
    quantiles: Floats
    """(101,) of the training slides' own distances, in steps of one per cent."""

    @classmethod
    def of(cls, rows: Floats) -> Self | None:
        """rows: (slides, d). None for fewer than three slides.

        Each training slide is measured against the others alone, as a new one will be: against a mean and a spread
        that it is part of, every slide of a small cohort would seem near.
        """
        n = len(rows)
        if n < LEAST_SLIDES:
            return None
        mean, variance = rows.mean(axis=0), rows.var(axis=0, ddof=1)
        others = (n * mean - rows) / (n - 1)
        spread = ((n - 1) * variance - (rows - mean) ** 2 * n / (n - 1)) / (n - 2)
        std = np.sqrt(variance)
        least = _SMALLEST_SPREAD * (float(np.median(std[std > 0])) if (std > 0).any() else 1.0)
        std = np.maximum(std, least)
        own = _distances(rows, others, np.sqrt(np.maximum(spread, least**2)))
        return cls(mean=mean, std=std, quantiles=np.quantile(own, np.linspace(0, 1, 101)))

    @property
    def limit(self) -> float:
        """The distance beyond which a slide is far."""
        return float(self.quantiles[round(100 * FAR)])

    def distance(self, row: Floats) -> float:
        """row: (d,) of one slide."""
        return float(_distances(row[None], self.mean, self.std)[0])

    def share_nearer(self, distance: float) -> float:
        """Share of the training slides that lie nearer to the others than this."""
        return float(np.interp(distance, self.quantiles, np.linspace(0, 1, 101)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Training:
    """What a bundle keeps of the slides it was trained on: nothing of a single one."""

    features: Reference | None
    stain: Reference | None
    """None where the slides could not be read."""
    mpp: tuple[float, float, float]
    """Least, median and largest microns per pixel."""

    @classmethod
    def of(cls, slides: Sequence["Measured"]) -> Self:
        """slides: at least one."""
        stains = [slide.stain for slide in slides if slide.stain is not None]
        sizes = [slide.mpp for slide in slides]
        return cls(
            features=Reference.of(np.stack([slide.features for slide in slides])),
            stain=Reference.of(np.stack(stains)) if stains else None,
            mpp=(min(sizes), float(np.median(sizes)), max(sizes)),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """One slide, seen from far."""

    slide_id: str
    features: Floats
    """(d,) mean over its tiles."""
    mpp: float
    """Microns per level-0 pixel, the mean of both axes."""
    stain: Floats | None
    """(3,) mean optical density of the tissue in red, green and blue."""


def measure(bag: Bag, header: BagHeader, slide: Path | None) -> Measured:
    """One slide from its bag, and from its file for the stain. Raises SlideError where that cannot be read."""
    return Measured(
        slide_id=header.slide_id,
        features=bag.features.double().mean(dim=0).numpy(),
        mpp=sum(header.mpp) / 2,
        stain=None if slide is None else _stain(bag, header, slide),
    )


def optical_density(rgb: NDArray[np.uint8], under_tiles: NDArray[np.bool_]) -> Floats | None:
    """Mean optical density (3,) of what is no glass there. rgb: (h, w, 3); under_tiles: (h, w). None without tissue."""
    density = -np.log10((rgb[under_tiles].astype(np.float64) + 1) / 256)
    tissue = density[density.mean(axis=1) > _GLASS_OD]
    return np.asarray(tissue.mean(axis=0)) if len(tissue) else None


def compare(training: Training, slides: Sequence[Measured]) -> pd.DataFrame:
    """One row a slide: distances, the share of training slides that lie nearer, what is unusual. NaN: not measured."""
    rows = []
    for slide in slides:
        row: dict[str, object] = {"slide": slide.slide_id}
        unusual = []
        for name, reference, value in _measures(training, slide):
            distance = math.nan if reference is None or value is None else reference.distance(value)
            far = reference is not None and distance > reference.limit
            share = math.nan if reference is None else reference.share_nearer(distance)
            row |= {f"{name}_distance": distance, f"{name}_training_nearer": share}
            unusual += [name] if far else []
        low, _, high = training.mpp
        other_size = not low * (1 - _MPP_TOLERANCE) <= slide.mpp <= high * (1 + _MPP_TOLERANCE)
        unusual += ["mpp"] if other_size else []
        rows.append(row | {"mpp": slide.mpp, "unusual": " ".join(unusual)})
    return pd.DataFrame(rows)


def sentences(training: Training, found: pd.DataFrame) -> list[str]:
    """A sentence for each measure in which more slides are unusual than chance explains, or what was not measured."""
    said = []
    for name, reference in (("features", training.features), ("stain", training.stain)):
        measured = found[found[f"{name}_distance"].notna()]
        far = int(_unusual(measured, name).sum())
        if reference is None or not len(measured) or _at_least(far, len(measured)) >= _CHANCE:
            continue
        typical = float(measured[f"{name}_distance"].median())
        said.append(
            f"Domain shift in {name}: {far} of {len(measured)} slides lie farther from the training slides than "
            f"{FAR:.0%} of these lie from each other ({1 - FAR:.0%} would be expected; median distance {typical:.2f}, "
            f"there {reference.quantiles[50]:.2f}). Where it was trained, the model was not tested on such slides."
        )
    other_size = int(_unusual(found, "mpp").sum())
    if other_size:
        low, _, high = training.mpp
        said.append(
            f"Pixel size: {other_size} of {len(found)} slides lie outside the {low:g} to {high:g} microns per pixel of "
            f"the training slides."
        )
    if training.features is None:
        said.append(f"Domain shift was not measured: the model knows fewer than {LEAST_SLIDES} training slides.")
    return said


def draw(training: Training, found: pd.DataFrame) -> bytes:
    """A PNG: the slides' distances over the training slides' own, in features and, where measured, in stain."""
    panels = [("features", training.features), ("stain", training.stain)]
    panels = [(name, ref) for name, ref in panels if ref is not None and found[f"{name}_distance"].notna().any()]
    figure = Figure(figsize=(7.5, 1.4 + 1.9 * max(1, len(panels))), dpi=120, layout="constrained")
    for place, (name, reference) in enumerate(panels):
        assert reference is not None
        axes = figure.add_subplot(len(panels), 1, place + 1)
        own, new = reference.quantiles, found[f"{name}_distance"].dropna().to_numpy(dtype=np.float64)
        for low, high, shade in ((0, 100, "#e3e7ec"), (5, 95, "#c9d2dc"), (25, 75, "#a9b7c6")):
            axes.axvspan(own[low], own[high], color=shade, lw=0)
        axes.axvline(own[50], color="#5a6b7d", lw=1.5)
        order = np.argsort(new, kind="stable")
        axes.scatter(new[order], np.linspace(0.1, 0.9, len(new)), s=16, zorder=3, lw=0)
        axes.scatter([], [], s=16, color="C0", label=f"new slides ({len(new)})")
        axes.fill_between([], [], [], color="#c9d2dc", label="training slides: all, 5 to 95 %, 25 to 75 %, median")
        axes.set(title=f"{name}: distance from the training slides", ylim=(0, 1), yticks=[], xlabel="distance")
        if place == 0:
            shown = axes.get_legend_handles_labels()
            figure.legend(*shown, loc="outside upper center", ncols=2, frameon=False, fontsize=8)
    if not panels:
        figure.text(0.5, 0.5, "The model knows too few training slides to measure a domain shift.", ha="center")
    stream = io.BytesIO()
    figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()


def to_arrays(training: Training) -> dict[str, Floats]:
    """Arrays by name, to be stored; `from_arrays` gives the same back."""
    parts = {"features": training.features, "stain": training.stain}
    stored = {
        f"{name}.{field}": getattr(reference, field)
        for name, reference in parts.items()
        if reference is not None
        for field in ("mean", "std", "quantiles")
    }
    return stored | {"mpp": np.array(training.mpp)}


def from_arrays(arrays: Mapping[str, Floats]) -> Training:
    """What `to_arrays` gave. Raises KeyError where an array is missing."""

    def reference(name: str) -> Reference | None:
        if f"{name}.mean" not in arrays:
            return None
        return Reference(**{field: arrays[f"{name}.{field}"] for field in ("mean", "std", "quantiles")})

    low, median, high = arrays["mpp"].tolist()
    return Training(features=reference("features"), stain=reference("stain"), mpp=(low, median, high))


def _measures(training: Training, slide: Measured) -> tuple[tuple[str, Reference | None, Floats | None], ...]:
    return ("features", training.features, slide.features), ("stain", training.stain, slide.stain)


def _unusual(found: pd.DataFrame, name: str) -> "pd.Series[bool]":
    return found["unusual"].str.split().map(lambda words: name in words)


def _distances(rows: Floats, mean: Floats, std: Floats) -> Floats:
    return np.asarray(np.sqrt((((rows - mean) / std) ** 2).mean(axis=1)))


def _at_least(far: int, n: int) -> float:
    """Probability that chance alone makes this many of n slides far, or more."""
    log_far, log_near = math.log(1 - FAR), math.log(FAR)
    ways = [math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(n + 1)]
    return math.fsum(math.exp(ways[k] + k * log_far + (n - k) * log_near) for k in range(far, n + 1))


def _stain(bag: Bag, header: BagHeader, path: Path) -> Floats | None:
    with Slide(path, slide_id=header.slide_id, cohort_mpp=header.mpp) as slide:
        rgb = slide.thumbnail(mpp=max(_STAIN_MPP, *header.mpp))
    scale = np.array([rgb.shape[1], rgb.shape[0]]) / np.array(header.level0_size)
    under_tiles = np.zeros(rgb.shape[:2], dtype=np.bool_)
    corners = bag.coords_l0.numpy()
    ends = np.ceil((corners + np.array(header.tile_size_l0)) * scale).astype(int)
    for (left, top), (right, bottom) in zip(np.floor(corners * scale).astype(int), ends, strict=True):
        under_tiles[max(top, 0) : bottom, max(left, 0) : right] = True
    return optical_density(rgb, under_tiles)
