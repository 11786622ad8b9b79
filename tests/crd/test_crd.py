"""The CRD on a real API server. tests/unit/test_spec.py has parse_round judge the same manifests."""

import json
import uuid
from pathlib import Path

import pytest
from cluster import kubectl, require_test_cluster
from crd.manifests import ACCEPTED, ALLOWED_CHANGES, DEFAULTS, MINIMAL, REFUSED_CHANGES, REJECTED, manifest

from gradsharding.rounds.spec import parse_round

pytestmark = pytest.mark.cluster

CRDS = Path(__file__).parents[2] / "crds"
NAMESPACE = f"gradsharding-crd-{uuid.uuid4().hex[:8]}"
BASE = manifest({"metadata.name": "changes", "spec.activeDeadlineSeconds": 3600})


@pytest.fixture(scope="module", autouse=True)
def namespace():
    require_test_cluster()
    kubectl("apply", "-f", str(CRDS))
    kubectl("wait", "--for=condition=Established", "crd/aggregationrounds.gradsharding.dev", "--timeout=30s")
    kubectl("create", "namespace", NAMESPACE)
    yield NAMESPACE
    kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def in_namespace(*arguments, **keywords):
    return kubectl("-n", NAMESPACE, *arguments, **keywords)


def dry_run(document, *, check=True):
    return in_namespace("create", "--dry-run=server", "-o", "json", "-f", "-", document=document, check=check)


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case.id)
def test_the_server_accepts_and_agrees_with_parse_round_on_every_value(case):
    document = manifest(case.changes)
    stored = json.loads(dry_run(document).stdout)
    assert parse_round(stored) == parse_round(document)


@pytest.mark.parametrize("case", REJECTED, ids=lambda case: case.id)
def test_the_server_rejects(case):
    process = dry_run(manifest(case.changes), check=False)
    assert process.returncode, f"accepted: {process.stdout}"
    assert case.field in process.stderr
    assert case.words in process.stderr


def test_defaults():
    spec = json.loads(dry_run(MINIMAL).stdout)["spec"]
    for section, values in DEFAULTS.items():
        given = MINIMAL["spec"].get(section, {})
        assert spec[section] == (given | values if isinstance(values, dict) else values)
    assert spec.keys() == MINIMAL["spec"].keys() | DEFAULTS.keys()


def test_the_sample_is_accepted():
    in_namespace("create", "--dry-run=server", "-f", str(CRDS / "samples" / "round.yaml"))


@pytest.fixture(scope="module")
def created(namespace):
    in_namespace("create", "-f", "-", document=BASE)
    return "aggregationround/changes"


def patch(target, document, *options, check=True):
    return in_namespace("patch", target, "--type=merge", "-p", json.dumps(document), *options, check=check)


@pytest.mark.parametrize("case", REFUSED_CHANGES, ids=lambda case: case.id)
def test_the_spec_cannot_be_changed(created, case):
    process = patch(created, manifest(case.changes, {}), "--dry-run=server", check=False)
    assert process.returncode, f"changed: {process.stdout}"
    assert "spec: Invalid value" in process.stderr
    assert "cannot be changed, except suspend" in process.stderr


def test_a_round_can_be_suspended_and_resumed(created):
    for case in ALLOWED_CHANGES:
        assert "(no change)" not in patch(created, manifest(case.changes, {})).stdout


def test_applying_the_same_manifest_again_changes_nothing(created):
    """Defaults that the server filled in, and unset fields that are written as null, are no change."""
    before = in_namespace("get", created, "-o", "jsonpath={.metadata.generation}").stdout
    in_namespace("replace", "-f", "-", document=manifest({"spec.function": None, "spec.updates.maxCount": None}, BASE))
    assert in_namespace("get", created, "-o", "jsonpath={.metadata.generation}").stdout == before


def condition(kind, status, reason):
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": "",
        "lastTransitionTime": "2026-11-01T00:00:00Z",
        "observedGeneration": 1,
    }


STATUS = {
    "observedGeneration": 1,
    "conditions": [condition("Collected", "True", "QuorumReached"), condition("Succeeded", "Unknown", "Reducing")],
    "updates": {"found": 12, "accepted": 11, "rejected": 1, "excluded": 1, "participants": 10},
    "shards": {"total": 8, "active": 3, "succeeded": 5, "retried": 1, "progress": "5/8"},
    "plan": {"revision": 1, "sha256": "0" * 64},
    "output": {"bytes": 5_370_000_000, "etag": "abc-32", "manifest": "digits/7/model.safetensors.manifest.json"},
    "startTime": "2026-11-01T00:00:00Z",
    "completionTime": "2026-11-01T00:10:00Z",
}


def test_the_status_is_a_subresource_and_is_printed(created):
    patch(created, {"status": STATUS})
    assert not in_namespace("get", created, "-o", "jsonpath={.status}").stdout
    patch(created, {"status": STATUS}, "--subresource=status")
    assert json.loads(in_namespace("get", created, "-o", "jsonpath={.status}").stdout) == STATUS

    headings, row = (line.split() for line in in_namespace("get", "agground", "changes").stdout.splitlines())
    assert headings == ["NAME", "SUCCEEDED", "REASON", "UPDATES", "SHARDS", "AGE"]
    assert row[:5] == ["changes", "Unknown", "Reducing", "11", "5/8"]
    wide = in_namespace("get", "gradsharding", "-o", "wide").stdout.splitlines()
    assert wide[0].split()[5:7] == ["PLATFORM", "OUTPUT"]
    assert wide[1].split()[5:7] == ["Knative", "digits/7/model.safetensors"]


@pytest.mark.parametrize(
    ("conditions", "words"),
    [
        ([condition("Succeeded", "True", "Done"), condition("Succeeded", "False", "Done")], "Duplicate value"),
        ([condition("Succeeded", "Perhaps", "Done")], "status.conditions[0].status"),
        ([condition("Succeeded", "True", "no reason")], "status.conditions[0].reason"),
    ],
    ids=["twice", "status", "reason"],
)
def test_conditions_are_a_map_of_types(created, conditions, words):
    document = {"status": {"conditions": conditions}}
    process = patch(created, document, "--subresource=status", "--dry-run=server", check=False)
    assert process.returncode
    assert words in process.stderr
