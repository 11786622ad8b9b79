"""What can go wrong for a user. Each message is one sentence that says what, where and how to mend it."""

from __future__ import annotations


class GradsShardingError(Exception):
    """Base of all errors that are shown to users as a sentence instead of a traceback."""


class ManifestError(GradsShardingError):
    """The round's manifest is not valid; the message names the field by its full path."""


class SettingsError(GradsShardingError):
    """A setting of a process that serves, such as the operator, is missing or malformed; the message names it."""


class UpdateError(GradsShardingError):
    """One client's object cannot take part; the message is the reason that the round reports for it."""


class StoreError(GradsShardingError):
    """The object store did not do what was asked."""


class StoreUnreachable(StoreError):
    """No clear answer after retries: connection refused or reset, timeout, 5xx. Trying again can help."""


class StoreRefused(StoreError):
    """The store said no: wrong keys, missing bucket, missing right. ``code`` is the store's own."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class StoreUnsupported(StoreError):
    """The store lacks something that the protocol rests on, such as conditional PUTs."""


class ObjectGone(StoreError):
    """A pinned object is missing (404) or another one now (412)."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class RoundFailed(GradsShardingError):
    """The round cannot succeed. ``reason`` is a documented constant in CamelCase."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class DeployFailed(GradsShardingError):
    """A function could not be packaged or deployed. ``reason`` is a documented constant in CamelCase."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
