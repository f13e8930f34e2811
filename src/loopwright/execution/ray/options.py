"""What a scenario says about a Ray cluster."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator

from loopwright.core.config import Size
from loopwright.core.errors import ClusterError, did_you_mean
from loopwright.execution.system import SystemConfig

_RUNTIME_ENV = (
    *("working_dir", "py_modules", "excludes", "pip", "uv", "conda", "env_vars", "py_executable"),
    *("worker_process_setup_hook", "container", "image_uri", "nsight", "java_jars", "config"),
)
"""The keys of a runtime environment."""
_CONNECT_S = 10.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""How an HTTP/2 connection begins, with an empty SETTINGS frame. A cluster's head answers with a SETTINGS frame."""


class RayOptions(SystemConfig):
    """The settings of trials on Ray."""

    type: Literal["ray"] = "ray"
    """`ray`: the cluster that `address` or RAY_ADDRESS names, otherwise one that is started on this machine."""
    address: str | None = None
    """The cluster's address, such as "auto" or "10.0.0.1:6379"; by default RAY_ADDRESS."""
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """What other nodes need and do not have, in Ray's terms: `working_dir`, `py_modules`, `pip`, `env_vars` and so on.
    Paths are relative to the scenario."""
    retries: int = Field(default=3, ge=0)
    """How often a trial that was lost with its node is attempted again under its number."""
    cpus: float = Field(default=1.0, ge=0)
    """CPUs of each trial in flight."""
    gpus: float | None = Field(default=None, ge=0)
    """GPUs of each trial in flight; by default `[run.workload] gpus`."""
    memory: Size | None = Field(default=None, gt=0)
    """Memory that each trial in flight reserves, for example "2GiB"."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom resources of each trial in flight, such as `{ "tpu" = 1 }`."""
    strategy: Literal["PACK", "SPREAD"] = "PACK"
    """Whether trials fill one node after another, or are spread over all nodes."""
    files: Literal["auto", "shared", "copy"] = "auto"
    """How a trial's directory gets to its node and back: `shared` by a common file system, `copy` over the network,
    `auto` by what the node sees."""
    artifacts: Size = Field(default=256 * 2**20, ge=0)
    """How much a trial's directory may contain that is copied in one direction, for example "256MiB"."""
    wait_s: float = Field(default=60.0, ge=0)
    """How long to wait for a node that is large enough, which an autoscaler may start."""

    @field_validator("runtime_env")
    @classmethod
    def _known_keys(cls, env: dict[str, Any]) -> dict[str, Any]:
        if unknown := [key for key in env if key not in _RUNTIME_ENV]:
            raise ValueError(f"unknown key {unknown[0]!r} of a runtime_env. {did_you_mean(unknown[0], _RUNTIME_ENV)}")
        return env

    def resolved(self, directory: Path) -> Self:
        def absolute(path: Any) -> Any:
            return path if not isinstance(path, str) or "://" in path else str(directory.absolute() / path)

        env = dict(self.runtime_env)
        if "working_dir" in env:
            env["working_dir"] = absolute(env["working_dir"])
        if isinstance(modules := env.get("py_modules"), list):
            env["py_modules"] = [absolute(path) for path in modules]
        return self.model_copy(update={"runtime_env": env})

    @property
    def named_address(self) -> str:
        """The address of the cluster, if the scenario or RAY_ADDRESS names one."""
        return self.address or os.environ.get("RAY_ADDRESS", "")

    def directory_on_nodes(self, scenario_dir: Path) -> Path:
        """Where hosts find the scenario's directory: below their working directory, if that was sent to them."""
        working_dir = self.runtime_env.get("working_dir")
        if working_dir is None:
            return scenario_dir.absolute()
        if "://" in working_dir:
            return Path()
        try:
            return scenario_dir.resolve().relative_to(Path(working_dir).resolve())
        except ValueError:
            return scenario_dir.absolute()

    @field_validator("resources")
    @classmethod
    def _custom(cls, resources: dict[str, float]) -> dict[str, float]:
        for name, amount in resources.items():
            if name in ("CPU", "GPU", "memory"):
                raise ValueError(f"{name}: use the key {name.lower() + ('' if name == 'memory' else 's')!r}")
            if amount <= 0:
                raise ValueError(f"{name}: {amount:g} is not greater than zero")
        return resources

    def request(self, gpus: int) -> Mapping[str, float]:
        """What each trial in flight takes of a node, in Ray's terms; `gpus` are those of the workload."""
        count = gpus if self.gpus is None else self.gpus
        request = {"CPU": self.cpus, "GPU": count, "memory": float(self.memory or 0), **self.resources}
        return {name: amount for name, amount in request.items() if amount}


def check_address(address: str) -> None:
    """ClusterError if no head listens at the address of a cluster; Ray itself would try for several minutes."""
    if "://" in address:
        raise ClusterError(
            f"{address} is not the address of a cluster's head (HOST:PORT, usually port 6379). Loopwright does not use "
            "Ray Client: run it on a node of the cluster, for example with `ray job submit -- loopwright run …`."
        )
    host, _, port = address.rpartition(":")
    if not port.isdigit():  # "auto", "local"
        return
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S) as connection:
            if uses_tls():
                return
            connection.sendall(_PREFACE)
            if connection.recv(4)[3:] != b"\x04":
                raise OSError("what listens there is not the head of a cluster (usually port 6379)")
    except OSError as error:
        raise ClusterError(
            f"no Ray cluster answers at {address}: {error.strerror or error}. Start its head node "
            "(`ray start --head`), or correct RAY_ADDRESS or [system] address; without one, Ray is started here."
        ) from error


def uses_tls() -> bool:
    """Whether the processes of the cluster authenticate one another."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
