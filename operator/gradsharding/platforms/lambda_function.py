"""Is a deployed Lambda function fit for a round? From what GetFunctionConfiguration says. Pure.

https://docs.aws.amazon.com/lambda/latest/api/API_GetFunctionConfiguration.html
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gradsharding.errors import RoundFailed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gradsharding.platforms import FunctionSpec

ORIGINS_VARIABLE = "GRADSHARDING_ALLOWED_ORIGINS"
"""As the reducer calls it: ``scheme://host:port``, separated by spaces."""

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Readiness:
    """``why`` continues a sentence that begins with the function's name. ``broken``: waiting does not help."""

    ready: bool
    broken: bool = False
    why: str = ""

    @staticmethod
    def of(configuration: Mapping[str, Any]) -> Readiness:
        """An idle function (Inactive) is ready: the call wakes it."""
        state, update = configuration.get("State", "Active"), configuration.get("LastUpdateStatus", "Successful")
        if state in ("Active", "Inactive") and update == "Successful":
            return Readiness(True)
        if state in ("Active", "Inactive") and update == "Failed":
            reason = configuration.get("LastUpdateStatusReason") or "AWS gives no reason"
            return Readiness(False, True, f"could not be updated ({reason}): deploy it again")
        if state == "Pending" or update == "InProgress":
            return Readiness(False, False, "is still being created or updated")
        reason = configuration.get("StateReason") or "AWS gives no reason"
        return Readiness(False, True, f"is in state {state} ({reason}): deploy it again")


def check(configuration: Mapping[str, Any], wanted: FunctionSpec, function: str) -> None:
    """Raises RoundFailed: ``FunctionTooSmall``, or ``OriginNotAllowed`` when it may not talk to the round's store."""
    deploy = f"gradsharding lambda deploy --function {function}"
    memory, timeout = int(configuration["MemorySize"]), int(configuration["Timeout"])
    if memory < wanted.memory_mib:
        raise RoundFailed(
            "FunctionTooSmall",
            f"the Lambda function {function} has {memory} MB of memory, the round's spec.function.memoryMiB is "
            f"{wanted.memory_mib}: lower that, or run {deploy} --memory {wanted.memory_mib}",
        )
    if timeout < wanted.timeout_seconds:
        raise RoundFailed(
            "FunctionTooSmall",
            f"the Lambda function {function} has a timeout of {timeout} s, the round's spec.function.timeoutSeconds is "
            f"{wanted.timeout_seconds}: lower that, or run {deploy} --timeout {wanted.timeout_seconds}",
        )
    environment = configuration.get("Environment", {})
    if "Error" in environment:  # encrypted with a key that we may not use; the function can, and says Denied if need be
        return
    allowed = origins(environment.get("Variables", {}).get(ORIGINS_VARIABLE, "").split())
    missing = sorted(set(origins(wanted.origins)) - set(allowed))
    if missing:
        options = " ".join(f"--allow-origin {origin}" for origin in [*allowed, *missing])
        raise RoundFailed(
            "OriginNotAllowed",
            f"the Lambda function {function} may not talk to {', '.join(missing)}: run {deploy} {options}",
        )


def origins(urls: Iterable[str]) -> list[str]:
    """Each with its port, in the order given: ``https://s3.amazonaws.com`` is ``https://s3.amazonaws.com:443``. Others are left out."""
    found = []
    for url in urls:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            continue
        if parts.scheme in _PORTS and parts.hostname:
            host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
            found.append(f"{parts.scheme}://{host}:{port or _PORTS[parts.scheme]}")
    return found
