"""TrainSpec: how models are trained. Loads no lightning, so that a command can be parsed quickly."""

from dataclasses import dataclass
from typing import Literal

import torch

from wsi_mil.errors import ConfigError
from wsi_mil.fitting.boards import find_writer
from wsi_mil.fitting.datasets import Cache


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """How models are trained."""

    epochs: int = 50
    """Epochs at most; exactly these when validation does not choose."""
    lr: float = 2e-4
    """Learning rate at the start."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Learning rate falls along a half cosine to zero, step by step, or stays."""
    weight_decay: float = 1e-5
    """Weight decay of AdamW."""
    bags_per_step: int = 4
    """Bags in one forward pass."""
    accumulate: int = 1
    """Forward passes whose gradients are added before the optimiser steps."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Arithmetic in training; evaluation is always fp32."""
    tile_cap: int | None = None
    """Tiles drawn from a bag in each epoch; all when not given. Evaluation always uses all."""
    selection: Literal["validation", "none"] = "validation"
    """Who chooses the epoch. none: a fixed number of epochs, with the validation part merged into training."""
    metric: Literal["loss", "auc", "r2", "c_index"] = "loss"
    """What validation chooses by: the loss, or the figure of the target's kind (classes auc, numbers r2, survival
    c_index)."""
    patience: int | None = 15
    """Epochs without improvement on validation before training stops; never when not given."""
    clip_norm: float | None = 1.0
    """Largest norm of the gradient; not limited when not given."""
    calibration: Literal["temperature", "isotonic", "none"] = "temperature"
    """How probabilities are calibrated on validation; the uncalibrated ones are kept beside."""
    seeds: tuple[int, ...] = (0,)
    """One model a seed is trained in each fold."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes a GPU when there is one."""
    tensorboard: bool = False
    """Write curves for TensorBoard too (needs the extra `track`)."""
    cache: Cache = "auto"
    """Bags in memory: ram keeps all, none reads them at each use, auto keeps them where they fit into 2 GiB."""
    checkpoint_seconds: float = 15.0
    """Work that a killed training may lose at most, in seconds."""

    def check(self) -> None:
        """Raise ConfigError for a setting that no training can have."""
        least = {"epochs": 1, "bags_per_step": 1, "accumulate": 1, "tile_cap": 1, "patience": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ConfigError(f"train.{name} is {value}; it must be {bound} or more.")
        if not self.lr > 0 or self.weight_decay < 0 or (self.clip_norm is not None and not self.clip_norm > 0):
            raise ConfigError("train: lr and clip_norm must be above 0, weight_decay 0 or more.")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise ConfigError(f"train.seeds is {list(self.seeds)}; give at least one, each once, none below 0.")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("train.device is cuda, but torch sees no GPU. Use cpu or auto.")
        if self.precision == "fp16" and self.torch_device().type == "cpu":
            raise ConfigError("train.precision is fp16, which needs a GPU. On the CPU use bf16 or fp32.")
        if self.tensorboard:
            find_writer()

    def torch_device(self) -> torch.device:
        """The device, resolved."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)
