"""What `[run.gateway]` holds: where the gateway of a run's remote agents runs."""

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from loopwright.core.config import Config
from loopwright.core.errors import Problem
from loopwright.engines.base import EngineConfig
from loopwright.gateway.client import endpoint
from loopwright.gateway.gateway import AdvertiseError, GatewayConfig
from loopwright.gateway.settings import TOKEN, read_token
from loopwright.rollouts.pools.resources import PlacementConfig

EXTERNAL_ENGINE = EngineConfig(type="external")
"""The engine of a gateway that somebody else runs; nothing is known about it."""


class _HostConfig(Config):
    """What every kind of gateway can be asked."""

    def problems(self, scenario_dir: Path) -> list[Problem]:
        """Configuration errors, found before anything starts."""
        return []


class EmbeddedGatewayConfig(_HostConfig, GatewayConfig):
    """A gateway in the process of the run."""

    type: Literal["embedded"] = "embedded"

    def problems(self, scenario_dir: Path) -> list[Problem]:
        return _address_problems(self)


class RayGatewayConfig(_HostConfig, PlacementConfig, GatewayConfig):
    """Gateways in actors of the Ray cluster; their engines are in further actors (`[run.rollout] engines`)."""

    type: Literal["ray"] = "ray"
    workers: int = Field(default=1, ge=1)
    """Number of gateways, each in an actor. A rollout uses one of them."""

    @property
    def needs_node_address(self) -> bool:
        """Whether it listens at all addresses, so that agents must be given the address of the actor's node."""
        return self.host in ("0.0.0.0", "::") and self.advertise is None and self.advertise_host is None  # noqa: S104

    def problems(self, scenario_dir: Path) -> list[Problem]:
        problems = [] if self.needs_node_address else _address_problems(self)
        if self.workers > 1:
            several = f"{self.workers} gateways cannot share one"
            if self.advertise is not None or self.advertise_host is not None:
                key = "advertise" if self.advertise is not None else "advertise_host"
                problems.append(Problem(key, f'{several}; with host = "0.0.0.0" each advertises its own node.'))
            if self.port and self.strategy != "STRICT_SPREAD":
                problems.append(Problem("port", f'{several}; remove it, or set strategy = "STRICT_SPREAD".'))
        return problems


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
