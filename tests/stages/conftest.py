"""Bags whose tiles show a number, and tables of labels that depend on it: what a study should find is known."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from wsi_mil.store import BagHeader, write_bag

FACTS = {
    "mpp": (0.5, 0.5), "mpp_source": "metadata", "mpp_effective": (0.5, 0.5), "level0_size": (9000, 9000),
    "bounds_l0": (0, 0, 9000, 9000), "tile_px": 224, "tile_um": 112.0, "tile_size_l0": (224, 224),
    "stride_l0": (224, 224), "origin_l0": (0, 0), "encoder": "synthetic", "weights_sha256": "00",
    "transform_digest": "00", "precision": "fp32", "params_digest": "00", "icc_profile": False, "n": 0, "dim": 0,
}  # fmt: skip


def _write_planted(folder: Path, *, patients: int = 72, seed: int = 0) -> tuple[Path, Path, pd.DataFrame]:
    """Table, bags, and a frame that holds the planted number `z` beside every label.

    Labels: `sex` binary, `grade` in order, `subtype` of three classes, `ki67` a number, `months` with `dead`; each
    follows z with noise of its own. A sixth of the cells of ki67 and sex2 (a copy of sex) are empty.
    """
    rng = np.random.default_rng(seed)
    z = rng.normal(size=patients)
    frame = pd.DataFrame(
        {"slide": [f"s{i:03}" for i in range(patients)], "patient": [f"p{i:03}" for i in range(patients)]}
    )
    frame["site"] = [f"site{i % 4}" for i in range(patients)]
    noisy = z + rng.normal(size=patients) * 0.4
    frame["sex"] = np.where(noisy > 0, "yes", "no")
    frame["grade"] = np.digitize(noisy, [-0.6, 0.6]) + 1
    frame["subtype"] = np.array(["a", "b", "c"])[np.digitize(noisy, [-0.5, 0.5])]
    frame["ki67"] = np.round(40 + 10 * noisy, 3)
    death, lost = np.exp(-1.5 * z + rng.gumbel(size=patients) * 0.3 + 3), np.exp(rng.normal(4.0, 1.0, size=patients))
    frame["months"], frame["dead"] = np.round(np.minimum(death, lost), 4), (death <= lost).astype(int)
    frame["sex2"] = frame["sex"].where(rng.random(patients) > 1 / 6)
    frame["ki67_some"] = frame["ki67"].where(rng.random(patients) > 1 / 6)
    for name, value in zip(frame["slide"], z, strict=True):
        n = int(rng.integers(6, 14))
        features = rng.normal(size=(n, 8)).astype(np.float32) * 0.3
        features[: n // 2, 0] += 2 * value
        features[:, 1] += 1
        grid_xy = np.stack([np.arange(n) % 4, np.arange(n) // 4], axis=1)
        header = BagHeader(slide_id=name, slide_fingerprint=f"of {name}", **FACTS)
        write_bag(folder / "bags" / f"{name}.h5", header, features=features, coords_l0=grid_xy * 224, grid_xy=grid_xy)
    frame.to_csv(folder / "labels.csv", index=False)
    return folder / "labels.csv", folder / "bags", frame.assign(z=z)


@pytest.fixture(scope="session")
def write_planted() -> Callable[..., tuple[Path, Path, pd.DataFrame]]:
    """The function that writes such a study: write_planted(folder, patients=72, seed=0)."""
    return _write_planted
