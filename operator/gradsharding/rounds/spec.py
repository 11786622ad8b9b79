"""The manifest of a round, from a file or from Kubernetes, as a frozen RoundSpec that is known to be valid.

``crds/aggregationrounds.yaml`` holds the same rules and defaults for the API server; ``tests/crd`` has both judge the
same manifests. Defaults are filled in; a field that is None is unset.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from gradsharding.errors import ManifestError
from gradsharding.rounds import names
from gradsharding.rounds.fields import Fields
from gradsharding.rounds.manifest_yaml import read_document
from gradsharding_reducer.task import MAX_WEIGHT, METHODS, canonical_json

API_VERSION = "gradsharding.dev/v1alpha1"
KIND = "AggregationRound"

WEIGHTINGS = ("NumExamples", "Uniform")
INVALID_UPDATE_POLICIES = ("Exclude", "Fail")
PLATFORMS = ("Knative", "Lambda")

_YEAR = 365 * 24 * 3600
_COUNT = range(1, 10_000 + 1)
_SECONDS = range(1, _YEAR + 1)
_LAMBDA_MIN_MEMORY_MIB = 128


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """Where the objects are. ``endpoint`` None: AWS S3. The Secrets lie in the round's namespace."""

    endpoint: str | None
    region: str
    credentials_secret_name: str | None
    ca_secret_name: str | None


@dataclass(frozen=True, slots=True)
class UpdatesSpec:
    """Which objects are updates, and how many accepted ones start the round. ``max_count`` None: at the deadline."""

    bucket: str
    prefix: str
    min_count: int
    max_count: int | None
    deadline_seconds: int
    max_num_examples: int


@dataclass(frozen=True, slots=True)
class AggregationSpec:
    """What is computed: the method, the weights, and what becomes of an update with bad values."""

    method: str
    weighting: str
    invalid_update_policy: str


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """Where the result goes."""

    bucket: str
    key: str


@dataclass(frozen=True, slots=True)
class LambdaSpec:
    """A deployed AWS Lambda function, by name or ARN. ``region`` None: the store's."""

    function_name: str
    region: str | None


@dataclass(frozen=True, slots=True)
class FunctionSettings:
    """What one function gets. ``shards`` None: as many as useful up to ``max_concurrency``.

    ``aws_lambda`` is there when the platform is Lambda, and only then.
    """

    platform: str
    memory_mib: int
    timeout_seconds: int
    backoff_limit: int
    max_concurrency: int
    shards: int | None
    aws_lambda: LambdaSpec | None


@dataclass(frozen=True, slots=True)
class RoundSpec:
    """One round as the user asked for it. The two last durations are in seconds; None: no limit, kept for ever."""

    name: str
    store: StoreSpec
    updates: UpdatesSpec
    aggregation: AggregationSpec
    output: OutputSpec
    function: FunctionSettings
    active_deadline_seconds: int | None
    suspend: bool
    ttl_seconds_after_finished: int | None

    def digest(self) -> str:
        """The *spec digest*, 64 hex digits: equal for rounds that put the same thing in the same place."""
        manifest = self.to_manifest()["spec"]
        identity = {
            "endpoint": self.store.endpoint,
            "updates": {"bucket": self.updates.bucket, "prefix": self.updates.prefix},
            "aggregation": manifest["aggregation"],
            "output": manifest["output"],
        }
        return hashlib.sha256(canonical_json(identity)).hexdigest()

    def with_output_key(self, key: str) -> RoundSpec:
        """The same round with another output key. Raises ManifestError when that key is not valid here."""
        return parse_round(replace(self, output=replace(self.output, key=key)).to_manifest())

    def to_manifest(self) -> dict[str, Any]:
        """The manifest, with defaults and without unset fields; ``parse_round`` gives an equal RoundSpec back."""
        spec = _camel_case(self)
        name = spec.pop("name")
        return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec}


def load_round(text: str, where: str) -> RoundSpec:
    """The round of a YAML file's ``text``. Raises ManifestError, which begins with ``where``, the file's name."""
    document = read_document(text, where)
    try:
        return parse_round(document)
    except ManifestError as error:
        raise ManifestError(f"{where}: {error}") from None


def parse_round(document: object) -> RoundSpec:
    """The round of a manifest, as read from YAML or as the API server gives it.

    Raises ManifestError, which begins with the field's path.
    """
    manifest = Fields(document, "", ("apiVersion", "kind", "metadata", "spec", "status"))
    for name, value in (("apiVersion", API_VERSION), ("kind", KIND)):
        manifest.text(name, (names.Rule(value.__eq__, f"must be {value}"),))
    name = manifest.section("metadata", None, required=True).text("name", names.ROUND)
    spec = manifest.section("spec", _SPEC, required=True)
    updates = _updates(spec)
    return RoundSpec(
        name=name,
        store=_store(spec),
        updates=updates,
        aggregation=_aggregation(spec),
        output=_output(spec, updates),
        function=_function(spec),
        active_deadline_seconds=spec.integer("activeDeadlineSeconds", _SECONDS, None),
        suspend=spec.boolean("suspend", default=False),
        ttl_seconds_after_finished=spec.integer("ttlSecondsAfterFinished", range(_YEAR + 1), None),
    )


