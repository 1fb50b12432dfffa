"""The errors a user can cause, as one line that names what is wrong, where, and what is allowed."""


class UserError(Exception):
    """Bad input: a config, a data file, a checkpoint. The command line prints it and exits with 2."""


class Diverged(Exception):
    """Every client of a round returned a non-finite model. The command line prints it and exits with 3."""


class TooFew(Exception):
    """Too few clients are there, or too few of their replies are good. The command line prints it and exits with 4."""


class Interrupted(Exception):
    """A signal ended the run after a checkpoint was written. The command line exits with 128 + the signal."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum
