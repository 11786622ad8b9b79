"""The AWS Lambda entrance: handler ``gradsharding_reducer.aws_lambda.handler``."""

from __future__ import annotations

import base64
import binascii
import json
import os
from dataclasses import replace
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy comes in with the reducer

from gradsharding_reducer import peak_rss
from gradsharding_reducer.access import Access
from gradsharding_reducer.entrance import describe, read_task
from gradsharding_reducer.failures import ReducerFailure
from gradsharding_reducer.reduce import reduce
from gradsharding_reducer.task import ContractError

TIMEOUT_MARGIN_SECONDS = 5.0
"""Kept between the end of the budget and Lambda's timeout, for the record and the answer."""


def handler(event: dict[str, Any], context: Any) -> dict[str, Any]:
    """Run one task. ``event`` is the task, or ``{"gzip": base64 of the gzipped task}``; the result is returned as an
    object.

    Raises ContractError, ReducerFailure or MemoryError: Lambda reports the class as ``errorType``.
    """
    peak_rss.reset()
    packed = event["gzip"] if isinstance(event, dict) and set(event) == {"gzip"} else None
    if packed is None:
        task = read_task(json.dumps(event).encode())
    else:
        try:
            task = read_task(base64.b64decode(packed, validate=True), gzipped=True)
        except (binascii.Error, TypeError, ValueError) as error:
            if isinstance(error, ContractError):
                raise
            raise ContractError("task.gzip is not base64") from None
    remaining = context.get_remaining_time_in_millis() / 1000 - TIMEOUT_MARGIN_SECONDS
    task = replace(task, budget_seconds=max(0.0, min(task.budget_seconds, remaining)))
    try:
        result = reduce(task, Access.from_environment(os.environ))
    except (ReducerFailure, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - Lambda logs tracebacks and messages; they must not hold a URL
        raise ReducerFailure(describe(error)) from None
    answer: dict[str, Any] = json.loads(result.to_json())
    return answer
