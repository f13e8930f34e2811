"""Remote agents: somebody else's program or function attempts a task, and a gateway records it token by token."""

from typing import TYPE_CHECKING

from loopwright.core.imports import lazy_exports

if TYPE_CHECKING:
    from loopwright.rollouts.remote.config import RemoteConfig
    from loopwright.rollouts.remote.gateway_config import EmbeddedGatewayConfig, ExternalGatewayConfig, RayGatewayConfig
    from loopwright.rollouts.remote.gateway_host import (
        AgentSession,
        EmbeddedGatewayHost,
        ExternalGatewayHost,
        GatewayAccess,
        GatewayHost,
    )
    from loopwright.rollouts.remote.gateway_pool import GatewayPool
    from loopwright.rollouts.remote.worker import RemoteRequest, RemoteWorker

__all__ = [
    "AgentSession",
    "EmbeddedGatewayConfig",
    "EmbeddedGatewayHost",
    "ExternalGatewayConfig",
    "ExternalGatewayHost",
    "GatewayAccess",
    "GatewayHost",
    "GatewayPool",
    "RayGatewayConfig",
    "RemoteConfig",
    "RemoteRequest",
    "RemoteWorker",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "AgentSession": "gateway_host",
        "EmbeddedGatewayConfig": "gateway_config",
        "EmbeddedGatewayHost": "gateway_host",
        "ExternalGatewayConfig": "gateway_config",
        "ExternalGatewayHost": "gateway_host",
        "GatewayAccess": "gateway_host",
        "GatewayHost": "gateway_host",
        "GatewayPool": "gateway_pool",
        "RayGatewayConfig": "gateway_config",
        "RemoteConfig": "config",
        "RemoteRequest": "worker",
        "RemoteWorker": "worker",
    },
)
