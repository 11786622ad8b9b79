"""The README's two commands, with the lines changed that crds/samples says to change."""

import json
import os
import shutil
import uuid
from urllib.parse import urlsplit

import boto3
import numpy as np
import pytest
import safetensors.numpy
from chart.kit import ROOT
from cluster import kubectl
from e2e.conftest import keys, stores
from e2e.namespace import Namespace
from e2e.release import Release, image

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.xdist_group("chart")]

SAMPLES = ROOT / "crds/samples"


def changed(folder, changes):
    """A copy of the samples with each of these texts replaced wherever it stands; each must be there."""
    shutil.copytree(SAMPLES, folder)
    for old, new in changes.items():
        files = [path for path in folder.iterdir() if old in path.read_text()]
        assert files, f"{old!r} is not in the samples"
        for path in files:
            path.write_text(path.read_text().replace(old, new))
    return folder


@pytest.fixture
def place(api):
    made = Namespace(api, keys(), "samples")
    yield made
    made.remove()


@pytest.fixture
def release(place, store):
    made = Release([place.name], [urlsplit(store.endpoint).hostname])
    try:
        made.install()
        yield made
    finally:
        made.remove()


def test_the_two_commands(release, place, store, federation, tmp_path):
    operator = image(release.operator_image)
    access, secret = keys()
    folder = changed(
        tmp_path / "samples",
        {
            "http://minio.storage.svc.cluster.local:9000": store.endpoint,
            "bucket: federation ": f"bucket: {federation.name} ",
            "newName: gradsharding-operator": f"newName: {operator['repository']}",
            "newTag: 0.1.0": f"newTag: {operator['tag']}",
            "accessKey=minioadmin, secretKey=minioadmin": f"accessKey={access}, secretKey={secret}",
        },
    )
    kubectl("apply", "-n", place.name, "-k", str(folder))
    place.success_of("digits-7", 240)
    condition = "--for=condition=Succeeded"
    assert kubectl("wait", "-n", place.name, condition, "--timeout=10s", "agground/digits-7").returncode == 0

    keys_of_updates = sorted(info.key for info in federation.bucket.list("digits/7/updates/"))
    updates = [safetensors.numpy.load(federation.bucket.get(key)) for key in keys_of_updates]
    document = federation.document("digits/7/model.safetensors")
    weights = [participant["weight"] for participant in document["participants"]]
    assert len(updates) == len(weights) == 8
    mean = safetensors.numpy.load(federation.bucket.get("digits/7/model.safetensors"))
    for name, values in mean.items():
        np.testing.assert_allclose(values, np.average([u[name] for u in updates], axis=0, weights=weights), rtol=1e-5)


@pytest.mark.parametrize("name", stores())
def test_stores_take_the_lifecycle_rules(name):
    access, secret = keys()
    client = boto3.client(
        "s3",
        endpoint_url=stores()[name],
        aws_access_key_id=access,
        aws_secret_access_key=secret,
        region_name=os.environ.get("AWS_REGION", "us-east-1"),
    )
    bucket = f"gradsharding-e2e-{uuid.uuid4().hex[:10]}"
    client.create_bucket(Bucket=bucket)
    rules = json.loads((SAMPLES / "lifecycle.json").read_text())
    client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=rules)
    stored = client.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
    client.delete_bucket(Bucket=bucket)
    assert {rule["ID"] for rule in stored} == {rule["ID"] for rule in rules["Rules"]}
