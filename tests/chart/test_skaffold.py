"""skaffold.yaml against its schema's names (skaffold/v4beta13, as far as it is used here) and against the files it names."""

import copy
import re

import pytest
import yaml
from chart.kit import CHART, ROOT

CONFIG = yaml.safe_load((ROOT / "skaffold.yaml").read_text())
PROFILES = {profile["name"]: profile for profile in CONFIG["profiles"]}

NAMES = {
    "": {"apiVersion", "kind", "metadata", "build", "deploy", "profiles"},
    "metadata": {"name"},
    "build": {"artifacts", "local"},
    "build.artifacts": {"image", "context", "docker"},
    "build.artifacts.docker": {"dockerfile", "target", "buildArgs"},
    "build.local": {"push", "useBuildkit"},
    "deploy": {"helm"},
    "deploy.helm": {"releases", "hooks", "flags"},
    "deploy.helm.releases": {"name", "chartPath", "namespace", "createNamespace", "setValueTemplates", "setValues"},
    "deploy.helm.hooks": {"before", "after"},
    "deploy.helm.hooks.after": {"host"},
    "deploy.helm.hooks.after.host": {"command", "os", "dir"},
    "profiles": {"name", "activation", "patches", "build"},
    "profiles.activation": {"kubeContext"},
    "profiles.patches": {"op", "path", "value"},
    "profiles.build": {"local"},
    "profiles.build.local": {"push", "useBuildkit"},
}
FREE = {"deploy.helm.releases.setValueTemplates", "profiles.patches.value"}


def unknown(node, path=""):
    """Keys that the schema has not, with their path."""
    if isinstance(node, list):
        return [name for item in node for name in unknown(item, path)]
    if not isinstance(node, dict) or path in FREE:
        return []
    found = [f"{path}.{key}" for key in node if key not in NAMES[path]]
    return found + [
        name for key in node if key in NAMES[path] for name in unknown(node[key], f"{path}.{key}".lstrip("."))
    ]


def patched(profile):
    """The configuration with the patches of a profile."""
    result = copy.deepcopy({key: value for key, value in CONFIG.items() if key != "profiles"})
    for patch in PROFILES[profile]["patches"] if profile else ():
        *parents, last = patch["path"].strip("/").split("/")
        node = result
        for name in parents:
            node = node[int(name)] if isinstance(node, list) else node[name]
        assert patch["op"] == "add" or last in node
        node[last] = patch["value"]
    return result


@pytest.fixture(params=[None, *PROFILES])
def config(request):
    return patched(request.param)


def test_profiles():
    assert CONFIG["apiVersion"] == "skaffold/v4beta13"
    assert set(PROFILES) == {"kind", "lambda"}
    assert unknown(CONFIG) == []


def test_names_are_the_schemas(config):
    assert unknown(config) == []


def test_files_and_targets_are_there(config):
    artifacts = config["build"]["artifacts"]
    assert len(artifacts) == 2
    for artifact in artifacts:
        dockerfile = (ROOT / artifact["docker"]["dockerfile"]).read_text()
        if "target" in artifact["docker"]:
            assert re.search(rf"(?m)^FROM \S+ AS {artifact['docker']['target']}$", dockerfile)
    (release,) = config["deploy"]["helm"]["releases"]
    assert ROOT / release["chartPath"] == CHART


def test_each_image_reaches_the_chart(config):
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    (release,) = config["deploy"]["helm"]["releases"]
    used = set()
    for path, template in release["setValueTemplates"].items():
        node = values
        for name in path.split("."):
            node = node[name]
        kind, name = re.fullmatch(r"\{\{\.IMAGE_(REPO|TAG)_(\w+)\}\}", template).groups()
        assert path.endswith({"REPO": ".repository", "TAG": ".tag"}[kind])
        used.add(name)
    assert used == {re.sub(r"\W", "_", artifact["image"]) for artifact in config["build"]["artifacts"]}


def test_the_context_of_the_kind_profile_is_that_clusters():
    kind = yaml.safe_load((ROOT / "tests/e2e/kind/cluster.yaml").read_text())
    assert PROFILES["kind"]["activation"] == [{"kubeContext": f"kind-{kind['name']}"}]


def test_the_command_of_the_lambda_profile_is_ours():
    from typer.main import get_command

    from gradsharding.cli.app import app

    (hook,) = patched("lambda")["deploy"]["helm"]["hooks"]["after"]
    _, group, name, *options = hook["host"]["command"]
    command = get_command(app).commands[group].commands[name]
    known = {option for parameter in command.params for option in parameter.opts}
    assert set(options[::2]) <= known
