"""What a user can mend becomes a condition, and the round goes on once it is mended."""

import threading

import kmock
import pytest
from loop.kubernetes_mock import LIMIT
from loop.operators import noise
from rounds_kit import OUTPUT

from gradsharding.errors import StoreRefused, StoreUnreachable
from gradsharding.platforms import OutOfMemory

STORE = "http://store.svc:9000"


def test_a_secret_that_comes_later(world, eager):
    world.operator()
    world.upload(1, 2)
    world.apply(updates_maxCount=2, store={"endpoint": STORE, "credentialsSecretName": "later"})
    trouble = world.wait_for("Succeeded", "Unknown", "SecretUnusable")
    assert trouble["message"] == "Secret later is not there in namespace default: create it"
    world.secret("later", accessKey="access")
    world.cluster.wait(lambda: "has no key secretKey" in world.condition("Succeeded")["message"], "the second fault")
    world.secret("later", accessKey="access", secretKey="secret")
    world.wait_for_end("True", "Succeeded")


def test_a_secret_that_is_rotated(world):
    operator = world.operator()
    world.apply()
    world.wait_for("Succeeded", "Unknown", "Collecting")
    assert operator.keys.retrieve().access_key == "access-1"
    world.secret("store", accessKey="access-2", secretKey="secret-2", sessionToken="token-2")
    world.cluster.wait(lambda: operator.keys.retrieve().access_key == "access-2", "the new keys")
    new = operator.keys.retrieve()
    assert (new.secret_key, new.session_token) == ("secret-2", "token-2")


def test_no_secret_named(world):
    world.operator()
    world.upload(1, 2)
    world.apply(updates_maxCount=2, store={"endpoint": STORE})
    assert "does not lend its own keys" in world.wait_for("Succeeded", "Unknown", "SecretUnusable")["message"]


def test_ambient_keys_where_they_are_allowed(world, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ambient-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "ambient-secret")
    operator = world.operator(ambient_credentials=True)
    world.upload(1, 2)
    world.apply(updates_maxCount=2, store={"endpoint": STORE})
    world.wait_for_end("True", "Succeeded")
    assert operator.keys.retrieve().access_key == "ambient-key"


def test_an_api_server_that_does_not_give_the_secret(world):
    world.operator()
    refused = world.cluster.api["get", "/api/v1/namespaces/default/secrets/store"] << 500
    world.upload(1, 2)
    world.apply(updates_maxCount=2)
    assert "the Kubernetes API answered 500" in world.wait_for("Succeeded", "Unknown", "SecretUnusable")["message"]
    world.cluster.api._payloads.remove(refused)
    world.wait_for_end("True", "Succeeded")


@pytest.mark.parametrize(
    ("endpoint", "address", "why"),
    [
        ("http://store.example:9000", "192.0.2.7", "is not among the endpoints"),
        ("http://store.svc:9000", "169.254.169.254", "where no store of a round may be"),
        ("http://store.svc:9000", "127.0.0.1", "where no store of a round may be"),
    ],
)
def test_an_endpoint_that_is_refused(world, monkeypatch, endpoint, address, why):
    from gradsharding.kube import driver

    addresses = [address]
    monkeypatch.setattr(driver, "resolve_host", lambda host: addresses)
    operator = world.operator()
    world.upload(1, 2)
    world.apply(updates_maxCount=2, store={"endpoint": endpoint, "credentialsSecretName": "store"})
    assert why in world.wait_for("Succeeded", "Unknown", "EndpointRefused")["message"]
    assert operator.operations == []
    if endpoint == "http://store.svc:9000":
        addresses[0] = "192.0.2.7"
        world.wait_for_end("True", "Succeeded")


@pytest.mark.parametrize(
    ("error", "reason", "kind"),
    [
        (StoreUnreachable("The store did not answer: no connection."), "StoreUnreachable", "unreachable"),
        (StoreRefused("The store refuses the keys.", "InvalidAccessKeyId"), "StoreDenied", "refused"),
    ],
)
@pytest.mark.parametrize("when", ["list", "create_upload", "complete_upload", "delete"])
def test_a_store_that_fails_for_a_while(world, error, reason, kind, when):
    broken = threading.Event()
    broken.set()

    def fail(op, key):
        if op == when and broken.is_set():
            raise error

    operator = world.operator(on_operation=fail)
    world.upload(1, 2)
    world.apply(updates_maxCount=2)
    assert world.wait_for("Succeeded", "Unknown", reason)["message"] == str(error)
    broken.clear()
    world.wait_for_end("True", "Succeeded")
    world.check_success([1, 2])
    sample = operator.operator.metrics.registry.get_sample_value("gradsharding_store_errors_total", {"kind": kind})
    assert sample >= 1


