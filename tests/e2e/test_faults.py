"""Killed and paused operators, deleted rounds, clients that change: at exact points, which a proxy before the store holds open."""

import pytest
from e2e.federation import tensors
from e2e.s3_proxy import process_of
from e2e.waiting import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

CLIENTS, MIB, SHARDS = 2, 20, 4


@pytest.fixture
def federation(watched):
    watched.upload(CLIENTS, MIB)
    return watched


def assert_one_right_result(federation):
    """The result is the reference's, its manifest names all clients, and nothing else is left."""
    assert federation.result() == federation.expected()
    document = federation.document()
    assert [row["key"] for row in document["participants"]] == sorted(federation.updates)
    wait_for("nothing is left but the result", federation.is_clean)
    assert federation.keys() == ["model.safetensors", "model.safetensors.manifest.json"]
    return document


# (c) The operator is killed, and another one goes on.


def test_killed_while_it_collects(rough_namespace, operators, federation, proxy):
    operator = operators()
    hold = proxy.hold(lambda r: r.method == "GET" and "/updates/client-" in r.key)
    rough_namespace.apply(federation.manifest("killed-in-collect"))
    hold.wait()
    operator.kill()
    hold.drop()
    assert federation.keys() == []
    operators()
    rough_namespace.success_of("killed-in-collect")
    assert_one_right_result(federation)


def test_killed_while_shards_run(rough_namespace, operators, federation, proxy):
    """Two shards are recorded, the others' last parts are on their way: only these run again."""
    operator = operators()
    late = proxy.hold(lambda r: r.is_record and ("/shards/2/" in r.key or "/shards/3/" in r.key))
    rough_namespace.apply(federation.manifest("killed-in-dispatch"))
    late.wait(2)
    uid = rough_namespace.round("killed-in-dispatch")["metadata"]["uid"]
    shards = f"model.safetensors.round/{uid}/1/shards/"

    def recorded():
        return {info.key: info.etag for info in federation.bucket.list(shards)}

    wait_for("two shards are recorded", lambda: len(recorded()) == 2)
    before, written = recorded(), proxy.parts_written()
    operator.kill()
    late.drop()

    at_complete = proxy.hold(lambda r: r.is_complete)
    operators()
    at_complete.wait()
    after = recorded()
    assert before.items() <= after.items()
    assert len(after) == SHARDS
    again = {number for number, times in proxy.parts_written().items() if times > written.get(number, 0)}
    at_complete.release()
    rough_namespace.success_of("killed-in-dispatch")
    document = assert_one_right_result(federation)

    first_to_last = document["plan"]["shards"]
    assert again == {n for first, last in first_to_last[2:] for n in range(first, last + 1)}
    for shard in (0, 1):
        assert [a["outcome"] for a in document["attempts"] if a["shard"] == shard] == ["Done"]


POINTS = {
    "before-plan": lambda r: r.is_put_of("/1/plan.json"),
    "before-outcome": lambda r: r.is_put_of("/1/outcome.json"),
    "before-complete": lambda r: r.is_complete,
    "before-manifest": lambda r: r.is_put_of(".manifest.json"),
}
"""Requests that an operator sends at one point of the protocol."""


@pytest.mark.parametrize("point", ["before-outcome", "before-complete", "before-manifest"])
def test_killed_after_the_last_shard(point, rough_namespace, operators, federation, proxy):
    operator = operators()
    hold = proxy.hold(POINTS[point])
    name = f"killed-{point}"
    rough_namespace.apply(federation.manifest(name))
    hold.wait()
    written = proxy.parts_written()
    operator.kill()
    hold.drop()
    completed = federation.bucket.stat("model.safetensors")
    assert (completed is not None) == (point == "before-manifest")
    operators()
    rough_namespace.success_of(name)
    document = assert_one_right_result(federation)
    assert proxy.parts_written() == written, "a shard that was recorded ran again"
    assert set(written.values()) == {1}
    assert [a["outcome"] for a in document["attempts"]] == ["Done"] * SHARDS
    if completed is not None:
        assert federation.bucket.stat("model.safetensors").etag == completed.etag


# (d) Two operators by mistake; one stands still at the worst moment, then goes on.


@pytest.mark.parametrize("point", ["before-plan", "before-complete"])
def test_one_of_two_operators_is_paused(point, rough_namespace, operators, federation, proxy):
    both = {operator.pid: operator for operator in (operators(), operators())}
    hold = proxy.hold(POINTS[point], limit=1)
    name = f"paused-{point}"
    rough_namespace.apply(federation.manifest(name))
    request = hold.wait()[0]
    paused = both[process_of(request, proxy.port, both)]
    paused.pause()
    rough_namespace.success_of(name)
    result = federation.bucket.stat("model.safetensors").etag
    manifest = federation.document()
    hold.release()
    paused.resume()
    wait_for("the paused request is answered", lambda: request.status)
    for operator in both.values():
        wait_for("no operator holds on to the round", lambda o=operator: o.metric("gradsharding_rounds_running") == 0)
    assert federation.bucket.stat("model.safetensors").etag == result
    assert_one_right_result(federation)
    assert federation.document() == manifest
    assert rough_namespace.condition(name)[:2] == ("True", "Succeeded")


# (f) Deletion.


