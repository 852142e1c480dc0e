"""Where randomness comes from in training: seeds made of numbers, and nothing that happened before."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import torch


class Stream(IntEnum):
    """What a seed is for: no two of these ever draw the same numbers."""

    ORDER = 1
    """The order of bags in an epoch."""
    TILES = 2
    """Which tiles of a long bag are taken."""
    MODEL = 3
    """Dropout, masks and noise of a step."""
    WEIGHTS = 4
    """The first weights."""
    INNER = 5
    """The inner split of a benchmark's training part."""
    SPLIT = 7
    """The inner folds of a search."""
    SAMPLER = 8
    """The settings that a search tries."""


def derive_seed(*numbers: int) -> int:
    """One 63-bit seed from several numbers.

    They are read as 32-bit words, and zeros at the end do not count: calls are told apart by what stands in the same
    place, such as a last number that says what the seed is for.
    """
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_step(seed: int, device: torch.device) -> None:
    """Set the global generators that a step on `device` draws from.

    `torch.manual_seed` also notes the seed for every kind of device that was never used, with a stack trace each: over
    a millisecond, more than a step on a small bag takes.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


@contextmanager
def own_randomness(device: torch.device) -> Iterator[None]:
    """Leave global randomness as it was; on the CPU, sums in one order only."""
    were = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    try:
        if device.type == "cpu":
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        torch.use_deterministic_algorithms(were[0], warn_only=were[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
