"""A bucket with updates in it, the round that averages them, and what must come out."""

import json
import uuid
from contextlib import suppress
from urllib.parse import urlsplit

import numpy as np
import safetensors.numpy
from minio import Minio
from minio.error import S3Error
from rounds_kit import mean

from gradsharding.credentials import static
from gradsharding.s3 import S3Bucket

MIB = 1 << 20


class Store:
    """An S3 store under its own address."""

    def __init__(self, endpoint, keys, region):
        self.endpoint, self.keys, self.region = endpoint, keys, region
        parts = urlsplit(endpoint)
        self.address = parts.netloc
        self.minio = Minio(parts.netloc, *keys, secure=parts.scheme == "https", region=region)

    def federation(self, **options):
        return Federation(self, **options)


class Federation:
    """``via``: the endpoint that the round names, when that is a proxy. One bucket for each, removed at the end."""

    def __init__(self, store, via=None):
        self.store, self.endpoint = store, via or store.endpoint
        self.name = f"gradsharding-e2e-{uuid.uuid4().hex[:10]}"
        store.minio.make_bucket(self.name)
        self.bucket = S3Bucket.connect(store.endpoint, self.name, store.region, static(*store.keys))
        self.updates, self._outputs = {}, set()

    def upload(self, clients, mib, seed=0, prefix="updates/"):
        """Updates of so many clients, of so many MiB each, with weights 10, 11, …"""
        for i in range(clients):
            self.put(f"{prefix}client-{i}.safetensors", tensors(mib, seed + i), 10 + i)

    def put(self, key, values, examples):
        self.bucket.put(key, safetensors.numpy.save(values, metadata={"num_examples": str(examples)}))
        self.updates[key] = values, examples

    def manifest(self, name, output="model.safetensors", **changes):
        """A round; ``updates_minCount=3`` sets spec.updates.minCount, ``suspend=True`` spec.suspend."""
        clients = len(self.updates)
        self._outputs.add(output)
        spec = {
            "store": {"endpoint": self.endpoint, "region": self.store.region, "credentialsSecretName": "store-credentials"},
            "updates": {
                "bucket": self.name, "prefix": "updates/", "minCount": clients, "maxCount": clients, "deadlineSeconds": 600,
            },
            "aggregation": {},
            "output": {"bucket": self.name, "key": output},
            "function": {"memoryMiB": 128, "shards": 4, "maxConcurrency": 4, "timeoutSeconds": 120},
        }  # fmt: skip
        for path, value in changes.items():
            section, _, field = path.partition("_")
            if field:
                spec[section][field] = value
            else:
                spec[section] = value
        head = {"apiVersion": "gradsharding.dev/v1alpha1", "kind": "AggregationRound", "metadata": {"name": name}}
        return head | {"spec": spec}

    def expected(self, without=()):
        """The data section of the plain reference's result."""
        rows = [self.updates[key] for key in sorted(self.updates) if key not in without]
        return data_section(safetensors.numpy.save(mean(rows)))

    def result(self, output="model.safetensors"):
        """The data section of the output."""
        answer = self.store.minio.get_object(self.name, output)
        try:
            return data_section(answer.read())
        finally:
            answer.close()
            answer.release_conn()

    def document(self, output="model.safetensors"):
        """The manifest beside the output."""
        return json.loads(self.bucket.get(f"{output}.manifest.json"))

    def keys(self):
        """All that is not an update."""
        return [info.key for info in self.bucket.list("") if not info.key.startswith("updates/")]

    def is_clean(self, output="model.safetensors"):
        """Of this output there is no scratch and no unfinished upload."""
        return not self.leftovers(output)

    def leftovers(self, output="model.safetensors"):
        scratch = [info.key for info in self.bucket.list(f"{output}.round/")]
        return scratch + [f"upload {upload}" for upload in self.bucket.list_uploads(output)]

    def remove(self):
        for output in self._outputs:
            for upload in self.bucket.list_uploads(output):
                self.bucket.abort_upload(output, upload)
        self.bucket.delete([info.key for info in self.bucket.list("")])
        with suppress(S3Error):  # the round of a failed test may still write
            self.store.minio.remove_bucket(self.name)


def tensors(mib, seed):
    """Some tensors, ``mib`` MiB together. The output's tensors have the order of the updates', largest type first."""
    random = np.random.default_rng(seed)
    rows = mib * MIB // 4 // 1024
    values = random.standard_normal((rows, 1024), dtype=np.float32)
    return {
        "body.0.weight": values[: rows // 2],
        "body.1.weight": values[rows // 2 : rows - 1],
        "head.bias": values[rows - 1],
    }


def data_section(body):
    """A safetensors file without its header."""
    return body[8 + int.from_bytes(body[:8], "little") :]
