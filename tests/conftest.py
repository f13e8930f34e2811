"""For all tests: none of them fails because the machine is busy, or because of how the run was started."""

import signal

import pytest
from hypothesis import HealthCheck, settings

from loopwright.execution.sandbox.docker import remove_stale_containers
from tests import real_docker

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# A background job starts with SIGINT and SIGQUIT ignored, and processes that tests start and signal would inherit
# that. SIGHUP is left alone, so that `nohup make test` outlives its terminal.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


def pytest_collection_modifyitems(items):
    for item in items:
        if "docker_address" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(600))  # the first one starts the daemon, and may have to make its image


@pytest.fixture(scope="session")
def docker_address():
    """A real Docker daemon, for slow tests."""
    if missing := real_docker.missing_tools():
        pytest.skip(f"a Docker daemon needs {', '.join(missing)}")
    with real_docker.docker_daemon() as daemon:
        yield daemon.address


@pytest.fixture
def docker_daemon(docker_address, monkeypatch):
    """The real daemon is the one that sandboxes use."""
    monkeypatch.setenv("DOCKER_HOST", docker_address)
    monkeypatch.setenv("DOCKER_BUILDKIT", "0")
    remove_stale_containers.cache_clear()
    return docker_address
