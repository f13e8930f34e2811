"""Remote agents: somebody else's program or function attempts a task, and a gateway records it token by token."""

from typing import TYPE_CHECKING

from loopwright.core.imports import lazy_exports

if TYPE_CHECKING:
    from loopwright.rollouts.remote.config import RemoteConfig
    from loopwright.rollouts.remote.gateway_host import (
        AgentSession,
        EmbeddedGatewayHost,
        ExternalGatewayHost,
        GatewayAccess,
        GatewayHost,
    )

__all__ = ["AgentSession", "EmbeddedGatewayHost", "ExternalGatewayHost", "GatewayAccess", "GatewayHost", "RemoteConfig"]

__getattr__ = lazy_exports(__name__)
