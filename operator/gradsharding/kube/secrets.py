"""Store keys and certificates of a round, from Secrets of its own namespace. A changed Secret counts from the next pass on."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping

from minio.credentials.credentials import Credentials
from minio.credentials.providers import Provider

from gradsharding.errors import GradsShardingError


class SecretUnusable(GradsShardingError):
    """A Secret that the round names is missing or lacks a key. The round goes on once it is mended."""


class RotatingKeys(Provider):
    """Keys that may be replaced while buckets use them. Requests begun before keep the old ones."""

    def __init__(self) -> None:
        self._current: Credentials | None = None

    def retrieve(self) -> Credentials:
        """The present keys."""
        if self._current is None:
            raise ValueError("no keys yet")
        return self._current

    def replace(self, name: str, data: Mapping[str, str]) -> None:
        """Take the keys of a Secret. Raises SecretUnusable."""
        access, secret = (text(name, data, key) for key in ("accessKey", "secretKey"))
        token = text(name, data, "sessionToken") if "sessionToken" in data else None
        self._current = Credentials(access, secret, token)


def text(name: str, data: Mapping[str, str], key: str) -> str:
    """One value of a Secret's data. Raises SecretUnusable, without the value."""
    try:
        value = base64.b64decode(data[key], validate=True).decode().strip()
    except KeyError:
        raise SecretUnusable(
            f"Secret {name} has no key {key}: add it (accessKey, secretKey; ca.crt for certificates)"
        ) from None
    except (binascii.Error, UnicodeDecodeError, TypeError):
        raise SecretUnusable(
            f"key {key} of Secret {name} is not text: write it with `kubectl create secret generic`"
        ) from None
    if not value:
        raise SecretUnusable(f"key {key} of Secret {name} is empty")
    return value
