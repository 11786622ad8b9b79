"""Rounds with ``platform: Lambda`` from the operator, on AWS's own emulator in place of AWS (tests/lambda_front.py).

Needs aws-lambda-rie (LAMBDA_RIE or PATH) and the right to make memory cgroups.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from e2e.waiting import wait_for
from lambda_front import LambdaFront

from gradsharding.deploy.package import reducer_files

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

CLIENTS, MIB, SHARDS, MEMORY_MIB, TIMEOUT = 4, 20, 4, 256, 120
"""20 MiB are four parts, and the function is as large as the round wants."""


@pytest.fixture(scope="session")
def task_root(tmp_path_factory):
    """The package's files of the reducer beside this environment's numpy: a cluster's network may reach no registry.

    That the package itself runs so is for tests/unit/lambda.
    """
    root = tmp_path_factory.mktemp("task")
    for name, body in reducer_files().items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(body)
    site = Path(find_spec("numpy").origin).parents[1]
    for found in (site / "numpy", *site.glob("numpy.libs")):
        (root / found.name).symlink_to(found)
    return root


@pytest.fixture
def front(task_root, federation, tmp_path):
    origins = [federation.bucket.origin]
    with LambdaFront(task_root, tmp_path, memory_mb=MEMORY_MIB, timeout=TIMEOUT, origins=origins) as made:
        yield made


@pytest.fixture(autouse=True)
def operator(front, operators, tmp_path, monkeypatch):
    """Whose Lambda is the front. Its AWS keys are in a profile: the store's in the environment are the rounds' alone."""
    profile = tmp_path / "credentials"
    profile.write_text("[default]\naws_access_key_id = lambda\naws_secret_access_key = lambda\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profile))
    monkeypatch.setenv("AWS_ENDPOINT_URL_LAMBDA", front.url)
    return operators()


def on_lambda(federation, name, function, **changes):
    changes = {"function_memoryMiB": MEMORY_MIB, "function_platform": "Lambda"} | changes
    return federation.manifest(name, f"{name}.safetensors", function_lambda={"functionName": function}, **changes)


def test_the_same_round_on_lambda_has_the_same_bits(rough_namespace, federation, front, tmp_path):
    federation.upload(CLIENTS, MIB)
    functions = [service["metadata"]["name"] for service in rough_namespace.services()]
    document = on_lambda(federation, "on-lambda", front.name)
    rough_namespace.apply(document)
    status = rough_namespace.success_of("on-lambda", 200)["status"]
    assert [service["metadata"]["name"] for service in rough_namespace.services()] == functions
    assert status["shards"] | {"total": SHARDS, "succeeded": SHARDS} == status["shards"]
    assert front.most_at_once > 1
    attempts = federation.document("on-lambda.safetensors")["attempts"]
    assert {a["shard"] for a in attempts if a["outcome"] == "Done"} == set(range(SHARDS))
    for attempt in attempts:
        assert (attempt["platform"], attempt["memory_cap"]) == ("lambda", f"Lambda, {MEMORY_MIB} MB")
        assert attempt["billed_ms"] > 0
        assert attempt["request_id"]
    wait_for("nothing is left", lambda: federation.is_clean("on-lambda.safetensors"))

    on_knative = federation.manifest("on-knative", "on-knative.safetensors", function_memoryMiB=MEMORY_MIB)
    rough_namespace.apply(on_knative)
    file = tmp_path / "round.yaml"
    file.write_text(json.dumps(document))
    command = [sys.executable, "-c", "import sys; from gradsharding.cli import main; sys.exit(main())", "run"]
    subprocess.run([*command, file, "--no-wait", "--output-key", "local.safetensors"], check=True, timeout=120)
    rough_namespace.success_of("on-knative", 200)
    result = federation.result("on-lambda.safetensors")
    assert result == federation.expected()
    assert result == federation.result("local.safetensors")
    assert result == federation.result("on-knative.safetensors")


def test_a_function_that_rounds_may_not_call_is_told_with_the_setting(rough_namespace, federation, front):
    federation.upload(2, 1)
    rough_namespace.apply(on_lambda(federation, "not-allowed", "payroll"))
    rough_namespace.end_of("not-allowed")
    state, reason, message = rough_namespace.condition("not-allowed")
    assert (state, reason) == ("False", "FunctionNotAllowed")
    for named in ("spec.function.lambda.functionName payroll", "(gradsharding-*)", "GRADSHARDING_LAMBDA_FUNCTIONS"):
        assert named in message
    wait_for("the event", lambda: rough_namespace.events("FunctionNotAllowed"))
    assert front.calls == 0
    assert federation.keys() == []
    rough_namespace.delete("not-allowed")


@pytest.mark.parametrize(
    ("field", "wanted", "numbers"),
    [("memoryMiB", 2 * MEMORY_MIB, f"{MEMORY_MIB} MB"), ("timeoutSeconds", 2 * TIMEOUT, f"{TIMEOUT} s")],
)
def test_a_function_that_is_too_small_is_told_with_both_numbers(
    field, wanted, numbers, rough_namespace, federation, front
):
    federation.upload(2, 1)
    name = f"too-small-{field.lower()}"
    rough_namespace.apply(on_lambda(federation, name, front.name, **{f"function_{field}": wanted}))
    round_ = rough_namespace.end_of(name)
    state, reason, message = rough_namespace.condition(name)
    assert (state, reason) == ("False", "FunctionTooSmall")
    assert numbers in message
    assert f"spec.function.{field} is {wanted}" in message
    assert f"gradsharding lambda deploy --function {front.name}" in message
    assert front.calls == 0
    output = f"{name}.safetensors"
    assert federation.leftovers(output) == [f"{output}.round/{round_['metadata']['uid']}/1/outcome.json"]
