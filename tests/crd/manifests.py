"""Manifests for every rule of a round, accepted and rejected, for parse_round and the real API server alike."""

import copy
from typing import Any, NamedTuple

API_VERSION = "gradsharding.dev/v1alpha1"

MINIMAL = {
    "apiVersion": API_VERSION,
    "kind": "AggregationRound",
    "metadata": {"name": "digits-7"},
    "spec": {
        "updates": {"bucket": "federation", "prefix": "digits/7/updates/", "minCount": 8},
        "output": {"bucket": "federation", "key": "digits/7/model.safetensors"},
    },
}

DEFAULTS = {
    "store": {"region": "us-east-1"},
    "updates": {"deadlineSeconds": 600, "maxNumExamples": 2**53},
    "aggregation": {"method": "FedAvg", "weighting": "NumExamples", "invalidUpdatePolicy": "Exclude"},
    "function": {
        "platform": "Knative",
        "memoryMiB": 256,
        "timeoutSeconds": 300,
        "backoffLimit": 3,
        "maxConcurrency": 16,
    },
    "suspend": False,
}
"""What both must add to MINIMAL's spec."""

ABSENT = object()


def manifest(changes: dict[str, Any], base: dict[str, Any] = MINIMAL) -> dict[str, Any]:
    """The base with dotted paths set to values, or removed (ABSENT)."""
    document: dict[str, Any] = copy.deepcopy(base)
    for path, value in changes.items():
        *parents, name = path.split(".")
        section = document
        for parent in parents:
            section = section.setdefault(parent, {})
        if value is ABSENT:
            del section[name]
        else:
            section[name] = copy.deepcopy(value)
    return document


class Good(NamedTuple):
    id: str
    changes: dict[str, Any]


class Bad(NamedTuple):
    """``field`` is in both messages; ``words`` too, where the rule is ours and not one of the server's own."""

    id: str
    changes: dict[str, Any]
    field: str
    words: str = ""
    hidden: str = ""
    """What our message must not repeat."""


KEY, PREFIX, ENDPOINT = "spec.output.key", "spec.updates.prefix", "spec.store.endpoint"
LAMBDA = {"spec.function.platform": "Lambda", "spec.function.lambda": {"functionName": "reducer"}}
FUNCTION_NAME = "spec.function.lambda.functionName"
ARN = "arn:aws:lambda:eu-central-1:123456789012:function:reducer"

INTEGERS = {
    "spec.updates.minCount": (1, 10_000),
    "spec.updates.maxCount": (8, 10_000),
    "spec.updates.deadlineSeconds": (1, 31_536_000),
    "spec.updates.maxNumExamples": (1, 2**53),
    "spec.function.memoryMiB": (96, 10_240),
    "spec.function.timeoutSeconds": (10, 900),
    "spec.function.backoffLimit": (0, 20),
    "spec.function.maxConcurrency": (1, 1000),
    "spec.function.shards": (1, 10_000),
    "spec.activeDeadlineSeconds": (1, 31_536_000),
    "spec.ttlSecondsAfterFinished": (0, 31_536_000),
}
CHOICES = {
    "spec.aggregation.method": ["FedAvg"],
    "spec.aggregation.weighting": ["NumExamples", "Uniform"],
    "spec.aggregation.invalidUpdatePolicy": ["Exclude", "Fail"],
}
BUCKETS = ("spec.updates.bucket", "spec.output.bucket")
REGIONS = ("spec.store.region", "spec.function.lambda.region")
SECRETS = ("spec.store.credentialsSecretName", "spec.store.caSecretName")
REQUIRED = (
    "spec.updates",
    "spec.updates.bucket",
    "spec.updates.prefix",
    "spec.updates.minCount",
    "spec.output",
    "spec.output.bucket",
    "spec.output.key",
)
SECTIONS = ("spec.store", "spec.updates", "spec.aggregation", "spec.output", "spec.function")


def key(text: str) -> dict[str, Any]:
    return {KEY: text}


def prefix(text: str) -> dict[str, Any]:
    return {PREFIX: text}


