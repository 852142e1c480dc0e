"""What the user wishes of the encoder, before any slide is opened."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DEFAULT_ENCODER = "tf_efficientnet_lite0"


@dataclass(frozen=True, kw_only=True)
class EncodeSpec:
    """Which encoder, with which weights, on what."""

    encoder: str = DEFAULT_ENCODER
    """Name from `wsi-mil list encoders`, `timm:<name>`, or a .py file with a declaration. The default is an ImageNet
    encoder, not a pathology one."""
    weights: Path | None = None
    """Weights file (.safetensors, or a PyTorch state dict); timm's hub or the bundled file when not given."""
    input_px: int | None = None
    """Side to which whole tiles are resized, for `timm:` encoders; what the network's own configuration says when not
    given."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the encoder runs; auto takes the GPU when there is one."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Arithmetic of the encoder. Features are stored as fp16 in any case."""
    batch_size: int | None = None
    """Tiles a batch; 16 for each core on a CPU and the largest that fits, up to 256, on a GPU when not given."""
    readers: int | None = None
    """Threads that read tiles ahead; as many as there are cores, at least 2 and at most 16, when not given."""
    accept_contract_breach: tuple[str, ...] = ()
    """Departures from the encoder's contract to go on with: `mpp`, `tile_px`. They are written into every bag."""
    max_failed_tiles: float = 0.01
    """A slide of which more than this fraction of tiles cannot be read is degraded and left out."""
