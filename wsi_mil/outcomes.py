"""What a stage did with each of its items, and the exit code that follows from it."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One item that a loop could not finish. The loop went on."""

    item: str
    """Slide id, bag id or fold."""
    outcome: str
    """One of the few words that summaries count: failed, no tissue, smaller than a tile, no pixel size ..."""
    reason: str
    """Where, what came, what is allowed, how to go on."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a stage did. `out` is the folder or file that the next stage takes."""

    stage: str
    out: Path
    done: tuple[str, ...] = ()
    reused: tuple[str, ...] = ()
    """Finished earlier with the same settings and left alone."""
    failures: tuple[Failure, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences the user should read, such as what to run next."""

    @property
    def exit_code(self) -> int:
        """0 done, 3 finished with listed failures, 1 nothing usable."""
        if not self.failures:
            return 0
        return 3 if self.done or self.reused else 1
