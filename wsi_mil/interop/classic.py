"""Classic MIL sets as one npz: features (total, d), bag_id, bag_label, train_mask (repeats, folds, bags).

They are no slides: instances stand in a row, a pixel apart, and pixel sizes mean nothing. Features are kept as they are
in the file; whoever wants them standardised inside each training part takes `wsi-mil bench mil`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from wsi_mil.bag_header import NO_SLIDE, BagHeader
from wsi_mil.interop import Imported, ImportedBag
from wsi_mil.measuring.classic_bags import ClassicBags, read_classic


def recognises(path: Path) -> bool:
    """Whether this is an npz file."""
    return path.suffix.lower() == ".npz" and path.is_file()


def read(path: Path) -> Imported:
    """Bags, labels and the stored folds. Raises StoreError for an npz of another form."""
    found = read_classic(path)
    names = [f"{found.name}_{i:04d}" for i in range(len(found.labels))]
    labels = [found.task.classes[label] for label in found.labels]
    return Imported(
        bags=lambda: _bags(found, names),
        table=pd.DataFrame({"slide": names, "patient": names, "label": labels}),
        folds=_folds(found, names),
        unknown=("pixel size, tile size and encoder: these bags are no slides",),
    )


def _bags(found: ClassicBags, names: list[str]) -> Iterator[ImportedBag]:
    for i, name in enumerate(names):
        rows = found.features[found.bag_id == i].astype(np.float32)
        places = np.stack([np.arange(len(rows)), np.zeros(len(rows), dtype=np.int64)], axis=1)
        header = BagHeader(slide_id=name, slide_fingerprint=f"{found.digest[:16]}:{i}", **_facts(found, len(rows)))
        yield ImportedBag(header=header, features=rows, coords_l0=places, grid_xy=places)


def _facts(found: ClassicBags, n: int) -> dict[str, Any]:
    """A header of bags that are no slides; `write_bag` fills in n and dim."""
    return {
        "mpp": (1.0, 1.0),
        "mpp_source": NO_SLIDE,
        "mpp_effective": (1.0, 1.0),
        "level0_size": (n, 1),
        "bounds_l0": (0, 0, n, 1),
        "tile_px": 1,
        "tile_um": 1.0,
        "tile_size_l0": (1, 1),
        "stride_l0": (1, 1),
        "origin_l0": (0, 0),
        "encoder": f"features of {found.name}",
        "weights_sha256": found.digest,
        "transform_digest": "none",
        "precision": "fp32",
        "params_digest": found.digest[:16],
        "icc_profile": False,
        "n": 0,
        "dim": 0,
    }


def _folds(found: ClassicBags, names: list[str]) -> pd.DataFrame:
    rows = [
        (repeat, fold, name, "train" if trained else "test")
        for repeat, fold in found.folds
        for name, trained in zip(names, found.train_mask[repeat, fold], strict=True)
    ]
    return pd.DataFrame(rows, columns=["repeat", "fold", "patient", "part"])
