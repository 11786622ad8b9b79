"""The cluster, the stores and the operators of the end-to-end tests. All of it comes from the environment:

KUBECONFIG            a test cluster with Knative Serving (tests/cluster.py says by its context's name what that is)
MINIO_ENDPOINT        the store, as this process and pods reach it; unset: S3_ENDPOINT
S3_ENDPOINT           a second store, for the tests that run on both
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION
E2E_REDUCER_IMAGE     the reducer's image, where the nodes have it
E2E_OOM_IMAGE         the same with tests/e2e/ballast in it (build_images.py makes both)
E2E_LONG=1            also the tests marked on_demand
E2E_PROXY_HOST        an address of this machine that pods reach; unset: that on the way to the store
"""

import os
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cluster import kubectl, require_test_cluster
from e2e.federation import Store
from e2e.figures import MEASURED
from e2e.namespace import Api, Namespace
from e2e.operator_process import OperatorProcess
from e2e.s3_proxy import S3Proxy, own_address

CRDS = Path(__file__).parents[2] / "crds"
LOG_TAIL = 6000
logs = []


def environment(name):
    value = os.environ.get(name)
    assert value, f"{name} is not set: see tests/e2e/conftest.py"
    return value


def keys():
    return environment("AWS_ACCESS_KEY_ID"), environment("AWS_SECRET_ACCESS_KEY")


def stores():
    """Endpoints by name, the main one first."""
    found = {"minio": os.environ.get("MINIO_ENDPOINT"), "s3": os.environ.get("S3_ENDPOINT")}
    return {name: endpoint for name, endpoint in found.items() if endpoint}


def pytest_collection_modifyitems(config, items):
    if os.environ.get("E2E_LONG") != "1":
        long = [item for item in items if item.get_closest_marker("on_demand")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        report.sections += [(f"operator {log.stem}", log.read_text(errors="replace")[-LOG_TAIL:]) for log in logs[-2:]]
    return report


def pytest_terminal_summary(terminalreporter):
    if MEASURED:
        terminalreporter.section("figures")
        for figure in MEASURED:
            terminalreporter.write_line(str(figure))


@pytest.fixture(scope="session")
def api():
    require_test_cluster()
    kubectl("apply", "-f", str(CRDS))
    kubectl("wait", "--for=condition=Established", "crd/aggregationrounds.gradsharding.dev", "--timeout=30s")
    api = Api()
    yield api
    api.close()


@pytest.fixture(scope="session")
def store():
    return make_store(next(iter(stores().values()), None) or environment("S3_ENDPOINT"))


def make_store(endpoint):
    return Store(endpoint, keys(), os.environ.get("AWS_REGION", "us-east-1"))


@pytest.fixture(scope="session")
def proxy_of_session(store):
    host = os.environ.get("E2E_PROXY_HOST") or own_address(store.endpoint)
    proxy = S3Proxy(store.address, host)
    yield proxy
    proxy.close()


@pytest.fixture
def proxy(proxy_of_session):
    yield proxy_of_session
    proxy_of_session.reset()


@pytest.fixture
def federation(store):
    """Whose rounds talk to the store directly."""
    made = store.federation()
    yield made
    made.remove()


@pytest.fixture
def watched(store, proxy):
    """A federation whose rounds talk to the store through the proxy."""
    made = store.federation(via=proxy.endpoint)
    yield made
    made.remove()


@pytest.fixture(scope="session")
def start_operator(tmp_path_factory, proxy_of_session):
    """Start an operator in a namespace; all are stopped at the end."""
    folder, started = tmp_path_factory.mktemp("operators"), []
    hosts = {urlsplit(endpoint).hostname for endpoint in (proxy_of_session.endpoint, *stores().values())}

    def start(namespace, **settings):
        log = folder / f"{len(started)}-{namespace.name}.log"
        logs.append(log)
        defaults = {
            "REDUCER_IMAGE": environment("E2E_REDUCER_IMAGE"),
            "ALLOWED_ENDPOINTS": " ".join(sorted(hosts)),
            "FUNCTION_CPU_REQUEST": "50m",  # the functions of many tests fit beside each other on a small node
        }
        started.append(OperatorProcess(namespace.name, log, **defaults | settings))
        return started[-1]

    yield start
    for operator in started:
        operator.stop()


@pytest.fixture(scope="session")
def namespace(api):
    """Where one operator runs for all tests that leave it alone."""
    made = Namespace(api, keys(), "calm")
    yield made
    made.remove()


@pytest.fixture(scope="session")
def operator(namespace, start_operator):
    operator = start_operator(namespace)
    yield operator
    operator.stop()


@pytest.fixture(scope="session")
def rough_namespace(api):
    """Where tests start, stop and kill operators of their own; functions stay warm between them."""
    made = Namespace(api, keys(), "rough")
    yield made
    made.remove()


@pytest.fixture
def operators(rough_namespace, start_operator):
    """Start operators of this test alone."""
    started = []

    def start(**settings):
        started.append(start_operator(rough_namespace, **settings))
        return started[-1]

    yield start
    for operator in started:
        operator.stop()
