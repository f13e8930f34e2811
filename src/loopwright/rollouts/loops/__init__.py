"""Agent loops: how a task becomes an episode."""

from typing import TYPE_CHECKING

from loopwright.core.imports import lazy_exports

if TYPE_CHECKING:
    from loopwright.rollouts.loops.base import AgentLoop, Loop, LoopConfig, SingleTurn, SingleTurnConfig
    from loopwright.rollouts.loops.tools import FunctionTool, ToolLoop, ToolLoopConfig
    from loopwright.rollouts.loops.worker import LoopWorker, RolloutRequest

__all__ = [
    "AgentLoop",
    "FunctionTool",
    "Loop",
    "LoopConfig",
    "LoopWorker",
    "RolloutRequest",
    "SingleTurn",
    "SingleTurnConfig",
    "ToolLoop",
    "ToolLoopConfig",
]

__getattr__ = lazy_exports(__name__)
