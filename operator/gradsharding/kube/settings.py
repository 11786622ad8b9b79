"""The operator's settings, from the environment. An error names the variable."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from gradsharding.errors import SettingsError
from gradsharding.platforms.knative_service import PodSettings

PREFIX = "GRADSHARDING_"
DEFAULT_ENDPOINTS = ("*.svc", "*.svc.cluster.local", "s3.*.amazonaws.com", "s3.*.amazonaws.com.cn")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Settings:
    """What an operator is told once, at its start. Rounds cannot change any of it."""

    pods: PodSettings
    """``REDUCER_IMAGE`` (no default), ``FUNCTION_CPU_REQUEST`` (250m), ``FUNCTION_NODE_SELECTOR``, ``FUNCTION_TOLERATIONS``,
    ``FUNCTION_LABELS``, ``FUNCTION_ANNOTATIONS``, ``FUNCTION_PULL_SECRETS`` (JSON each)."""
    allowed_endpoints: tuple[str, ...] = DEFAULT_ENDPOINTS
    """``ALLOWED_ENDPOINTS``: globs of host names or host:port, separated by spaces."""
    ambient_credentials: bool = False
    """``AMBIENT_CREDENTIALS``: whether rounds without a Secret may use the operator's own keys or role."""
    lambda_functions: tuple[str, ...] = ("gradsharding-*",)
    """``LAMBDA_FUNCTIONS``: globs of function names that rounds may call."""
    port: int = 8080
    """``PORT`` of /healthz and /metrics."""
    idle_function_seconds: int = 3600
    """``IDLE_FUNCTION_SECONDS``: a function that no round used for so long is removed."""


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Raises SettingsError."""

    def get(name: str, default: T, read: Callable[[str], T]) -> T:
        text = environment.get(PREFIX + name, "")
        if not text:
            return default
        try:
            return read(text)
        except (ValueError, TypeError) as error:
            raise SettingsError(f"environment variable {PREFIX}{name} {error}") from None

    image = environment.get(PREFIX + "REDUCER_IMAGE", "")
    if not image:
        raise SettingsError(
            f"environment variable {PREFIX}REDUCER_IMAGE is not set: name the image of the reducer, "
            "such as registry.example/gradsharding-reducer:0.1.0"
        )
    pods = PodSettings(
        image=image,
        cpu_request=get("FUNCTION_CPU_REQUEST", "250m", _quantity),
        node_selector=get("FUNCTION_NODE_SELECTOR", {}, _strings),
        tolerations=get("FUNCTION_TOLERATIONS", (), _objects),
        labels=get("FUNCTION_LABELS", {}, _strings),
        annotations=get("FUNCTION_ANNOTATIONS", {}, _strings),
        pull_secrets=get("FUNCTION_PULL_SECRETS", (), _names),
    )
    return Settings(
        pods=pods,
        allowed_endpoints=get("ALLOWED_ENDPOINTS", DEFAULT_ENDPOINTS, _words),
        ambient_credentials=get("AMBIENT_CREDENTIALS", False, _switch),
        lambda_functions=get("LAMBDA_FUNCTIONS", ("gradsharding-*",), _words),
        port=get("PORT", 8080, _port),
        idle_function_seconds=get("IDLE_FUNCTION_SECONDS", 3600, _seconds),
    )


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _switch(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"must be true or false, not {text!r}")
    return text == "true"


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise ValueError(f"must be a port from 1 to 65535, not {text!r}")
    return int(text)


def _seconds(text: str) -> int:
    if not text.isdecimal() or int(text) < 60:
        raise ValueError(f"must be a number of seconds from 60 on, not {text!r}")
    return int(text)


def _quantity(text: str) -> str:
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?m?", text):
        raise ValueError(f"must be an amount of CPU such as 250m or 1, not {text!r}")
    return text


def _json(text: str, kind: type, what: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, kind):
        raise ValueError(f"must be JSON: {what}")  # noqa: TRY004 - told like every other malformed value
    return value


def _strings(text: str) -> Mapping[str, str]:
    value: dict[str, Any] = _json(text, dict, 'an object of strings, such as {"key":"value"}')
    if not all(isinstance(v, str) for v in value.values()):
        raise ValueError("must be JSON: an object whose values are strings")
    return value


def _objects(text: str) -> tuple[Mapping[str, Any], ...]:
    value: list[Any] = _json(text, list, "a list of objects")
    if not all(isinstance(v, dict) for v in value):
        raise ValueError("must be JSON: a list of objects")
    return tuple(value)


def _names(text: str) -> tuple[str, ...]:
    value: list[Any] = _json(text, list, "a list of names")
    if not all(isinstance(v, str) for v in value):
        raise ValueError("must be JSON: a list of names")
    return tuple(value)
