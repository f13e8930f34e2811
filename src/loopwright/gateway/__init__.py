"""The gateway: sessions of agents with an engine, recorded token by token, and the server for them.

Names are imported when they are first used, so that a session does not import aiohttp.
"""

from typing import TYPE_CHECKING

from loopwright.core.imports import lazy_exports

if TYPE_CHECKING:
    from loopwright.gateway.client import CompletedSession, GatewayClient, GatewayLost, RemoteSession
    from loopwright.gateway.gateway import AdvertiseError, Gateway, GatewayConfig, OpenSession
    from loopwright.gateway.refusal import Refusal
    from loopwright.gateway.relay.relay import Relay, RelayConfig
    from loopwright.gateway.relay.worker import RelayWorker, WorkerRefused
    from loopwright.gateway.sessions.description import snapshot_of
    from loopwright.gateway.sessions.exactness import Exactness, Verdict
    from loopwright.gateway.sessions.session import BudgetSpent, Session, SessionLimits
    from loopwright.gateway.sessions.session_config import SessionConfig
    from loopwright.gateway.sessions.template import ChatTemplate, TemplateError
    from loopwright.gateway.sessions.turn import Turn
    from loopwright.gateway.sessions.turn_options import TurnOptions

__all__ = [
    "AdvertiseError",
    "BudgetSpent",
    "ChatTemplate",
    "CompletedSession",
    "Exactness",
    "Gateway",
    "GatewayClient",
    "GatewayConfig",
    "GatewayLost",
    "OpenSession",
    "Refusal",
    "Relay",
    "RelayConfig",
    "RelayWorker",
    "RemoteSession",
    "Session",
    "SessionConfig",
    "SessionLimits",
    "TemplateError",
    "Turn",
    "TurnOptions",
    "Verdict",
    "WorkerRefused",
    "snapshot_of",
]

__getattr__ = lazy_exports(__name__)
