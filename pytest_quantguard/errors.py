"""Errors whose text is written for the person who reads a CI log.

Every error that a user's input, machine or server can cause derives from `QuantguardError`. Its message is
complete: what was expected, what was found, where, and the command or key that fixes it. Callers print
`str(error)` and never a traceback.
"""


class QuantguardError(Exception):
    """Something outside this package's code is wrong; the message says what and how to mend it."""


class ConfigError(QuantguardError):
    """The config file cannot be read or does not describe a gate."""


class BaselineError(QuantguardError):
    """A stored recording is missing, damaged, or does not belong to this config."""


class ServerError(QuantguardError):
    """A server did not start, died, or answered something that cannot be used."""


class ServerStartError(ServerError):
    """The server did not become ready; the message holds the command line and the end of its log."""


class ServerDiedError(ServerError):
    """The server's process ended or dropped the connection while it was in use."""


class RequestRejectedError(ServerError):
    """The server answered a request with an error status."""


class InvalidAnswerError(ServerError):
    """An answer breaks the protocol: non-finite, too few positions, other tokens than asked."""


class ModelError(QuantguardError):
    """A model folder or package cannot be fetched, read or served."""
