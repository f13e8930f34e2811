"""Environments: what an agent acts on. Search runs a workload per trial, live steps a server, gym adapts both.

Names are imported when they are first used, so that a search does not import gymnasium.
"""

from typing import TYPE_CHECKING

from loopwright.core.imports import lazy_exports

if TYPE_CHECKING:
    from loopwright.envs.gym.adapter import GymnasiumAdapter, LiveAdapter
    from loopwright.envs.gym.observation import ObsLeafDescriptor, RegimeEncoder, StructuredObservation
    from loopwright.envs.gym.vector import VectorAdapter
    from loopwright.envs.live.address import AddressError
    from loopwright.envs.live.config import LiveConfig
    from loopwright.envs.live.env import LiveEnv
    from loopwright.envs.live.remote import RemoteServer
    from loopwright.envs.live.serve import EnvServer, serve
    from loopwright.envs.live.server import GymServer, ServerError, ServerLost
    from loopwright.envs.replay import ReplayEnv
    from loopwright.envs.search import SearchEnv

__all__ = [
    "AddressError",
    "EnvServer",
    "GymServer",
    "GymnasiumAdapter",
    "LiveAdapter",
    "LiveConfig",
    "LiveEnv",
    "ObsLeafDescriptor",
    "RegimeEncoder",
    "RemoteServer",
    "ReplayEnv",
    "SearchEnv",
    "ServerError",
    "ServerLost",
    "StructuredObservation",
    "VectorAdapter",
    "serve",
]

__getattr__ = lazy_exports(__name__)
