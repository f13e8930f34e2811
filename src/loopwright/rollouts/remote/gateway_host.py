"""Where a run's gateway lives: in the run's own process, in an actor on Ray, or elsewhere. The run cannot tell."""

import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from loopwright.core.config import Config, size_bytes
from loopwright.core.errors import MissingExtra, Problem
from loopwright.engines.base import Engine, EngineConfig, engines
from loopwright.engines.weight_update import WeightUpdate
from loopwright.gateway.client import GatewayClient, GatewayLost, RemoteSession, endpoint
from loopwright.gateway.gateway import AdvertiseError, Gateway, GatewayConfig, is_loopback
from loopwright.gateway.refusal import Refusal
from loopwright.gateway.sessions.session_config import SessionConfig
from loopwright.gateway.settings import TOKEN, token_in
from loopwright.rollouts.pools.resources import ResourceRequest
from loopwright.rollouts.remote.access import GatewayAccess

_AWAY_S = 120.0
"""Seconds that a gateway elsewhere may take to be started again."""


class GatewayHost(ABC):
    """A gateway for as long as a run needs it.

        async with aclosing(home):
            await home.start()
            session = await home.open("trial-7", SessionConfig(trial=7))
            await home.publish(WeightUpdate(version=1))
            episode = await session.close()

    Subclass `loopwright.testing.GatewayContract` to test one.
    """

    def __init__(self) -> None:
        self._client: GatewayClient | None = None
        self._at: GatewayAccess | None = None

    @abstractmethod
    async def start(self) -> None:
        """Have it there. AdvertiseError if agents could not reach it, GatewayLost if we cannot."""

    @abstractmethod
    async def access(self) -> GatewayAccess:
        """How it is reached now."""

    @abstractmethod
    async def publish(self, update: WeightUpdate) -> int:
        """Apply a weight update to its engines; returns the version that they are at then."""

    async def open(self, id: str | None = None, config: SessionConfig | None = None) -> RemoteSession:
        """A session; with an id that is known, and the same run and trial, the one that there is."""
        return await (await self._connected()).open(id, config)

    async def _connected(self) -> GatewayClient:
        at = await self.access()
        if self._client is None or at != self._at:
            if self._client is not None:
                await self._client.close()
            self._client, self._at = GatewayClient(at.url, at.token, away_s=at.away_s), at
        return self._client

    async def aclose(self) -> None:
        """Let go of it."""
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()


class EmbeddedGatewayConfig(GatewayConfig):
    """A gateway in the run's own process."""

    type: Literal["embedded"] = "embedded"

    def problems(self, home: Path) -> list[Problem]:
        """What is wrong with it; found before anything starts."""
        return _address_of(self)

    def resource_requests(self) -> list[ResourceRequest]:
        """What it asks of a Ray cluster."""
        return []


