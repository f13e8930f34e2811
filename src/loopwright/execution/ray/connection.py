"""The connection to Ray: to the cluster that is named, or to one of this machine that we start."""

import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Self

import ray
from ray._private import ray_constants, services

from loopwright.core.errors import ClusterError, Problem, sentence
from loopwright.execution.ray.options import RayOptions, check_address

_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


class RayConnection:
    """A use of Ray. If Ray was started here, it is shut down when its last user closes.

    While a connection lingers between users, Ray's workers stay warm for the next one.
    """

    _users = 0
    _started_here = False
    _lingers = False
    _runtime_env: Mapping[str, Any] | None = None

    def __init__(
        self, cpus: int | None = None, address: str | None = None, runtime_env: Mapping[str, Any] | None = None
    ) -> None:
        self._open = True
        if not ray.is_initialized():
            _init(cpus, address, runtime_env)
            RayConnection._started_here, RayConnection._users = True, 0
            RayConnection._runtime_env = runtime_env
        elif runtime_env and runtime_env != RayConnection._runtime_env:
            raise ClusterError(
                "this process is connected to Ray with another runtime_env. Shut that connection down first "
                "(ray.shutdown()), or remove `runtime_env` from [system]."
            )
        RayConnection._users += 1

    @classmethod
    @contextmanager
    def lingering(cls) -> Iterator[None]:
        """Stay connected between one user and the next, until this ends."""
        cls._lingers = True
        try:
            yield
        finally:
            cls._lingers = False
            cls._end_if_unused()

    def close(self) -> None:
        """End this use of Ray."""
        if self._open:
            self._open = False
            RayConnection._users -= 1
            self._end_if_unused()

    @classmethod
    def _end_if_unused(cls) -> None:
        if cls._users == 0 and cls._started_here and not cls._lingers:
            cls._started_here = False
            ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _init(cpus: int | None, address: str | None, runtime_env: Mapping[str, Any] | None) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if runtime_env:
        quiet["runtime_env"] = dict(runtime_env)
    existing = address or os.environ.get("RAY_ADDRESS")
    if existing:
        check_address(existing)
    else:
        existing = services.find_bootstrap_address(None)
        try:
            check_address(existing or "")
        except ClusterError:
            existing = None  # one that was killed has left its address
    in_main_thread = threading.current_thread() is threading.main_thread()
    sigterm_handler = signal.getsignal(signal.SIGTERM) if in_main_thread else None
    try:
        if existing and existing != "local":
            with _loopback_only() if _listens_on_loopback_only(existing) else nullcontext():
                ray.init(address=existing, **quiet)
        else:
            with _loopback_only(), _own_process_groups():
                ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
    except (ConnectionError, RuntimeError, ValueError, TypeError) as error:
        where = existing or "this machine"
        raise ClusterError(
            f"cannot use Ray at {where}: {sentence(error)} Check RAY_ADDRESS and `ray status`"
        ) from error
    finally:
        if sigterm_handler is not None:
            signal.signal(signal.SIGTERM, sigterm_handler)  # Ray installs its own, which would skip our shutdown.


def find_shortage(request: Mapping[str, float]) -> str:
    """Why no node of the cluster could ever run a trial that takes this much; empty if one could."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    if any(all(node.get(name, 0) >= amount for name, amount in request.items()) for node in nodes):
        return ""
    largest = {name: max((node.get(name, 0) for node in nodes), default=0) for name in request}
    return (
        f"no node of the Ray cluster is large enough: a trial takes {dict(request)}, the most that a node has is "
        f"{largest}. Change [system] or [run.workload] gpus, or raise wait_s if nodes are started on demand."
    )


def find_problem(options: RayOptions, request: Mapping[str, float]) -> Problem | None:
    """Why trials that take this much could not run on the cluster that the options name."""
    try:
        check_address(options.named_address)
        with RayConnection(address=options.address, runtime_env=options.runtime_env):
            shortage = find_shortage(request)
    except ClusterError as error:
        return Problem("[system] address", str(error))
    return Problem("[system]", shortage) if shortage else None


def _listens_on_loopback_only(address: str) -> bool:
    """Whether a cluster of this machine cannot be reached by the machine's own address, which Ray would use instead."""
    host, _, port = address.rpartition(":")
    if not host.startswith("127."):
        return False
    own_host: str = services.get_node_ip_address()  # type: ignore[no-untyped-call]
    try:
        check_address(f"{own_host}:{port}")
    except ClusterError:
        return True
    return False


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


@contextmanager
def _own_process_groups() -> Iterator[None]:
    """Start Ray's processes outside our process group, so that a signal to the group leaves Ray to our shutdown."""
    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, process_group=0)  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        services.ConsolePopen = popen  # type: ignore[misc]