def cli_uid(spec: RoundSpec) -> str:
    """What stands for a custom resource's uid where there is no cluster: the first 16 hex digits of the spec digest."""
    return spec.digest()[:16]


_SPEC = (
    "updates", "output", "store", "aggregation", "function",
    "activeDeadlineSeconds", "suspend", "ttlSecondsAfterFinished",
)  # fmt: skip


def _store(spec: Fields) -> StoreSpec:
    at = spec.section("store", ("endpoint", "region", "credentialsSecretName", "caSecretName"))
    return StoreSpec(
        endpoint=at.text("endpoint", names.ENDPOINT, None, hide=True),
        region=at.text("region", names.REGION, "us-east-1"),
        credentials_secret_name=at.text("credentialsSecretName", names.SECRET, None, hide=True),
        ca_secret_name=at.text("caSecretName", names.SECRET, None),
    )


def _updates(spec: Fields) -> UpdatesSpec:
    at = spec.section(
        "updates", ("bucket", "prefix", "minCount", "maxCount", "deadlineSeconds", "maxNumExamples"), required=True
    )
    updates = UpdatesSpec(
        bucket=at.text("bucket", names.BUCKET),
        prefix=at.text("prefix", names.PREFIX),
        min_count=at.integer("minCount", _COUNT),
        max_count=at.integer("maxCount", _COUNT, None),
        deadline_seconds=at.integer("deadlineSeconds", _SECONDS, 600),
        max_num_examples=at.integer("maxNumExamples", range(1, MAX_WEIGHT + 1), MAX_WEIGHT),
    )
    if updates.max_count is not None and updates.max_count < updates.min_count:
        raise ManifestError(
            f"{at.path('maxCount')} must be at least minCount, {updates.min_count}, not {updates.max_count}"
        )
    return updates


def _aggregation(spec: Fields) -> AggregationSpec:
    at = spec.section("aggregation", ("method", "weighting", "invalidUpdatePolicy"))
    return AggregationSpec(
        method=at.choice("method", sorted(METHODS), "FedAvg"),
        weighting=at.choice("weighting", WEIGHTINGS, "NumExamples"),
        invalid_update_policy=at.choice("invalidUpdatePolicy", INVALID_UPDATE_POLICIES, "Exclude"),
    )


def _output(spec: Fields, updates: UpdatesSpec) -> OutputSpec:
    at = spec.section("output", ("bucket", "key"), required=True)
    output = OutputSpec(bucket=at.text("bucket", names.BUCKET), key=at.text("key", names.KEY))
    if output.bucket == updates.bucket:
        if output.key.startswith(updates.prefix):
            raise ManifestError(f"{at.path('key')} must not lie under updates.prefix: it would be taken for an update")
        if updates.prefix.startswith((f"{output.key}/", f"{output.key}.round/")):
            raise ManifestError(
                f"{at.path('key')} must not hold updates.prefix: what lies under '<key>.round/' is removed at the end"
            )
    return output


def _function(spec: Fields) -> FunctionSettings:
    at = spec.section(
        "function", ("platform", "memoryMiB", "timeoutSeconds", "backoffLimit", "maxConcurrency", "shards", "lambda")
    )
    platform = at.choice("platform", PLATFORMS, "Knative")
    memory_mib = at.integer("memoryMiB", range(96, 10_240 + 1), 256)
    if platform == "Lambda" and memory_mib < _LAMBDA_MIN_MEMORY_MIB:
        raise ManifestError(f"{at.path('memoryMiB')} must be at least 128 on Lambda, not {memory_mib}")
    if at.given("lambda") != (platform == "Lambda"):
        raise ManifestError(
            f"{at.path('lambda')} must be given with platform: Lambda, and only with it; the platform is {platform}"
        )
    return FunctionSettings(
        platform=platform,
        memory_mib=memory_mib,
        timeout_seconds=at.integer("timeoutSeconds", range(10, 900 + 1), 300),
        backoff_limit=at.integer("backoffLimit", range(20 + 1), 3),
        max_concurrency=at.integer("maxConcurrency", range(1, 1000 + 1), 16),
        shards=at.integer("shards", _COUNT, None),
        aws_lambda=_lambda(at) if at.given("lambda") else None,
    )


def _lambda(function: Fields) -> LambdaSpec:
    at = function.section("lambda", ("functionName", "region"))
    return LambdaSpec(
        function_name=at.text("functionName", names.FUNCTION), region=at.text("region", names.REGION, None)
    )


_IRREGULAR = {"memory_mib": "memoryMiB", "aws_lambda": "lambda"}


def _camel_case(section: Any) -> dict[str, Any]:
    """A dataclass of this file as a mapping with the manifest's names, without what is None."""
    document = {}
    for field in fields(section):
        value = getattr(section, field.name)
        if value is not None:
            first, *rest = field.name.split("_")
            name = _IRREGULAR.get(field.name) or first + "".join(map(str.capitalize, rest))
            document[name] = _camel_case(value) if is_dataclass(value) else value
    return document
