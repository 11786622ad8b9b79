import pytest

from gradsharding.errors import SettingsError
from gradsharding.kube.settings import DEFAULT_ENDPOINTS, read_settings

IMAGE = {"GRADSHARDING_REDUCER_IMAGE": "registry.example/reducer:1"}


def test_defaults():
    settings = read_settings(IMAGE)
    assert settings.pods.image == "registry.example/reducer:1"
    assert (settings.pods.cpu_request, settings.pods.node_selector, settings.pods.tolerations) == ("250m", {}, ())
    assert settings.allowed_endpoints == DEFAULT_ENDPOINTS
    assert settings.ambient_credentials is False
    assert (settings.port, settings.idle_function_seconds) == (8080, 3600)


def test_everything_set():
    settings = read_settings({
        **IMAGE,
        "GRADSHARDING_FUNCTION_CPU_REQUEST": "1",
        "GRADSHARDING_FUNCTION_NODE_SELECTOR": '{"pool":"functions"}',
        "GRADSHARDING_FUNCTION_TOLERATIONS": '[{"key":"functions","operator":"Exists"}]',
        "GRADSHARDING_FUNCTION_LABELS": '{"team":"a"}',
        "GRADSHARDING_FUNCTION_ANNOTATIONS": '{"note":"b"}',
        "GRADSHARDING_FUNCTION_PULL_SECRETS": '["registry"]',
        "GRADSHARDING_ALLOWED_ENDPOINTS": "*.svc  store.example:9000",
        "GRADSHARDING_AMBIENT_CREDENTIALS": "true",
        "GRADSHARDING_LAMBDA_FUNCTIONS": "a-* b",
        "GRADSHARDING_PORT": "9090",
        "GRADSHARDING_IDLE_FUNCTION_SECONDS": "60",
    })  # fmt: skip
    pods = settings.pods
    assert (pods.cpu_request, pods.node_selector, pods.labels) == ("1", {"pool": "functions"}, {"team": "a"})
    assert pods.tolerations == ({"key": "functions", "operator": "Exists"},)
    assert (pods.annotations, pods.pull_secrets) == ({"note": "b"}, ("registry",))
    assert settings.allowed_endpoints == ("*.svc", "store.example:9000")
    assert settings.lambda_functions == ("a-*", "b")
    assert (settings.ambient_credentials, settings.port, settings.idle_function_seconds) == (True, 9090, 60)


def test_an_empty_variable_is_unset():
    """As a chart writes what its values leave out."""
    assert read_settings({**IMAGE, "GRADSHARDING_PORT": ""}).port == 8080


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("REDUCER_IMAGE", ""),
        ("FUNCTION_CPU_REQUEST", "lots"),
        ("FUNCTION_CPU_REQUEST", "-1"),
        ("FUNCTION_NODE_SELECTOR", "pool=functions"),
        ("FUNCTION_NODE_SELECTOR", '["pool"]'),
        ("FUNCTION_NODE_SELECTOR", '{"pool":1}'),
        ("FUNCTION_TOLERATIONS", '{"key":"a"}'),
        ("FUNCTION_TOLERATIONS", '["a"]'),
        ("FUNCTION_LABELS", '{"a":null}'),
        ("FUNCTION_ANNOTATIONS", "{"),
        ("FUNCTION_PULL_SECRETS", '[{"name":"a"}]'),
        ("AMBIENT_CREDENTIALS", "yes"),
        ("PORT", "http"),
        ("PORT", "0"),
        ("PORT", "65536"),
        ("IDLE_FUNCTION_SECONDS", "5"),
        ("IDLE_FUNCTION_SECONDS", "1h"),
    ],
)
def test_an_error_names_the_variable(name, value):
    with pytest.raises(SettingsError, match=f"^environment variable GRADSHARDING_{name} ") as caught:
        read_settings({**IMAGE, f"GRADSHARDING_{name}": value})
    assert "\n" not in str(caught.value)
