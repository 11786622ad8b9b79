"""The chart rendered by Helm, for these tests and those on a cluster. ``HELM`` names the binary; unset: helm from PATH."""

import json
import os
import subprocess
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "gradsharding"
IMAGES = {"image": {"repository": "r.example/operator"}, "functions": {"image": {"repository": "r.example/reducer"}}}


def helm(*arguments, check=True, timeout=50):
    """Run it; its CompletedProcess."""
    command = [os.environ.get("HELM", "helm"), *map(str, arguments)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    if check and process.returncode:
        raise AssertionError(f"helm {' '.join(command[1:])}: {process.stderr.strip()}")
    return process


def flags(values):
    """Values as one of Helm's flags; a dictionary here is merged with the chart's own."""
    return [argument for key, value in values.items() for argument in ("--set-json", f"{key}={json.dumps(value)}")]


def template(values, *, check=True, namespace="system"):
    # A Helm that was built without the version of its Kubernetes library believes in an old one.
    known = ("--kube-version", "v1.34.4", "--namespace", namespace)
    return helm("template", "averager", CHART, *known, *flags(values), check=check)


def render(values=None, **keywords):
    """All objects of the chart, by (kind, name, namespace); ``values`` are merged over the least that it needs."""
    text = template(merged(IMAGES, values or {}), **keywords).stdout
    found = [document for document in yaml.safe_load_all(text) if document]
    objects = {(o["kind"], o["metadata"]["name"], o["metadata"].get("namespace", "")): o for o in found}
    assert len(objects) == len(found), "two objects of one name"
    return objects


def merged(base, changes):
    """``changes`` over ``base``, dictionary by dictionary."""
    result = dict(base)
    for key, value in changes.items():
        result[key] = merged(base[key], value) if isinstance(value, dict) and key in base else value
    return result


def rules(objects):
    """The rights of Roles and ClusterRoles that are bound to somebody, as (group, resource, verb)."""
    bound = {o["roleRef"]["name"] for o in objects.values() if o["kind"] in ("RoleBinding", "ClusterRoleBinding")}
    return {
        (group, resource, verb)
        for o in objects.values()
        if o["kind"] in ("Role", "ClusterRole") and o["metadata"]["name"] in bound
        for rule in o["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
