"""Errors of the outer rooms that a user can mend; see tiling.errors for the root."""

from tiling.errors import MissingPixelSize, NoTissue, SlideError, SlideTooSmall, UserError, WrongUse


class ConfigError(WrongUse):
    """A wish that cannot be met: unknown name, wrong type, settings that contradict each other."""


class CohortError(UserError):
    """The table of patients, slides and labels does not say what a study needs."""


class StoreError(UserError):
    """A stored file is damaged, incomplete, or made with other settings than the ones asked for."""


class RunError(UserError):
    """A run folder holds something else than what was expected."""


__all__ = [
    "CohortError",
    "ConfigError",
    "MissingPixelSize",
    "NoTissue",
    "RunError",
    "SlideError",
    "SlideTooSmall",
    "StoreError",
    "UserError",
    "WrongUse",
]
