"""One Slurm cluster for all tests that need it: the workers of a test session share it."""

import os
import tempfile
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, is_installed


@pytest.fixture(scope="session")
def slurm_cluster():
    """A cluster that runs. The last worker of the session stops it."""
    if not is_installed():
        pytest.skip("Slurm is not installed (apt-get install slurm-wlm munge), or we are not root")
    # A short path: that of a socket has at most 107 bytes.
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))[:12]
    cluster = Cluster(Path(tempfile.gettempdir()) / f"loopwright-slurm-{session}")
    cluster.start()
    yield cluster
    cluster.leave()


@pytest.fixture
def slurm(slurm_cluster, monkeypatch):
    """The cluster, with an environment in which Slurm's programs find it."""
    for name, value in slurm_cluster.environment.items():
        monkeypatch.setenv(name, value)
    return slurm_cluster
