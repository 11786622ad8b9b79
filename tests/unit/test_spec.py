"""The manifest as Python reads it. tests/crd/test_crd.py has the real API server judge the same manifests."""

import dataclasses
import math
import re
from pathlib import Path

import pytest
import yaml
from crd.manifests import (
    ACCEPTED,
    BUCKETS,
    CHOICES,
    DEFAULTS,
    ENDPOINT,
    INTEGERS,
    KEY,
    LAMBDA,
    MINIMAL,
    PREFIX,
    REJECTED,
    SECRETS,
    SECTIONS,
    manifest,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsharding.errors import ManifestError
from gradsharding.rounds import names
from gradsharding.rounds.spec import RoundSpec, cli_uid, load_round, parse_round

CRDS = Path(__file__).parents[2] / "crds"
FULL = manifest(
    LAMBDA
    | {
        "spec.store": {
            "endpoint": "http://minio:9000",
            "region": "eu",
            "credentialsSecretName": "keys",
            "caSecretName": "ca",
        },
        "spec.updates.maxCount": 10,
        "spec.updates.deadlineSeconds": 60,
        "spec.updates.maxNumExamples": 1000,
        "spec.aggregation": {"method": "FedAvg", "weighting": "Uniform", "invalidUpdatePolicy": "Fail"},
        "spec.function.memoryMiB": 512,
        "spec.function.timeoutSeconds": 60,
        "spec.function.backoffLimit": 0,
        "spec.function.maxConcurrency": 4,
        "spec.function.shards": 2,
        "spec.function.lambda.region": "eu-west-1",
        "spec.activeDeadlineSeconds": 3600,
        "spec.suspend": True,
        "spec.ttlSecondsAfterFinished": 0,
    }
)


def complaint(document):
    with pytest.raises(ManifestError) as caught:
        parse_round(document)
    return str(caught.value)


def text_complaint(text):
    with pytest.raises(ManifestError) as caught:
        load_round(text, "round.yaml")
    return str(caught.value)


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case.id)
def test_an_accepted_manifest_survives_a_round_trip(case):
    spec = parse_round(manifest(case.changes))
    assert parse_round(spec.to_manifest()) == spec
    assert load_round(yaml.safe_dump(spec.to_manifest()), "round.yaml") == spec


@pytest.mark.parametrize("case", REJECTED, ids=lambda case: case.id)
def test_a_rejected_manifest_is_told_the_field(case):
    message = complaint(manifest(case.changes))
    assert message.startswith((f"{case.field} ", f"{case.field} is not a field"))
    assert case.words in message
    assert "\n" not in message
    assert len(message) < 300
    assert not case.hidden or case.hidden not in message


def test_every_field_is_read_and_written():
    assert parse_round(FULL).to_manifest() == FULL


