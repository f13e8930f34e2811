"""The connection to Ray: to the cluster that is named, or to one of this machine that we start."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import ray
from ray._private import ray_constants, services

from loopwright.core.errors import ClusterError

_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


class RayConnection:
    """A use of Ray. If Ray was started here, it is shut down when its last user closes."""

    _users = 0
    _started_here = False

    def __init__(self, cpus: int | None = None, address: str | None = None) -> None:
        self._open = True
        if not ray.is_initialized():
            _init(cpus, address)
            RayConnection._started_here, RayConnection._users = True, 0
        RayConnection._users += 1

    def close(self) -> None:
        """End this use of Ray."""
        if not self._open:
            return
        self._open = False
        RayConnection._users -= 1
        if RayConnection._users == 0 and RayConnection._started_here:
            RayConnection._started_here = False
            ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _init(cpus: int | None, address: str | None) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    existing = address or os.environ.get("RAY_ADDRESS") or services.find_bootstrap_address(None)
    in_main_thread = threading.current_thread() is threading.main_thread()
    sigterm_handler = signal.getsignal(signal.SIGTERM) if in_main_thread else None
    try:
        if existing and existing != "local":
            ray.init(address=existing, **quiet)
        else:
            with _loopback_only():
                ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = existing or "this machine"
        raise ClusterError(f"cannot use Ray at {where}: {error}. Check RAY_ADDRESS and `ray status`") from error
    finally:
        if sigterm_handler is not None:
            signal.signal(signal.SIGTERM, sigterm_handler)  # Ray installs its own, which would skip our shutdown.


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Have a cluster of one machine listen at 127.0.0.1 only, as Ray does on macOS."""
    before, flag = os.environ.get(_LOOPBACK), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[_LOOPBACK], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = flag
        if before is None:
            del os.environ[_LOOPBACK]
        else:
            os.environ[_LOOPBACK] = before
