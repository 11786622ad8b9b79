"""What tests of several folders share."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory):
    """A real S3 server (3 to 10 s to start). Mark its tests with ``xdist_group("seaweedfs")``, so that there is one."""
    from gradsharding.embedded import EmbeddedStore

    with EmbeddedStore.start(tmp_path_factory.mktemp("seaweedfs")) as store:
        yield store


# No deadlines: machines are noisy. In CI the examples are the same each time; elsewhere they are new ones, to find more.
settings.register_profile("project", deadline=None, derandomize=os.environ.get("CI") == "true")
settings.load_profile("project")
