"""What an encoder is: pixels in, one feature vector a tile out, with the contract it was trained under."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from wsi_mil.errors import ConfigError

Output = Literal["pooled", "cls", "cls+mean"]
Precision = Literal["fp32", "bf16", "fp16"]
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
MPP_TOLERANCE = 0.10
"""An encoder's pixel size and the one it is given may differ by this fraction."""


@dataclass(frozen=True, kw_only=True)
class Transform:
    """What happens to a tile on the device before the network sees it. Nothing is ever cropped away."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    """Of the three colours, for values in 0 to 1."""
    input_px: int | None = None
    """Side the network sees; the whole tile is resized to it. None: the tile as it is."""
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"

    def seen_px(self, tile_px: int) -> int:
        """Side in pixels at which the network sees a tile of `tile_px`."""
        return self.input_px or tile_px

    def describe(self, tile_px: int) -> str:
        """One line for the bag and the report."""
        size = f"{tile_px} px as they are"
        if self.seen_px(tile_px) != tile_px:
            seen = self.seen_px(tile_px)
            size = f"whole tile resized from {tile_px} to {seen} px ({self.interpolation}, antialiased)"
        return f"{size}, no crop, scaled to 0..1, mean {list(self.mean)}, std {list(self.std)}"

    def apply(self, tiles: Tensor) -> Tensor:
        """tiles: (b, h, w, 3) uint8. Returns (b, 3, side, side) fp32 in channels-last memory, on the tiles' device."""
        images = tiles.permute(0, 3, 1, 2).to(torch.float32)  # NHWC bytes seen as NCHW are channels-last already
        side = self.seen_px(tiles.shape[1])
        if images.shape[2:] != (side, side):
            images = functional.interpolate(
                images, size=(side, side), mode=self.interpolation, antialias=True, align_corners=False
            ).clamp_(0, 255)
        mean = torch.tensor(self.mean, device=images.device).view(1, 3, 1, 1)
        std = torch.tensor(self.std, device=images.device).view(1, 3, 1, 1)
        return images.mul_(1 / (255 * std)).sub_(mean / std).contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """The contract of a known encoder, as its authors published it. One file each; the file's name is the name."""

    architecture: str
    """timm's name of the network."""
    hub_id: str | None
    """Repository of the weights on timm's hub; None when the weights are in this package."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """What timm must be told besides the name."""
    bundled: Path | None = None
    output: Output = "pooled"
    dim: int
    mpp: tuple[float, ...]
    """Microns per pixel it was trained at; empty when any will do."""
    tile_px: int | None
    transform: Transform
    licence: str
    gated: bool
    pathology: bool
    label: str
    source: str
    """Where the facts come from."""


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A frozen network with its contract. `module` is in evaluation mode, on its device, in channels-last memory."""

    name: str
    module: nn.Module
    transform: Transform
    dim: int
    output: Output
    mpp: tuple[float, ...]
    """Microns per pixel it was trained at; empty when any will do."""
    tile_px: int | None
    weights_sha256: str
    """Over names, types, shapes and bytes of all tensors: the same whichever file they came from."""
    licence: str
    gated: bool
    pathology: bool
    label: str

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.module.parameters()).device

    def encode_batch(self, tiles: Tensor, *, precision: Precision = "fp32") -> Tensor:
        """Features of a batch. tiles: (b, side, side, 3) uint8 on the encoder's device. Returns (b, dim) fp32."""
        with torch.inference_mode(), autocast(self.device, precision):
            return self._output(self.module(self.transform.apply(tiles))).float()

    def transform_digest(self, tile_px: int) -> str:
        """Sixteen hex digits over everything between the stored tile and the feature vector, weights aside."""
        parts = asdict(self.transform) | {"seen_px": self.transform.seen_px(tile_px), "output": self.output}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def breaches(self, *, tile_px: int, mpp: float) -> dict[str, str]:
        """Where tiles of this size depart from the contract: {"tile_px" or "mpp": sentence}. Empty when nowhere."""
        found = {}
        if self.tile_px is not None and tile_px != self.tile_px:
            found["tile_px"] = f"tiles have {tile_px} px, {self.name} was trained on tiles of {self.tile_px} px"
        seen = mpp * tile_px / self.transform.seen_px(tile_px)
        if self.mpp and all(abs(seen - trained) > MPP_TOLERANCE * trained for trained in self.mpp):
            wished = ", ".join(f"{trained:g}" for trained in self.mpp)
            found["mpp"] = f"{self.name} would see {seen:.3g} µm per pixel and was trained at {wished}"
        return found

    def probe(self, tile_px: int) -> None:
        """Run two blank tiles, before any slide is opened. Raises ConfigError when the network cannot take them."""
        blank = torch.full((2, tile_px, tile_px, 3), 255, dtype=torch.uint8, device=self.device)
        try:
            shape = tuple(self.encode_batch(blank).shape)
        except (RuntimeError, AssertionError, ValueError) as error:
            raise ConfigError(
                f"encoder {self.name}: cannot take tiles of {tile_px} px ({error}). Tile at the size it expects, or "
                "give --input-px, the side to which whole tiles are resized."
            ) from error
        if shape != (2, self.dim):
            raise ConfigError(f"encoder {self.name}: gives {shape[1:]} for a tile of {tile_px} px, not ({self.dim},).")

    def _output(self, out: Tensor) -> Tensor:
        """out: (b, dim), or (b, tokens, width) from a network that does not pool: class token, registers, patches."""
        if out.ndim == 2:
            return out
        if self.output == "cls":
            return out[:, 0]
        prefix = int(self.module.num_prefix_tokens)  # type: ignore[arg-type]
        return torch.cat([out[:, 0], out[:, prefix:].mean(dim=1)], dim=-1)


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """The arithmetic that `precision` names, on this device."""
    return torch.autocast(device.type, dtype=_AUTOCAST.get(precision), enabled=precision in _AUTOCAST)
