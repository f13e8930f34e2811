"""Where a run's gateway runs: in the process of the run, in a Ray actor, or elsewhere; the run sees no difference."""

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from loopwright.core.episode import Episode
from loopwright.core.outcome import Outcome
from loopwright.engines.base import Engine
from loopwright.engines.weight_update import WeightUpdate
from loopwright.gateway.client import CompletedSession, GatewayClient, GatewayLost, endpoint
from loopwright.gateway.gateway import AdvertiseError, Gateway, GatewayConfig
from loopwright.gateway.refusal import Refusal
from loopwright.gateway.sessions.exactness import Exactness
from loopwright.gateway.sessions.session_config import SessionConfig
from loopwright.gateway.settings import TOKEN, is_loopback

RESTART_S = 120.0
"""Seconds that an external gateway may take to restart."""


@dataclass(frozen=True, slots=True)
class GatewayAccess:
    """The address of a gateway and, if it has one, its token."""

    url: str
    token: str | None = field(default=None, repr=False)
    away_s: float = 0.0
    """Seconds that it may be unreachable, if somebody restarts it."""


TRIAL_SERVER_ACCESS = GatewayAccess("")
"""The trial server's own gateway, whose address only the trial server knows."""


class AgentSession(Protocol):
    """A session as its opener sees it; `RemoteSession` explains the methods."""

    @property
    def id(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def openai_base_url(self) -> str: ...
    @property
    def anthropic_base_url(self) -> str: ...

    async def describe(self) -> dict[str, Any]: ...
    async def complete(self, outcome: Outcome = Outcome.OK, reason: str = "") -> CompletedSession: ...
    async def close(self, outcome: Outcome = Outcome.OK, reason: str = "") -> Episode: ...
    async def delete(self) -> None: ...


class SessionOpener(Protocol):
    """Opens sessions: a client of a gateway, or a host with the gateway in this process."""

    async def open(self, id: str | None = None, config: SessionConfig | None = None) -> AgentSession:
        """A new session, or the existing one with this id, run and trial."""


class GatewayHost(ABC):
    """Provides a gateway for the duration of a run.

        async with aclosing(host):
            await host.start()
            session = await host.open("trial-7", SessionConfig(trial=7))
            await host.publish(WeightUpdate(version=1))
            episode = await session.close()

    Subclass `loopwright.testing.GatewayContract` to test one.
    """

    def __init__(self) -> None:
        self._clients: dict[GatewayAccess, GatewayClient] = {}

    @abstractmethod
    async def start(self) -> None:
        """Start or contact the gateway. AdvertiseError if agents could not reach it, GatewayLost if we cannot."""

    @abstractmethod
    async def access(self) -> GatewayAccess:
        """How to reach the gateway now."""

    @abstractmethod
    async def publish(self, update: WeightUpdate) -> int:
        """Send a weight update to the gateway's engines; their version afterwards."""

    async def open(self, id: str | None = None, config: SessionConfig | None = None) -> AgentSession:
        """A new session, or the existing one with this id, run and trial."""
        return await (await self._connect()).open(id, config)

    def local_sessions(self) -> SessionOpener | None:
        """Opens sessions without HTTP, for workers in this process; None if the gateway runs elsewhere."""
        return None

    async def _connect(self) -> GatewayClient:
        access = await self.access()
        if access not in self._clients:
            self._clients[access] = GatewayClient(access.url, access.token, away_s=access.away_s)
        return self._clients[access]

    async def aclose(self) -> None:
        """Stop the gateway, if it was started here, and close all connections."""
        clients, self._clients = self._clients, {}
        await asyncio.gather(*(client.close() for client in clients.values()))


async def check_reachable(url: str) -> None:
    """AdvertiseError if a gateway listens on loopback and the Ray cluster has further machines."""
    from loopwright.rollouts.pools.ray.launch import cluster_nodes

    machines = {node.name for node in cluster_nodes()}
    if is_loopback(endpoint(url)[0]) and len(machines) > 1 and not all(map(is_loopback, machines)):
        raise AdvertiseError(
            f"the gateway is at {url}, which agents on the other nodes of the cluster cannot reach. Set where it "
            'listens and its address: [run.gateway] host = "0.0.0.0", advertise_host = "10.0.0.1"; with type = "ray", '
            "the address of its node is used without `advertise_host`."
        )


@dataclass(frozen=True, slots=True)
class EmbeddedSession:
    """A session at a gateway in this process: its episode is handed over in memory, not over HTTP."""

    gateway: Gateway = field(repr=False)
    id: str
    key: str = field(repr=False)
    openai_base_url: str
    anthropic_base_url: str

    async def describe(self) -> dict[str, Any]:
        return self.gateway.find(self.id).describe()

    async def complete(self, outcome: Outcome = Outcome.OK, reason: str = "") -> CompletedSession:
        session = self.gateway.find(self.id)
        episode = await session.close("complete", outcome, reason)
        verdicts = (verdict for _, verdict in sorted(session.session.verdicts.items()))
        broken = next((verdict.reason for verdict in verdicts if verdict.kind is Exactness.BROKEN), "")
        return CompletedSession(episode, broken, session.silent_s, session.restored)

    async def close(self, outcome: Outcome = Outcome.OK, reason: str = "") -> Episode:
        return (await self.complete(outcome, reason)).episode

    async def delete(self) -> None:
        try:
            await self.gateway.delete(self.id)
        except Refusal as error:
            if error.status != 404:
                raise


class EmbeddedGatewayHost(GatewayHost):
    """A gateway and its engine in the process and event loop of the run.

    It stores nothing on disk. A trial's turns are committed with its episode in the run's ledger. If the run is
    killed, its agents end with it and nobody can continue their sessions, so `resume` starts their trials again under
    the same numbers.
    """

    def __init__(self, config: GatewayConfig, build_engine: Callable[[], Engine]) -> None:
        super().__init__()
        self._config, self._build_engine = config, build_engine
        self._engine: Engine | None = None
        self._gateway: Gateway | None = None
        # Needed on loopback too: other users of this machine must not open sessions.
        self._token = secrets.token_urlsafe(24)

    async def start(self) -> None:
        self._config.address(self._config.port)  # checked before the engine, which takes long to load
        self._engine = self._build_engine()
        gateway = Gateway(self._engine, self._config, token=self._token, forgets=True)
        await gateway.__aenter__()
        self._gateway = gateway

    async def access(self) -> GatewayAccess:
        return GatewayAccess(self._started().address, self._token)

    async def publish(self, update: WeightUpdate) -> int:
        return await self._started().apply_update(update)

    async def open(self, id: str | None = None, config: SessionConfig | None = None) -> EmbeddedSession:
        gateway = self._started()
        session = await gateway.open(id, config)
        return EmbeddedSession(gateway, session.id, session.key, session.openai_base_url, session.anthropic_base_url)

    def local_sessions(self) -> SessionOpener:
        return self

    def _started(self) -> Gateway:
        if self._gateway is None:
            raise GatewayLost("the run's gateway is not started")
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
    """A gateway that runs elsewhere, reached over HTTP; its sessions outlive the run."""

    def __init__(self, access: GatewayAccess) -> None:
        super().__init__()
        self._access = access

    async def start(self) -> None:
        client = await self._connect()
        try:
            await client.check()
            # Open a session only to find out now whether the token is accepted.
            await (await client.open()).delete()
        except Refusal as error:
            raise GatewayLost(
                f"the gateway at {self._access.url} does not open sessions: {error}. "
                f"Give its token with `token_file` or {TOKEN}."
            ) from error

    async def access(self) -> GatewayAccess:
        return self._access

    async def publish(self, update: WeightUpdate) -> int:
        return await (await self._connect()).publish(update)
