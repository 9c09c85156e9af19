"""Defines the errors that the command line prints as one line, without a traceback."""


class UsageError(Exception):
    """A mistake of the user, or a limit of his machine. The exit code is 2."""


class LostProcessError(UsageError):
    """Another process that trains together with this one has ended."""


class NotFiniteError(UsageError, FloatingPointError):
    """The training or an environment gave NaN or infinity. The exit code is 1."""