ACCEPTED = [
    Good("minimal", {}),
    Good("null-is-unset", {"spec.store": None, "spec.updates.maxCount": None, "spec.function.lambda": None}),
    Good("whole-number-with-point", {"spec.updates.minCount": 8.0}),
    Good("empty-sections", {"spec.store": {}, "spec.aggregation": {}, "spec.function": {}}),
    Good("longest-name", {"metadata.name": "a" * 52}),
    Good("digit-name", {"metadata.name": "7"}),
    Good("suspended", {"spec.suspend": True}),
    Good("lambda", LAMBDA),
    Good("lambda-arn", LAMBDA | {FUNCTION_NAME: f"{ARN}:$LATEST", "spec.function.lambda.region": "eu-central-1"}),
    Good("lambda-alias", LAMBDA | {FUNCTION_NAME: "reducer_2:prod-1"}),
    Good("lambda-least-memory", LAMBDA | {"spec.function.memoryMiB": 128}),
    Good("max-is-min", {"spec.updates.minCount": 8, "spec.updates.maxCount": 8}),
    Good("longest-bucket", {"spec.output.bucket": "a" * 63}),
    Good("dotted-bucket", {"spec.updates.bucket": "models.example-1.org"}),
    Good("shortest-bucket", {"spec.updates.bucket": "a1b"}),
    Good("key-at-the-root", key("m.safetensors")),
    Good("key-with-dots", key("a/..b/c..d/.e/m.safetensors")),
    Good("key-with-spaces", key("a b/ü?#%/m.safetensors")),
    Good("longest-key", key("k" * 888 + ".safetensors")),
    Good("longest-two-byte-key", key("ü" * 444 + ".safetensors")),
    Good("longest-prefix", prefix("p" * 899 + "/")),
    Good("key-beside-prefix", key("digits/7/updates.safetensors")),
    Good("key-under-prefix-of-other-bucket", {"spec.output.bucket": "models", KEY: "digits/7/updates/m.safetensors"}),
    Good("prefix-under-key-of-other-bucket", {"spec.output.bucket": "models", PREFIX: "digits/7/model.safetensors/"}),
    Good("prefix-beside-round", prefix("digits/7/model.safetensors.rounds/")),
    *(
        Good(f"endpoint-{i}", {ENDPOINT: text})
        for i, text in enumerate(
            (
                "http://minio.storage.svc.cluster.local:9000",
                "https://s3.example.org",
                "http://10.99.0.1:8333",
                "http://[fd00::1]:9000",
                "https://[::1]",
                "http://localhost:65535",
            )
        )
    ),
    *(
        Good(f"{path}={value}", {path: value})
        for path, bounds in INTEGERS.items()
        if path != "spec.updates.maxCount"
        for value in bounds
    ),
    Good("spec.updates.maxCount=10000", {"spec.updates.maxCount": 10_000}),
    *(Good(f"{path}={value}", {path: value}) for path, values in CHOICES.items() for value in values),
    *(Good(path, (LAMBDA if "lambda" in path else {}) | {path: "Region_One-1"}) for path in REGIONS),
    *(Good(path, {path: "store.keys-1"}) for path in SECRETS),
]