def test_deletion_while_shards_run_leaves_nothing(rough_namespace, operators, federation, proxy):
    operator = operators()
    hold = proxy.hold(lambda r: r.is_part)
    # A memory that no other test has: this function belongs to this round alone.
    rough_namespace.apply(federation.manifest("deleted", function_memoryMiB=131))
    hold.wait(SHARDS)
    assert [service for service in rough_namespace.services() if "-131-" in service["metadata"]["name"]]
    rough_namespace.delete("deleted")
    assert federation.is_clean(), federation.leftovers()
    hold.release()  # what the functions had sent comes late
    wait_for("the late parts are refused", lambda: all(request.status == 404 for request in hold.requests))
    assert federation.keys() == []
    assert federation.is_clean(), federation.leftovers()

    def ownerless():
        uids = {round_["metadata"]["uid"] for round_ in rounds(rough_namespace)}
        owners = {
            s["metadata"]["name"]: {o["uid"] for o in s["metadata"]["ownerReferences"]}
            for s in rough_namespace.services()
        }
        return [name for name, owning in owners.items() if not owning & uids]

    wait_for("functions without a round are gone", lambda: not ownerless())
    assert not [service for service in rough_namespace.services() if "-131-" in service["metadata"]["name"]]
    assert operator.metric("gradsharding_rounds_running") == 0


def rounds(namespace):
    return namespace.api.get(f"apis/gradsharding.dev/v1alpha1/namespaces/{namespace.name}/aggregationrounds")["items"]


def test_deleted_while_no_operator_runs(rough_namespace, operators, federation, proxy):
    operator = operators()
    hold = proxy.hold(lambda r: r.is_part)
    rough_namespace.apply(federation.manifest("deleted-alone"))
    hold.wait(SHARDS)
    operator.kill()
    hold.drop()
    rough_namespace.kubectl("delete", "agground", "deleted-alone", "--wait=false")
    assert not federation.is_clean()
    operators()
    wait_for("the round is gone", lambda: rough_namespace.round("deleted-alone") is None)
    assert federation.keys() == []
    assert federation.is_clean(), federation.leftovers()


# (g) Clients that do not keep still.


@pytest.mark.parametrize("change", ["vanished", "changed"])
@pytest.mark.parametrize("policy", ["Fail", "Exclude"])
def test_an_update_does_not_stay_as_it_was(change, policy, rough_namespace, operators, watched, proxy):
    operators()
    watched.upload(3, 6)
    key, words = "updates/client-1.safetensors", {"vanished": "was removed", "changed": "was overwritten"}[change]
    hold = proxy.hold(lambda r: r.is_put_of("/1/header"))  # the plan is stored, no function is called yet
    name = f"{change}-{policy.lower()}"
    rough_namespace.apply(watched.manifest(name, updates_minCount=2, aggregation_invalidUpdatePolicy=policy))
    hold.wait()
    if change == "vanished":
        watched.bucket.delete([key])
    else:
        watched.put(key, tensors(6, 77), 99)
    hold.release()
    round_ = rough_namespace.end_of(name)
    state, reason, message = rough_namespace.condition(name)
    if policy == "Fail":
        assert (state, reason) == ("False", "InvalidUpdate")
        assert f"{key} {words}" in message
        assert watched.bucket.stat("model.safetensors") is None
    else:
        assert (state, reason) == ("True", "Succeeded")
        assert round_["status"]["plan"]["revision"] == 2
        assert round_["status"]["updates"]["excluded"] == 1
        assert watched.result() == watched.expected(without=[key])
        assert words in watched.document()["excluded"][0]["reason"]
        wait_for("nothing is left", watched.is_clean)


# (h) Two rounds, one function.


def test_two_rounds_share_a_function_and_none_starves(rough_namespace, operators, federation, store, proxy, request):
    operators()
    other = store.federation(via=proxy.endpoint)
    request.addfinalizer(other.remove)
    other.upload(CLIENTS, MIB)
    hold = proxy.hold(lambda r: r.is_part)
    shape = {"function_maxConcurrency": 2, "function_memoryMiB": 129}
    rough_namespace.apply(federation.manifest("first", **shape))
    hold.wait(2)  # both slots are the first round's, and two of its shards wait
    rough_namespace.apply(other.manifest("second", **shape))
    wait_for("the second round calls", lambda: rough_namespace.condition("second", "Planned")[0] == "True")
    wait_for("the second round waits for slots", lambda: active(rough_namespace, "second") == SHARDS)
    hold.release()
    for name in ("first", "second"):
        rough_namespace.success_of(name)
    functions = [s for s in rough_namespace.services() if "-129-" in s["metadata"]["name"]]
    assert len(functions) == 1
    records = [r.key.split("/")[1] for r in list(proxy.log) if r.is_record]
    assert len(records) == 2 * SHARDS
    # The first two were running before the second round came; after that they take turns.
    assert set(records[2:4]) != {federation.name}, records
    assert set(records[2:6]) == {federation.name, other.name}, records
    for each in (federation, other):
        assert_one_right_result(each)


def active(namespace, name):
    return (namespace.round(name)["status"].get("shards") or {}).get("active", 0)


# (i) Long calls.


@pytest.mark.on_demand
@pytest.mark.timeout(600)
def test_a_call_of_330_seconds(rough_namespace, operators, watched, proxy):
    operators()
    values = tensors(5, 0)
    clients, pace = 84, 4.0
    for i in range(clients):
        watched.put(f"updates/client-{i:02}.safetensors", values, 1)
    # One range of 5 MiB of each client, one after another: few enough are in flight that none waits for 30 s.
    proxy.pace(lambda r: r.method == "GET" and "/updates/" in r.key and r.client != proxy.host, pace)
    shape = {"memoryMiB": 96, "shards": 1, "timeoutSeconds": 400, "maxConcurrency": 1}
    rough_namespace.apply(watched.manifest("long", function=shape))
    rough_namespace.success_of("long", 500)
    attempts = watched.document()["attempts"]
    assert [a["outcome"] for a in attempts] == ["Done"]
    assert attempts[0]["finished"] - attempts[0]["started"] >= 330
    assert watched.result() == watched.expected()
