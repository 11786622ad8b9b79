"""What an error means to whoever called: an exit status, and a constant for ``--json``."""

from __future__ import annotations

from typer import TyperException

from gradsharding.errors import DeployFailed, ManifestError, RoundFailed, SettingsError, StoreError

DONE = 0
INTERNAL = 1
"""A bug of this program."""
INVALID = 2
"""The manifest, the settings or the command line."""
FAILED = 3
STORE = 4
"""The store cannot be reached, refuses, or lacks what a round needs."""
INTERRUPTED = 130


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM, with advice, if there is any. No Exception, so that no handler takes it for an error."""


def status_and_reason(error: BaseException) -> tuple[int, str]:
    """The exit status, and the reason in CamelCase."""
    match error:
        case ManifestError():
            return INVALID, "InvalidManifest"
        case SettingsError():
            return INVALID, "InvalidSettings"
        case TyperException():
            return INVALID, "InvalidUsage"
        case RoundFailed() | DeployFailed():
            return FAILED, error.reason
        case StoreError():
            return STORE, type(error).__name__
        case Interrupted() | KeyboardInterrupt():
            return INTERRUPTED, "Interrupted"
        case _:
            return INTERNAL, "InternalError"