def test_defaults_are_filled_in():
    spec = parse_round(MINIMAL).to_manifest()["spec"]
    for section, values in DEFAULTS.items():
        given = MINIMAL["spec"].get(section, {})
        assert spec[section] == (given | values if isinstance(values, dict) else values)
    assert spec.keys() == MINIMAL["spec"].keys() | DEFAULTS.keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spec.updates.minCount": "eight"}, "spec.updates.minCount must be an integer from 1 to 10000, not 'eight'"),
        ({"spec.updates.mincount": 1}, "spec.updates.mincount is not a field: did you mean minCount?"),
        ({"spec.function.memory": "1Gi"}, "spec.function.memory is not a field: did you mean memoryMiB?"),
        ({"spec.zzz": 1}, "spec.zzz is not a field"),
        ({"spec.a\x1b[31m": 1}, "spec.'a\\x1b[31m' is not a field"),
        ({"speck": 1}, "speck is not a field: did you mean spec?"),
        ({"apiVersion": "apps/v1"}, "apiVersion must be gradsharding.dev/v1alpha1; it is 'apps/v1'"),
        ({"kind": "Job"}, "kind must be AggregationRound; it is 'Job'"),
        ({"metadata": {}}, "metadata.name is required"),
        ({"metadata.name": 7}, "metadata.name must be a string, not 7: put it in quotes"),
        (
            {"spec.aggregation.weighting": "uniform"},
            "spec.aggregation.weighting must be NumExamples or Uniform, not 'uniform': did you mean Uniform?",
        ),
        (
            {"spec.function.shards": 10**5000},
            "spec.function.shards must be an integer from 1 to 10000, not a number of more than 19 digits",
        ),
        ({"spec.function.shards": math.nan}, "spec.function.shards must be an integer from 1 to 10000, not nan"),
        (
            {"spec.output": "x" * 999},
            f"spec.output must be a mapping with bucket, key, not '{'x' * 59}... (999 characters)",
        ),
        (
            {"spec.output.key": "\ud800.safetensors"},
            "spec.output.key must not contain control characters; it is '\\ud800.safetensors'",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_messages(changes, message):
    assert complaint(manifest(changes)) == message


@pytest.mark.parametrize("document", [None, [], "text", 7])
def test_a_manifest_is_a_mapping(document):
    assert complaint(document).startswith("the manifest must be a mapping with apiVersion, kind, metadata, spec")


def test_what_the_api_server_adds_is_no_matter():
    stored = manifest({"metadata.uid": "u", "metadata.labels": {"a": "b"}, "status": {"shards": {"total": 8}}})
    assert parse_round(stored) == parse_round(MINIMAL)


# The spec digest: what is in it decides who may take whose output for one's own.


def test_the_digest_is_golden():
    assert parse_round(FULL).digest() == "4ee691fad9daf4604dd6c09332823dc81b625831f8c66c4b71d96c247dada615"
    assert cli_uid(parse_round(MINIMAL)) == "7cbcd437925cb804"


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"metadata.name": "other"}, True),
        ({"spec.store.region": "eu"}, True),
        ({"spec.store.credentialsSecretName": "other"}, True),
        ({"spec.updates.minCount": 1, "spec.updates.maxCount": 9, "spec.updates.deadlineSeconds": 9}, True),
        ({"spec.updates.maxNumExamples": 9}, True),
        ({"spec.function": {"memoryMiB": 512, "shards": 3}}, True),
        ({"spec.suspend": True, "spec.activeDeadlineSeconds": 9, "spec.ttlSecondsAfterFinished": 9}, True),
        ({"spec.aggregation": {"weighting": "NumExamples"}}, True),
        ({"spec.store.endpoint": "http://other"}, False),
        ({"spec.updates.bucket": "other"}, False),
        ({"spec.updates.prefix": "other/"}, False),
        ({"spec.aggregation.weighting": "Uniform"}, False),
        ({"spec.aggregation.invalidUpdatePolicy": "Fail"}, False),
        ({"spec.output.bucket": "other"}, False),
        ({"spec.output.key": "other.safetensors"}, False),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_digest_is_of_what_is_computed_and_where(changes, same):
    assert (parse_round(manifest(changes)).digest() == parse_round(MINIMAL).digest()) == same


def test_another_output_key():
    spec = parse_round(FULL)
    other = spec.with_output_key("other.safetensors")
    assert other == dataclasses.replace(spec, output=dataclasses.replace(spec.output, key="other.safetensors"))
    with pytest.raises(ManifestError, match=r"^spec\.output\.key must not lie under updates\.prefix"):
        spec.with_output_key("digits/7/updates/m.safetensors")


# YAML, perhaps hostile


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "round.yaml: the manifest must be a mapping"),
        ("a: [", "round.yaml, line 1, column 5: expected the node content"),
        ("spec:\n  a: b\n  a: c", "round.yaml, line 3, column 3: 'a' occurs twice"),
        ("1: b\n'1': c", "round.yaml, line 2, column 1: '1' occurs twice"),
        ("? [a]\n: b", "round.yaml, line 1, column 3: a name must be a plain string"),
        ("a: 1\n---\nb: 1", "round.yaml, line 2, column 1: a second document begins"),
        ("a: *b", "round.yaml, line 1, column 4: found undefined alias"),
        ("a: !!int 7", "round.yaml, line 1, column 4: tags (!) are not supported"),
        ("a: !!python/object/apply:os.system [id]", "round.yaml, line 1, column 4: tags (!) are not supported"),
        ("a: &a [*a]", "round.yaml, line 1, column 4: anchors on mappings and lists are not supported"),
        ("a: &a {x: &b y}\nb: {<<: *a}", "round.yaml, line 1, column 4: anchors on mappings and lists"),
        ("<<: {a: 1}", "round.yaml: '<<' is not a field"),
        ("a: 0x_", "round.yaml, line 1, column 4: not a number"),
        ("a: " + "9" * 5000, "round.yaml, line 1, column 4: not a number"),
        ("ok: 1\nb: \x01", "round.yaml, line 2, column 4: a character that YAML does not allow, U+0001"),
        ("a: \t b", "round.yaml, line 1, column 4: found character"),
        ("[" * 60_000, "round.yaml, line 1, column 21: nested too deep"),
        ("- " * 30_000, "round.yaml, line 1, column 41: nested too deep"),
        ("a" * 70_000, "round.yaml has 70000 characters; a manifest has at most 65536"),
    ],
    ids=lambda value: value[:24],
)  # fmt: skip
def test_yaml_complaints(text, message):
    complaint = text_complaint(text)
    assert complaint.startswith(message)
    assert "\n" not in complaint