REJECTED = [
    # Names and forms
    Bad("name-too-long", {"metadata.name": "a" * 53}, "metadata.name", "must be at most 52 lower-case letters"),
    Bad("name-with-dot", {"metadata.name": "a.b"}, "metadata.name", "must be at most 52 lower-case letters"),
    Bad("name-upper-case", {"metadata.name": "Digits"}, "metadata.name"),
    Bad("name-with-hyphen-at-end", {"metadata.name": "digits-"}, "metadata.name"),
    Bad("no-spec", {"spec": ABSENT}, "spec"),
    Bad("null-spec", {"spec": None}, "spec"),
    *(Bad(f"no-{path}", {path: ABSENT}, path, "equired") for path in REQUIRED),
    *(Bad(f"null-{path}", {path: None}, path) for path in REQUIRED),
    Bad("no-function-name", LAMBDA | {"spec.function.lambda": {}}, FUNCTION_NAME, "equired"),
    *(Bad(f"list-for-{path}", {path: []}, path) for path in SECTIONS),
    *(Bad(f"unknown-in-{path}", {f"{path}.colour": 1}, f"{path}.colour") for path in ("spec", *SECTIONS)),
    Bad("unknown-in-lambda", LAMBDA | {"spec.function.lambda.arn": ARN}, "spec.function.lambda.arn"),
    Bad("typo", {"spec.updates.mincount": 8}, "spec.updates.mincount"),
    *(Bad(f"number-for-{path}", {path: 7}, path) for path in (KEY, PREFIX, ENDPOINT, *BUCKETS, *SECRETS)),
    Bad("text-for-suspend", {"spec.suspend": "true"}, "spec.suspend"),
    # Integers
    *(Bad(f"{path}={low - 1}", {path: low - 1}, path) for path, (low, _) in INTEGERS.items()),
    *(Bad(f"{path}={high + 1}", {path: high + 1}, path) for path, (_, high) in INTEGERS.items()),
    *(Bad(f"{path}=text", {path: "8"}, path) for path in INTEGERS),
    *(Bad(f"{path}=half", {path: 12.5}, path) for path in INTEGERS),
    *(Bad(f"{path}=true", {path: True}, path) for path in INTEGERS),
    Bad("max-under-min", {"spec.updates.maxCount": 7}, "spec.updates.maxCount", "must be at least minCount"),
    # Words
    *(Bad(f"{path}=fedavg", {path: "fedavg"}, path) for path in (*CHOICES, "spec.function.platform")),
    Bad("platform-local", {"spec.function.platform": "Local"}, "spec.function.platform"),
    # Platform
    Bad(
        "lambda-without-name",
        {"spec.function.platform": "Lambda"},
        "spec.function.lambda",
        "must be given with platform",
    ),
    Bad(
        "name-without-lambda",
        LAMBDA | {"spec.function.platform": "Knative"},
        "spec.function.lambda",
        "must be given with",
    ),
    Bad(
        "name-with-default-platform",
        {"spec.function.lambda": {"functionName": "f"}},
        "spec.function.lambda",
        "only with it",
    ),
    Bad(
        "lambda-memory",
        LAMBDA | {"spec.function.memoryMiB": 127},
        "spec.function.memoryMiB",
        "must be at least 128 on Lambda",
    ),
    *(
        Bad(f"function-name-{text[:12]}", LAMBDA | {FUNCTION_NAME: text}, FUNCTION_NAME, "must be the name or ARN")
        for text in ("", "a b", "a" * 65, "f:", "arn:aws:lambda:eu:1:function:f", "f:$OTHER", "f\n")
    ),
    # Store
    *(
        Bad(f"endpoint-{text[:28]}", {ENDPOINT: text}, ENDPOINT, "must be http:// or https://", hidden=hidden)
        for text, hidden in (
            ("", ""),
            ("minio.test:9000", "minio.test"),
            ("ftp://minio", ""),
            ("http://", ""),
            ("http://minio/", ""),
            ("http://minio:9000/bucket", "bucket"),
            ("http://minio?X-Amz-Signature=abc", "abc"),
            ("http://minio#x", ""),
            ("http://user:password@minio", "password"),
            ("http://Minio", ""),
            ("HTTP://minio", ""),
            ("http://minio:", ""),
            ("http://minio:0", ""),
            ("http://mi nio", ""),
            ("http://-minio", ""),
            ("http://fd00::1", ""),
            ("http://minio\n", ""),
        )
    ),
    Bad("endpoint-port", {ENDPOINT: "http://minio:65536"}, ENDPOINT, "must have a port from 1 to 65535"),
    Bad("endpoint-too-long", {ENDPOINT: "http://" + "a" * 300}, ENDPOINT),
    *(
        Bad(f"{path}={text[:9]}", (LAMBDA if "lambda" in path else {}) | {path: text}, path, "must be 1 to 63 letters")
        for path in REGIONS
        for text in ("", "us east", "eu/1", "us-east-1\n")
    ),
    *(Bad(f"{path}-too-long", (LAMBDA if "lambda" in path else {}) | {path: "a" * 64}, path) for path in REGIONS),
    *(
        Bad(f"{path}={text}", {path: text}, path, "must be the name of a Secret", hidden=text if "cred" in path else "")
        for path in SECRETS
        for text in ("", "AKIAEXAMPLE", "a_b", "a/b", ".a", "a..b")
    ),
    *(Bad(f"{path}-too-long", {path: "a" * 254}, path) for path in SECRETS),
    # Buckets
    *(
        Bad(f"{path}={text}", {path: text}, path, "must be 3 to 63 lower-case letters")
        for path in BUCKETS
        for text in (
            "",
            "ab",
            "Models",
            "a_b",
            "-abc",
            "abc-",
            ".abc",
            "abc.",
            "a..b",
            "a.-b",
            "a-.b",
            "s3://abc",
            "abc/",
        )
    ),
    *(Bad(f"{path}-too-long", {path: "a" * 64}, path) for path in BUCKETS),
    *(Bad(f"{path}-address", {path: "10.0.0.1"}, path, "must not look like an IP address") for path in BUCKETS),
    # Keys
    Bad("empty-prefix", prefix(""), PREFIX, "must end with '/'"),
    Bad("prefix-without-slash", prefix("digits/7"), PREFIX, "must end with '/'"),
    Bad("root-prefix", prefix("/"), PREFIX, "must not start with '/'"),
    Bad("absolute-prefix", prefix("/digits/"), PREFIX, "must not start with '/'"),
    Bad("empty-segment-in-prefix", prefix("digits//7/"), PREFIX, "must not contain '//'"),
    Bad("prefix-goes-up", prefix("digits/../7/"), PREFIX, "must not contain '.' or '..'"),
    Bad("prefix-begins-up", prefix("../"), PREFIX, "must not contain '.' or '..'"),
    Bad("prefix-dot", prefix("./a/"), PREFIX, "must not contain '.' or '..'"),
    Bad("prefix-with-tab", prefix("a\tb/"), PREFIX, "must not contain control characters"),
    Bad("prefix-too-long", prefix("p" * 900 + "/"), PREFIX),
    Bad("prefix-too-many-bytes", prefix("ü" * 450 + "/"), PREFIX, "must be at most 900 bytes"),
    Bad("empty-key", key(""), KEY, "must end with '.safetensors'"),
    Bad("npy-key", key("digits/7/model.npy"), KEY, "must end with '.safetensors'"),
    Bad("key-with-line-end", key("m.safetensors\n"), KEY, "must end with '.safetensors'"),
    Bad("absolute-key", key("/m.safetensors"), KEY, "must not start with '/'"),
    Bad("empty-segment-in-key", key("a//m.safetensors"), KEY, "must not contain '//'"),
    Bad("key-goes-up", key("a/../m.safetensors"), KEY, "must not contain '.' or '..'"),
    Bad("key-dot", key("a/./m.safetensors"), KEY, "must not contain '.' or '..'"),
    *(
        Bad(f"key-with-{ord(c):02x}", key(f"a{c}m.safetensors"), KEY, "must not contain control characters")
        for c in ("\0", "\n", "\x1b", "\x7f", "\x9f")
    ),
    Bad("key-too-long", key("k" * 889 + ".safetensors"), KEY),
    Bad("key-too-many-bytes", key("ü" * 445 + ".safetensors"), KEY, "must be at most 900 bytes"),
    Bad("key-under-prefix", key("digits/7/updates/m.safetensors"), KEY, "must not lie under updates.prefix"),
    Bad("prefix-in-round", prefix("digits/7/model.safetensors.round/x/"), KEY, "must not hold updates.prefix"),
    Bad("prefix-is-round", prefix("digits/7/model.safetensors.round/"), KEY, "must not hold updates.prefix"),
    Bad("prefix-under-key", prefix("digits/7/model.safetensors/"), KEY, "must not hold updates.prefix"),
]

ALLOWED_CHANGES = [
    Good("suspend", {"spec.suspend": True}),
    Good("resume", {"spec.suspend": False}),
]
"""Applied one after another to one object, all unlike what was there before."""

REFUSED_CHANGES = [
    Good("store", {"spec.store.region": "eu-central-1"}),
    Good("updates", {"spec.updates.minCount": 7}),
    Good("updates-field-added", {"spec.updates.maxCount": 9}),
    Good("aggregation", {"spec.aggregation.weighting": "Uniform"}),
    Good("output", {KEY: "digits/8/model.safetensors"}),
    Good("function", {"spec.function.memoryMiB": 512}),
    Good("platform", LAMBDA),
    Good("deadline-changed", {"spec.activeDeadlineSeconds": 3601}),
    Good("deadline-removed", {"spec.activeDeadlineSeconds": None}),
    Good("ttl-added", {"spec.ttlSecondsAfterFinished": 0}),
    Good("suspend-and-more", {"spec.suspend": True, "spec.function.shards": 2}),
]
"""Merge patches of an object with ``activeDeadlineSeconds: 3600`` and without ``ttlSecondsAfterFinished``."""
