"""Errors that a user can mend. Anything else that is raised is a programmer's fault and may crash."""


class UserError(Exception):
    """Says where, what came, what is allowed and how to go on; the command line prints it without a traceback."""


class WrongUse(UserError):
    """A wish that no slide could meet: a setting out of range, a folder that is not there."""


class SlideError(UserError):
    """A slide cannot be used. `outcome` is the word that stands in summaries and in the exit table."""

    outcome = "failed"


class MissingPixelSize(SlideError):
    """No source gives the slide's microns per pixel."""

    outcome = "no pixel size"


class NoTissue(SlideError):
    """The tissue mask, or the part of it that a grid can hold, is empty."""

    outcome = "no tissue"


class SlideTooSmall(SlideError):
    """The slide is smaller than one tile."""

    outcome = "smaller than a tile"