SAMPLE = (CRDS / "samples" / "round.yaml").read_text()


def spec_or_sentence(read, *arguments):
    try:
        return read(*arguments)
    except ManifestError as error:
        return str(error)


@settings(deadline=None)
@given(st.data())
def test_any_text_is_a_round_or_one_sentence(data):
    start = data.draw(st.integers(0, len(SAMPLE)))
    end = data.draw(st.integers(start, min(start + 20, len(SAMPLE))))
    junk = data.draw(
        st.text(max_size=8) | st.sampled_from(["\t", "&a ", "*a", "!!int ", "0b_", "? ", "<<: ", "- [", "._"])
    )
    got = spec_or_sentence(load_round, SAMPLE[:start] + junk + SAMPLE[end:], "round.yaml")
    assert isinstance(got, RoundSpec) or (got.startswith("round.yaml") and "\n" not in got)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=5,
)


FIELDS = [*INTEGERS, *CHOICES, *BUCKETS, *SECRETS, *SECTIONS, KEY, PREFIX, ENDPOINT, "metadata.name"]


@settings(deadline=None)
@given(st.sampled_from(FIELDS), JSON)
def test_any_value_is_accepted_or_named(path, value):
    got = spec_or_sentence(parse_round, manifest({path: value}))
    if isinstance(got, RoundSpec):
        assert parse_round(got.to_manifest()) == got
    else:
        assert path in got


def test_an_anchor_on_a_word_is_fine():
    text = yaml.safe_dump(MINIMAL).replace("bucket: federation", "bucket: &b federation", 1)
    assert load_round(text.replace("bucket: federation", "bucket: *b"), "round.yaml") == parse_round(MINIMAL)


def test_what_looks_like_a_date_is_a_word_as_it_is_for_kubectl():
    text = yaml.safe_dump(MINIMAL).replace("bucket: federation", "bucket: 2026-11-01")
    assert load_round(text, "round.yaml").output.bucket == "2026-11-01"


def test_the_file_is_named_before_the_field():
    text = yaml.safe_dump(manifest({"spec.updates.minCount": 0}))
    assert text_complaint(text) == "round.yaml: spec.updates.minCount must be an integer from 1 to 10000, not 0"


def test_the_sample_is_valid():
    assert load_round(SAMPLE, "round.yaml").function.memory_mib == 256


# The CRD's text, where no server is needed to compare it


@pytest.fixture(scope="module")
def schema():
    crd = yaml.safe_load((CRDS / "aggregationrounds.yaml").read_text())
    return crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def field(schema, path):
    for name in path.split("."):
        schema = schema["properties"][name]
    return schema


def nodes(schema, name="AggregationRound"):
    yield name, schema
    for child, node in schema.get("properties", {}).items():
        yield from nodes(node, child)
    if "items" in schema:
        yield from nodes(schema["items"], name)


def test_the_crd_has_the_same_bounds_and_words(schema):
    for path, (low, high) in INTEGERS.items():
        node = field(schema, path)
        assert (node["minimum"], node["maximum"]) == (1 if path == "spec.updates.maxCount" else low, high), path
    for path, values in CHOICES.items():
        assert field(schema, path)["enum"] == values


def test_the_crd_has_the_same_messages(schema):
    messages = {rule["message"] for _, node in nodes(schema) for rule in node.get("x-kubernetes-validations", [])}
    for rules in (names.SECRET, names.ENDPOINT, names.REGION, names.BUCKET, names.FUNCTION, names.PREFIX, names.KEY):
        assert {rule.words for rule in rules} <= messages
    assert f"metadata.name {names.ROUND[0].words}" in messages


def test_every_field_of_the_crd_is_described_and_every_string_is_bounded(schema):
    for name, node in nodes(schema):
        if name == "metadata":
            continue
        assert re.match(rf"{name}(\[\])? ", node["description"]), f"{name}: {node['description']}"
        if node["type"] == "string" and name not in ("apiVersion", "kind"):
            assert node.keys() & {"maxLength", "enum", "format"}, name
