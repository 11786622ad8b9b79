"""Packages are built once: each takes a download and some seconds."""

import sys
import zipfile

import pytest

from gradsharding.deploy.package import Target, build


@pytest.fixture(scope="session")
def package_here(tmp_path_factory):
    """The package for the Python that runs the tests. Lambda has it only if it is one of PYTHONS."""
    return build(tmp_path_factory.mktemp("package"), Target(f"{sys.version_info.major}.{sys.version_info.minor}"))


@pytest.fixture(scope="session")
def task_root(package_here, tmp_path_factory):
    """The same, unzipped, as Lambda puts it under /var/task."""
    root = tmp_path_factory.mktemp("task")
    with zipfile.ZipFile(package_here.path) as archive:
        archive.extractall(root)
    return root
