"""wsi-mil: whole-slide images and labels in, a multiple-instance-learning study that can be trusted out.

Names are loaded when they are first used, so that the viewer never loads torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wsi_mil.bags import Bag as Bag
    from wsi_mil.bags import BagBatch as BagBatch
    from wsi_mil.bags import pack as pack
    from wsi_mil.encoders import open_encoder as open_encoder
    from wsi_mil.lookup import find_model as find_model
    from wsi_mil.splits import make_folds as make_folds
    from wsi_mil.store import load_bag as load_bag

_HOMES = {
    "Bag": "bags",
    "BagBatch": "bags",
    "pack": "bags",
    "find_model": "lookup",
    "load_bag": "store",
    "open_encoder": "encoders",
    "make_folds": "splits",
}

__all__ = ["Bag", "BagBatch", "find_model", "load_bag", "make_folds", "open_encoder", "pack"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'wsi_mil' has no attribute {name!r}")
    return getattr(import_module(f"wsi_mil.{_HOMES[name]}"), name)