def test_an_out_of_memory_kill_is_an_event(world):
    def script(task, number):
        if number == 1:
            raise OutOfMemory("killed")

    world.script = script
    world.operator()
    world.upload(1, 2)
    world.apply(updates_maxCount=2, function_memoryMiB=256)
    world.wait_for_end("True", "Succeeded")
    world.check_success([1, 2])
    assert world.get()["status"]["shards"]["retried"] == 1
    (event,) = world.cluster.wait(lambda: world.events("OutOfMemory"))
    assert event["type"] == "Warning"
    assert "shard 0" in event["message"]
    assert "spec.function.memoryMiB" in event["message"]


def test_a_change_in_the_moment_of_the_last_write(world):
    """The optimistic lock refuses the status that ends the round: it must come again."""
    refusals = []

    def interfere(request):
        text = str(request.data)
        if len(refusals) < 3 and request.subresource == "status" and "completionTime" in text:
            refusals.append(text)
            world.cluster.patch(
                "aggregationrounds", "default", "round", {"metadata": {"labels": {"n": str(len(refusals))}}}
            )

    world.cluster.before_write = interfere
    world.operator()
    world.upload(1, 2)
    world.apply(updates_maxCount=2)
    world.wait_for_end("True", "Succeeded")
    assert len(refusals) == 3
    world.check_success([1, 2])


def test_a_change_in_the_moment_of_each_write(world):
    changed = []

    def interfere(request):
        if request.subresource == "status" and request.text not in changed:
            changed.append(request.text)
            if len(changed) % 2:
                world.cluster.patch(
                    "aggregationrounds", "default", "round", {"metadata": {"labels": {"n": str(len(changed))}}}
                )

    world.cluster.before_write = interfere
    operator = world.operator()
    world.upload(1, 2)
    world.apply(updates_maxCount=2)
    world.wait_for_end("True", "Succeeded")
    assert (
        operator.operator.metrics.registry.get_sample_value(
            "gradsharding_rounds_total", {"succeeded": "True", "reason": "Succeeded"}
        )
        == 1
    ), "an end is counted once"


def test_a_status_that_somebody_edits(world):
    world.operator()
    world.apply(updates_minCount=2)
    world.wait_for("Succeeded", "Unknown", "Collecting")
    world.cluster.patch(
        "aggregationrounds", "default", "round", {"status": {"conditions": [], "updates": None}}, subresource="status"
    )
    world.upload(1, 2)
    world.ahead = 61
    world.wait_for_end("True", "Succeeded")
    assert len(world.get()["status"]["conditions"]) == 4


def test_an_api_server_that_hiccups(world, caplog):
    """Kopf tries again by itself; nothing is done twice."""
    failed = []

    def hiccup(request):
        if request.subresource == "status" and not failed:
            failed.append(request)
            raise RuntimeError("500")

    world.cluster.before_write = hiccup
    operator = world.operator()
    world.upload(1, 2)
    world.apply(updates_maxCount=2)
    world.wait_for_end("True", "Succeeded")
    assert sum(op == "create_upload" for op, _ in operator.operations) == 1
    assert not any(OUTPUT in message for message in noise(caplog.records))


def test_a_hanging_store_holds_up_no_other_round(world):
    held, release = threading.Event(), threading.Event()

    def hang(op, key):
        if "stuck" in key:
            held.set()
            assert release.wait(LIMIT)

    operator = world.operator(on_operation=hang)
    world.upload(1, 2)
    for number in range(8):
        world.apply(
            f"stuck-{number}", updates_prefix=f"stuck/in/{number}/", output_key=f"stuck/out/{number}.safetensors"
        )
    assert held.wait(LIMIT)
    world.apply(updates_maxCount=2)
    world.wait_for_end("True", "Succeeded")
    assert operator.operator.unattended() < 1, "nor does it make the operator ill"
    release.set()


def test_a_daemon_that_dies_is_noticed(world, caplog):
    """Kopf gives a daemon up for good when a write is refused for a reason that it does not repeat: /healthz tells."""

    def refuse(request):
        if request.subresource == "status":
            raise kmock.KubernetesError(400, "BadRequest", "no")

    world.cluster.before_write, world.untidy = refuse, True
    operator = world.operator()
    world.apply()
    world.cluster.wait(lambda: operator.operator.unattended() > 0.5, "the age to grow")
    world.operators.pop().stop()
    caplog.clear()  # its records hold the dead task
