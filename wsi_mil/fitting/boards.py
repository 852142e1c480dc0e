"""Curves for TensorBoard, when asked for."""

from pathlib import Path
from typing import Any

from wsi_mil.errors import ConfigError


class Boards:
    """Curves for TensorBoard, or nothing."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.writer: Any = None

    def open(self, epoch: int) -> None:
        """Start, or go on after `epoch`."""
        if self.folder is not None:
            self.writer = find_writer()(log_dir=str(self.folder), purge_step=epoch + 1)

    def add(self, row: dict[str, float]) -> None:
        """One epoch."""
        if self.writer is not None:
            for name, value in row.items():
                self.writer.add_scalar(name, value, global_step=int(row["epoch"]))

    def close(self) -> None:
        """Flush."""
        if self.writer is not None:
            self.writer.close()


def find_writer() -> Any:
    """The class that writes event files. Raises ConfigError, naming the extra, when TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "train.tensorboard needs TensorBoard, which is not installed. "
            "Install the extra: pip install 'wsi-mil[track]'"
        ) from None
    return SummaryWriter
