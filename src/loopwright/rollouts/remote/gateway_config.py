"""What `[run.gateway]` holds: where the gateway of a run's remote agents runs."""

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from loopwright.core.config import Config, size_bytes
from loopwright.core.errors import Problem
from loopwright.engines.base import EngineConfig
from loopwright.gateway.client import endpoint
from loopwright.gateway.gateway import AdvertiseError, GatewayConfig
from loopwright.gateway.settings import TOKEN, read_token
from loopwright.rollouts.pools.resources import ResourceRequest

EXTERNAL_ENGINE = EngineConfig(type="external")
"""The engine of a gateway that somebody else runs; nothing is known about it."""


class _HostConfig(Config):
    """What every kind of gateway can be asked."""

    def problems(self, scenario_dir: Path) -> list[Problem]:
        """Configuration errors, found before anything starts."""
        return []

    def resource_requests(self) -> list[ResourceRequest]:
        """What it requests from a Ray cluster."""
        return []


class EmbeddedGatewayConfig(_HostConfig, GatewayConfig):
    """A gateway in the process of the run."""

    type: Literal["embedded"] = "embedded"

    def problems(self, scenario_dir: Path) -> list[Problem]:
        return _address_problems(self)


class RayGatewayConfig(_HostConfig, GatewayConfig):
    """A gateway in an actor of the Ray cluster, with its engines in further actors."""

    type: Literal["ray"] = "ray"
    cpus: float = Field(default=1.0, gt=0)
    """CPUs of the gateway's actor."""
    engines: int = Field(default=1, ge=1)
    """Number of actors with an engine."""
    engine_cpus: float = Field(default=1.0, gt=0)
    """CPUs of each engine's actor."""
    engine_memory: int | None = Field(default=None, gt=0)
    """Memory of each engine's actor, for example "8GiB"."""

    @field_validator("engine_memory", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        return size_bytes(value)

    @property
    def needs_node_address(self) -> bool:
        """Whether it listens at all addresses, so that agents must be given the address of the actor's node."""
        return self.host in ("0.0.0.0", "::") and self.advertise is None and self.advertise_host is None  # noqa: S104

    def problems(self, scenario_dir: Path) -> list[Problem]:
        return [] if self.needs_node_address else _address_problems(self)

    def resource_requests(self) -> list[ResourceRequest]:
        return [
            ResourceRequest("gateway", 1, self.cpus),
            ResourceRequest("engine", self.engines, self.engine_cpus, self.engine_memory),
        ]


class ExternalGatewayConfig(_HostConfig):
    """A gateway that was started elsewhere with `loopwright gateway serve`, and has its own engines."""

    type: Literal["external"] = "external"
    url: str
    """Its URL, for example "http://gpu-box:8400"; without a port, the default port of its scheme."""
    token_file: str | None = None
    """A file with the gateway's token, relative to the scenario."""
    token_env: str = TOKEN
    """The environment variable with the token, used without `token_file`."""

    @field_validator("url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        endpoint(url)
        return url

    def token(self, scenario_dir: Path) -> str | None:
        """The token; ValueError if the file does not contain one."""
        if self.token_file is None:
            return os.environ.get(self.token_env) or None
        return read_token(scenario_dir / Path(self.token_file).expanduser())

    def problems(self, scenario_dir: Path) -> list[Problem]:
        try:
            self.token(scenario_dir)
        except ValueError as error:
            return [Problem("token_file", f"{error}.")]
        return []


class TrialServerGatewayConfig(_HostConfig):
    """The trial server's own gateway and engine (`loopwright trials serve --engine NAME`)."""

    type: Literal["server"] = "server"


GatewayHostConfig = EmbeddedGatewayConfig | RayGatewayConfig | ExternalGatewayConfig | TrialServerGatewayConfig
GATEWAY_HOSTS: dict[str, type[GatewayHostConfig]] = {
    "embedded": EmbeddedGatewayConfig,
    "ray": RayGatewayConfig,
    "external": ExternalGatewayConfig,
    "server": TrialServerGatewayConfig,
}


def _address_problems(config: GatewayConfig) -> list[Problem]:
    try:
        config.address(config.port)
    except AdvertiseError as error:
        key, _, message = str(error).partition(": ")
        return [Problem(key, message)]
    return []
