"""What the pods of a function say about themselves. Pure; takes the official client's V1Pod."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

STUCK = {
    "ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName",
    "CreateContainerConfigError", "CreateContainerError", "RunContainerError",
}  # fmt: skip


def killed_for_memory(pod: Any) -> tuple[str, int] | None:
    """Pod uid and restart count of an out-of-memory kill of the reducer.

    It is in ``state`` until the container restarts, in ``lastState`` after, and only in ``state`` when the pod is being
    deleted meanwhile.
    """
    for status in pod.status.container_statuses or ():
        if status.name != "reducer":
            continue
        for state in (status.state, status.last_state):
            ended = state.terminated if state else None
            if ended is not None and ended.reason == "OOMKilled":
                return pod.metadata.uid, status.restart_count + (state is status.state)
    return None


def why_not_running(pods: Iterable[Any]) -> str:
    """The first reason that keeps a pod from running, with what to do; empty when there is none."""
    for pod in pods:
        if pod.metadata.deletion_timestamp:
            continue
        for condition in pod.status.conditions or ():
            if condition.type == "PodScheduled" and condition.status == "False":
                return f"function pods cannot be scheduled: {condition.message}"[:500]
        for status in pod.status.container_statuses or ():
            waiting = status.state.waiting if status.state else None
            if waiting is not None and waiting.reason in STUCK:
                return f"function pods do not start, {waiting.reason}: {waiting.message or status.image}"[:500]
    return ""
