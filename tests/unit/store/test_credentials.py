"""Where keys come from, in which order, and what is said when there are none."""

from __future__ import annotations

import pytest

from gradsharding.credentials import ambient, static
from gradsharding.errors import StoreRefused


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, tmp_path):
    """No keys anywhere; the credentials file is ``tmp_path / "credentials"``."""
    for name in ("ACCESS_KEY_ID", "ACCESS_KEY", "SECRET_ACCESS_KEY", "SECRET_KEY", "SESSION_TOKEN", "PROFILE"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    for name in ("MINIO_ACCESS_KEY", "MINIO_SECRET_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return monkeypatch


def keys(provider):
    found = provider.retrieve()
    return found.access_key, found.secret_key, found.session_token


def write_profiles(tmp_path):
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id=D\naws_secret_access_key=d\n"
        "[lab]\naws_access_key_id=L\naws_secret_access_key=l\naws_session_token=t\n"
    )


def test_the_environment_comes_first(surroundings, tmp_path):
    write_profiles(tmp_path)
    surroundings.setenv("MINIO_ACCESS_KEY", "M")
    surroundings.setenv("MINIO_SECRET_KEY", "m")
    assert keys(ambient()) == ("M", "m", None)

    surroundings.setenv("AWS_ACCESS_KEY_ID", "A")
    surroundings.setenv("AWS_SECRET_ACCESS_KEY", "a")
    surroundings.setenv("AWS_SESSION_TOKEN", "t")
    assert keys(ambient()) == ("A", "a", "t")


def test_then_the_credentials_file(surroundings, tmp_path):
    write_profiles(tmp_path)
    assert keys(ambient()) == ("D", "d", None)

    surroundings.setenv("AWS_PROFILE", "lab")
    assert keys(ambient()) == ("L", "l", "t")


def test_a_named_profile_is_the_only_source(surroundings, tmp_path):
    write_profiles(tmp_path)
    surroundings.setenv("AWS_ACCESS_KEY_ID", "A")
    surroundings.setenv("AWS_SECRET_ACCESS_KEY", "a")

    assert keys(ambient("lab")) == ("L", "l", "t")
    with pytest.raises(StoreRefused, match=r"profile 'none' of the AWS credentials file: set AWS_ACCESS_KEY_ID"):
        ambient("none")


def test_without_keys_it_says_how_to_set_them():
    with pytest.raises(StoreRefused, match=r"^No keys were found for the store: set AWS_ACCESS_KEY_ID and") as refused:
        ambient()
    assert refused.value.code == "NoCredentials"


def test_half_a_pair_is_no_pair(surroundings):
    surroundings.setenv("AWS_ACCESS_KEY_ID", "A")
    with pytest.raises(StoreRefused):
        ambient()
    with pytest.raises(StoreRefused, match="give both"):
        static("A", "")


def test_a_broken_credentials_file_is_named_without_its_text(tmp_path):
    (tmp_path / "credentials").write_text("aws_secret_access_key=never-shown\n")
    with pytest.raises(StoreRefused, match="cannot be read: mend it") as refused:
        ambient()
    assert "never-shown" not in str(refused.value)
