from datetime import UTC, datetime

import pytest
from kubernetes.aio.client import (
    V1ContainerState,
    V1ContainerStateRunning,
    V1ContainerStateTerminated,
    V1ContainerStateWaiting,
    V1ContainerStatus,
    V1ObjectMeta,
    V1Pod,
    V1PodCondition,
    V1PodStatus,
)

from gradsharding.platforms.knative_pods import killed_for_memory, why_not_running

RUNNING = V1ContainerState(running=V1ContainerStateRunning())


def ended(reason):
    return V1ContainerState(terminated=V1ContainerStateTerminated(exit_code=137, reason=reason))


def waiting(reason, message=None):
    return V1ContainerState(waiting=V1ContainerStateWaiting(reason=reason, message=message))


def pod(state=RUNNING, last=None, restarts=0, name="reducer", conditions=None, deleted=None):
    status = V1ContainerStatus(
        name=name, state=state, last_state=last, restart_count=restarts, image="image", image_id="", ready=False
    )
    meta = V1ObjectMeta(name="p", uid="uid", deletion_timestamp=deleted)
    return V1Pod(metadata=meta, status=V1PodStatus(container_statuses=[status], conditions=conditions))


@pytest.mark.parametrize(
    ("found", "kill"),
    [
        (pod(), None),
        (pod(ended("Error")), None),
        (pod(ended("OOMKilled")), ("uid", 1)),
        (pod(RUNNING, ended("OOMKilled"), restarts=1), ("uid", 1)),
        (pod(waiting("CrashLoopBackOff"), ended("OOMKilled"), restarts=2), ("uid", 2)),
        (pod(ended("OOMKilled"), ended("OOMKilled"), restarts=1), ("uid", 2)),
        (pod(ended("OOMKilled"), name="queue-proxy"), None),
        (V1Pod(metadata=V1ObjectMeta(name="p", uid="uid"), status=V1PodStatus()), None),
    ],
    ids=["running", "failed", "killed", "restarted", "restarting", "killed again", "the sidecar", "no container yet"],
)
def test_a_kill_is_one_and_the_same_before_and_after_the_restart(found, kill):
    assert killed_for_memory(found) == kill


NO_ROOM = [V1PodCondition(type="PodScheduled", status="False", message="0/1 nodes: Insufficient memory")]


@pytest.mark.parametrize(
    ("pods", "why"),
    [
        ([], ""),
        ([pod()], ""),
        ([pod(waiting("ContainerCreating"))], ""),
        ([pod(), pod(conditions=NO_ROOM)], "function pods cannot be scheduled: 0/1 nodes: Insufficient memory"),
        ([pod(conditions=NO_ROOM, deleted=datetime.now(UTC))], ""),
        ([pod(waiting("ImagePullBackOff", "not found"))], "function pods do not start, ImagePullBackOff: not found"),
        ([pod(waiting("ErrImagePull"))], "function pods do not start, ErrImagePull: image"),
    ],
)
def test_why_pods_do_not_run(pods, why):
    assert why_not_running(pods) == why


def test_a_reason_has_a_limit():
    assert len(why_not_running([pod(waiting("ErrImagePull", "x" * 9999))])) == 500