class RayGatewayConfig(GatewayConfig):
    """A gateway in an actor of the Ray cluster, with its engines in actors beside it."""

    type: Literal["ray"] = "ray"
    cpus: float = Field(default=1.0, gt=0)
    """CPUs of the gateway's actor."""
    engines: int = Field(default=1, ge=1)
    """How many actors have an engine in them."""
    engine_cpus: float = Field(default=1.0, gt=0)
    """CPUs of each of them."""
    engine_memory: int | None = Field(default=None, gt=0)
    """Memory of each of them, for example "8GiB"."""

    @field_validator("engine_memory", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        return size_bytes(value)

    def problems(self, home: Path) -> list[Problem]:
        """What is wrong with it; all addresses are fine, since an actor knows the address of its node."""
        everywhere = self.host in ("0.0.0.0", "::") and self.advertise is None and self.advertise_host is None  # noqa: S104
        return [] if everywhere else _address_of(self)

    def resource_requests(self) -> list[ResourceRequest]:
        """What it asks of a Ray cluster."""
        return [
            ResourceRequest("gateway", 1, self.cpus),
            ResourceRequest("engine", self.engines, self.engine_cpus, self.engine_memory),
        ]


class ExternalGatewayConfig(Config):
    """A gateway that somebody else started, with `loopwright gateway serve`; its engines are its own."""

    type: Literal["external"] = "external"
    url: str
    """Where it is, for example "http://gpu-box:8400"; without a port, the one of its scheme."""
    token_file: str | None = None
    """A file with the token that opens sessions there, relative to the scenario."""
    token_env: str = TOKEN
    """Without a file: the environment variable that holds the token."""

    @field_validator("url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        endpoint(url)
        return url

    def token(self, home: Path) -> str | None:
        """The token; ValueError if the file holds none."""
        if self.token_file is None:
            return os.environ.get(self.token_env) or None
        return token_in(home / Path(self.token_file).expanduser())

    def problems(self, home: Path) -> list[Problem]:
        """What is wrong with it; found before anything starts."""
        try:
            self.token(home)
        except ValueError as error:
            return [Problem("token_file", f"{error}.")]
        return []

    def resource_requests(self) -> list[ResourceRequest]:
        """What it asks of a Ray cluster."""
        return []


class TrialServerGatewayConfig(Config):
    """The trial server's own gateway and engine (`loopwright trials serve --engine NAME`)."""

    type: Literal["server"] = "server"

    def problems(self, home: Path) -> list[Problem]:
        """Nothing: it is the trial server's to have one."""
        return []

    def resource_requests(self) -> list[ResourceRequest]:
        """What it asks of a Ray cluster."""
        return []


GatewayHostConfig = EmbeddedGatewayConfig | RayGatewayConfig | ExternalGatewayConfig | TrialServerGatewayConfig
GATEWAY_HOSTS: dict[str, type[GatewayHostConfig]] = {
    "embedded": EmbeddedGatewayConfig,
    "ray": RayGatewayConfig,
    "external": ExternalGatewayConfig,
    "server": TrialServerGatewayConfig,
}


def _address_of(config: GatewayConfig) -> list[Problem]:
    try:
        config.address(config.port)
    except AdvertiseError as error:
        key, _, said = str(error).partition(": ")
        return [Problem(key, said)]
    return []


def check_reachable(url: str) -> None:
    """AdvertiseError if a gateway is on loopback, and the Ray cluster has machines beside this one."""
    from loopwright.rollouts.pools.ray.launch import cluster_nodes

    if is_loopback(endpoint(url)[0]) and len(cluster_nodes()) > 1:
        raise AdvertiseError(
            f"the gateway is at {url}, which agents on the other nodes of the cluster cannot reach. Have it listen "
            'elsewhere, and say where: [run.gateway] host = "0.0.0.0", advertise_host = "10.0.0.1".'
        )


class EmbeddedGatewayHost(GatewayHost):
    """A gateway and its engine in the run's own process and event loop.

    It keeps nothing on disk: a trial's turns are committed with its episode, in the run's ledger. Had the run been
    killed before, its agents would have been ended with it, so that nobody could go on with their sessions: `resume`
    begins their trials again, under the same numbers. A store would promise (T04) what nobody could claim.
    """

    def __init__(self, config: GatewayConfig, make: Callable[[], Engine]) -> None:
        super().__init__()
        self._config, self._make = config, make
        self._engine: Engine | None = None
        self._gateway: Gateway | None = None
        # Also on loopback: other users of this machine are not to open sessions.
        self._token = secrets.token_urlsafe(24)

    async def start(self) -> None:
        self._config.address(self._config.port)  # before the engine, which takes its time to load
        self._engine = self._make()
        gateway = Gateway(self._engine, self._config, token=self._token, forgets=True)
        await gateway.__aenter__()
        self._gateway = gateway

    async def access(self) -> GatewayAccess:
        return GatewayAccess(self._open().address, self._token)

    async def publish(self, update: WeightUpdate) -> int:
        return await self._open().apply_update(update)

    def _open(self) -> Gateway:
        if self._gateway is None:
            raise GatewayLost("the run's gateway is not open")
        return self._gateway

    async def aclose(self) -> None:
        await super().aclose()
        try:
            if self._gateway is not None:
                gateway, self._gateway = self._gateway, None
                await gateway.__aexit__(None, None, None)
        finally:
            if self._engine is not None:
                engine, self._engine = self._engine, None
                await engine.close()


class ExternalGatewayHost(GatewayHost):
    """A gateway elsewhere, reached over HTTP; whatever it holds stays there."""

    def __init__(self, access: GatewayAccess) -> None:
        super().__init__()
        self._access = access

    async def start(self) -> None:
        client = await self._connected()
        try:
            await client.check()
            # A session of no use: now is the time to learn that the token is wrong.
            await (await client.open()).delete()
        except Refusal as error:
            raise GatewayLost(
                f"the gateway at {self._access.url} opens no session: {error}. "
                f"Give its token by `token_file`, or in {TOKEN}."
            ) from error

    async def access(self) -> GatewayAccess:
        return self._access

    async def publish(self, update: WeightUpdate) -> int:
        return await (await self._connected()).publish(update)


class TrialServerGatewayHost(GatewayHost):
    """The gateway of a trial server, which alone knows where it is. Nobody can tell it of new weights."""

    async def start(self) -> None: ...

    async def access(self) -> GatewayAccess:
        return GatewayAccess("")

    async def publish(self, update: WeightUpdate) -> int:
        raise GatewayLost('the engine of a trial server takes no weights from a run; leave out `type = "server"`')


EXTERNAL_ENGINE = EngineConfig(type="external")
"""The engine of a gateway elsewhere, of which we know nothing."""


def build_gateway_host(config: GatewayHostConfig, engine: EngineConfig, home: Path, name: str) -> GatewayHost:
    """The home that a config describes."""
    if isinstance(config, TrialServerGatewayConfig):
        return TrialServerGatewayHost()
    if isinstance(config, ExternalGatewayConfig):
        return ExternalGatewayHost(GatewayAccess(config.url, config.token(home), _AWAY_S))
    if isinstance(config, EmbeddedGatewayConfig):
        return EmbeddedGatewayHost(config, lambda: engines.get(engine.type)(engine, home))
    try:
        from loopwright.rollouts.remote.gateway_host_ray import RayGatewayHost
    except ModuleNotFoundError as error:
        raise MissingExtra("a gateway on Ray", "ray") from error
    return RayGatewayHost(config, engine, home, name)
