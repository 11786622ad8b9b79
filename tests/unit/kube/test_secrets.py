import base64

import pytest

from gradsharding.kube.secrets import RotatingKeys, SecretUnusable, text


def encoded(**data):
    return {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}


def test_keys_and_their_rotation():
    keys = RotatingKeys()
    keys.replace("store", encoded(accessKey="a", secretKey="b\n"))
    first = keys.retrieve()
    assert (first.access_key, first.secret_key, first.session_token) == ("a", "b", None)
    keys.replace("store", encoded(accessKey="c", secretKey="d", sessionToken="e"))
    second = keys.retrieve()
    assert (second.access_key, second.secret_key, second.session_token) == ("c", "d", "e")
    assert first.access_key == "a", "a request that has begun keeps its keys"


def test_a_bad_secret_keeps_the_keys_before():
    keys = RotatingKeys()
    keys.replace("store", encoded(accessKey="a", secretKey="b"))
    with pytest.raises(SecretUnusable):
        keys.replace("store", encoded(accessKey="c"))
    assert keys.retrieve().access_key == "a"


def test_no_keys_yet():
    with pytest.raises(ValueError, match="no keys yet"):
        RotatingKeys().retrieve()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "Secret store has no key accessKey"),
        (encoded(accessKey="a"), "Secret store has no key secretKey"),
        (encoded(accessKey="a", secretKey=""), "key secretKey of Secret store is empty"),
        (encoded(accessKey="a", secretKey=" \n"), "key secretKey of Secret store is empty"),
        (encoded(accessKey="a") | {"secretKey": "hidden-but-not-base64!"}, "key secretKey of Secret store is not text"),
        (encoded(accessKey="a") | {"secretKey": "/w=="}, "key secretKey of Secret store is not text"),
        (encoded(accessKey="a") | {"secretKey": None}, "key secretKey of Secret store is not text"),
        (encoded(accessKey="a", secretKey="b", sessionToken=""), "key sessionToken of Secret store is empty"),
    ],
)
def test_an_error_names_the_key_and_never_its_value(data, message):
    with pytest.raises(SecretUnusable) as caught:
        RotatingKeys().replace("store", data)
    assert str(caught.value).startswith(message)
    assert "hidden" not in str(caught.value)


def test_certificates():
    assert text("ca", encoded(**{"ca.crt": "PEM"}), "ca.crt") == "PEM"
