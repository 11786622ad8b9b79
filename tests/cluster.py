"""kubectl for the tests marked ``cluster``, only ever on a cluster that is for tests."""

import json
import os
import re
import subprocess

import pytest

TEST_CONTEXT = re.compile(r"(kind|k3d)-.+|minikube|(.+-)?test(-.+)?")


def kubectl(*arguments, document=None, check=True):
    """Run kubectl, with a document as JSON on its standard input, and give its CompletedProcess."""
    process = subprocess.run(
        ["kubectl", "--request-timeout=30s", *arguments],
        input=None if document is None else json.dumps(document),
        stdin=subprocess.DEVNULL if document is None else None,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    if check and process.returncode:
        raise AssertionError(f"kubectl {' '.join(arguments)}: {process.stderr.strip()}")
    return process


def require_test_cluster():
    """Skip without KUBECONFIG; fail on a context that does not look like a test cluster's."""
    if "KUBECONFIG" not in os.environ:
        pytest.skip("KUBECONFIG is not set: these tests need a test cluster")
    context = kubectl("config", "current-context").stdout.strip()
    if not TEST_CONTEXT.fullmatch(context):
        pytest.fail(f"the kube context {context!r} is not a test cluster's: its name must match {TEST_CONTEXT.pattern}")
