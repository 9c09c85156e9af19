"""Defines the errors that the command line prints as one line, without a traceback."""


class UsageError(Exception):
    """A mistake of the user, or a limit of the machine. The exit code is 2."""


class LostProcessError(UsageError):
    """Another process that trains together with this one has ended."""


class NotFiniteError(UsageError, FloatingPointError):
    """Training or an environment returned NaN or infinity. The exit code is 1."""
