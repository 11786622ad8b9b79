"""What a Lambda function answered: a result, or how it ended without one. Pure.

Shapes of errors: https://docs.aws.amazon.com/lambda/latest/dg/runtimes-api.html and the REPORT line of
https://docs.aws.amazon.com/lambda/latest/dg/python-logging.html.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from dataclasses import dataclass, replace

from gradsharding.platforms import FunctionFailed, InvocationError, OutOfMemory, TimedOut
from gradsharding_reducer.task import ContractError, ReduceResult, Runtime

TAIL_BYTES = 4096
"""Lambda gives the last 4 KB of an invocation's log."""

_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE)
_SIGNED = re.compile(r"\S*X-Amz-\S*", re.IGNORECASE)
"""What is left of a signed URL where a log was cut."""

_PLATFORM_LINE = re.compile(r"(INIT_START|START RequestId|END RequestId|REPORT RequestId|XRAY TraceId)\b|\s*$")
_DETAIL = 1200
"""Characters: attempts are kept in the manifest."""


@dataclass(frozen=True, slots=True)
class Report:
    """What Lambda measured of one invocation; 0 where it did not say."""

    billed_ms: int = 0
    memory_mb: int = 0
    max_memory_mb: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer with status 200. ``function_error`` is the header of this name, ``tail`` the end of the log."""

    payload: bytes
    function_error: str | None
    tail: str
    request_id: str


def read_tail(encoded: object) -> str:
    """The end of the log, from its base64 header. Its first line is dropped where the log was cut: it may be half a URL."""
    try:
        raw = base64.b64decode(str(encoded or ""))
    except (binascii.Error, ValueError):
        return ""
    text = raw.decode(errors="replace")
    return text.partition("\n")[2] if len(raw) >= TAIL_BYTES else text


def read_report(tail: str) -> Report:
    """The last REPORT, as text or as JSON."""

    def last(text: str, field: str) -> int:
        found = re.findall(rf'(?:{text}: |"{field}":\s*)([0-9]{{1,15}})', tail)
        return int(found[-1]) if found else 0

    return Report(
        last("Billed Duration", "billedDurationMs"),
        last(r"\tMemory Size", "memorySizeMB"),
        last("Max Memory Used", "maxMemoryUsedMB"),
    )


def without_urls(text: str) -> str:
    """The text with every URL, and whatever looks like the rest of a signed one, replaced."""
    return _SIGNED.sub("[removed]", _URL.sub("[URL removed]", text))


def understand(answer: Answer, memory_mb: int) -> ReduceResult:
    """The result of a function of ``memory_mb``. Raises OutOfMemory, TimedOut or FunctionFailed."""
    report = read_report(answer.tail)
    if answer.function_error:
        raise _failed(answer, report, memory_mb)
    try:
        result = ReduceResult.from_json(answer.payload)
    except ContractError as error:
        said = without_urls(str(error))[:_DETAIL]
        raise _billed(
            FunctionFailed(f"what the function answered is no result: {said}", answer.request_id), report
        ) from None
    return replace(result, runtime=Runtime("lambda", answer.request_id, f"Lambda, {memory_mb} MB", report.billed_ms))


def _failed(answer: Answer, report: Report, memory_mb: int) -> InvocationError:
    kind, message = _error(answer.payload)
    detail = _detail(kind, message, answer.tail)
    full = report.max_memory_mb >= report.memory_mb > 0
    killed = "signal: killed" in message or ("without providing a reason" in message and full)
    if kind in ("Runtime.OutOfMemory", "MemoryError") or (kind == "Runtime.ExitError" and killed):
        return _billed(OutOfMemory(f"out of the function's {memory_mb} MB: {detail}", answer.request_id), report)
    if kind.startswith("Sandbox.Timed") or "Task timed out after" in message:
        return _billed(TimedOut(detail, answer.request_id), report)
    return _billed(FunctionFailed(detail, answer.request_id), report)


def _billed(error: InvocationError, report: Report) -> InvocationError:
    error.billed_ms = report.billed_ms
    return error


def _error(payload: bytes) -> tuple[str, str]:
    """Type and message of an error payload, whatever is in it."""
    try:
        document = json.loads(payload)
    except (ValueError, RecursionError):
        return "", payload[:_DETAIL].decode(errors="replace")
    if not isinstance(document, dict):
        return "", ""
    return str(document.get("errorType") or ""), str(document.get("errorMessage") or "")


def _detail(kind: str, message: str, tail: str) -> str:
    """The error, then the last lines of the function's own log, on one line and without URLs."""
    lines = [line.strip() for line in tail.splitlines() if not _PLATFORM_LINE.match(line)]
    error = without_urls(": ".join(part for part in (kind, message) if part) or "the function gave no reason")
    log = without_urls(" | ".join(lines))
    room = max(0, _DETAIL - len(error))
    return error[:_DETAIL] + (f" (log: {log[-room:]})" if log and room else "")
