"""Where trials run: local processes, Python workers that can be killed, and clusters."""

from typing import TYPE_CHECKING

from loopwright.core.imports import lazy_exports

if TYPE_CHECKING:
    from loopwright.execution.base import (
        CallExecutor,
        CallResult,
        Command,
        Completion,
        Executor,
        FunctionCall,
        OnStart,
        Usage,
    )
    from loopwright.execution.local.executor import LocalExecutor
    from loopwright.execution.local.system import LocalSystem
    from loopwright.execution.local.worker_pool import WorkerPool
    from loopwright.execution.system import SystemConfig, systems

__all__ = [
    "CallExecutor",
    "CallResult",
    "Command",
    "Completion",
    "Executor",
    "FunctionCall",
    "LocalExecutor",
    "LocalSystem",
    "OnStart",
    "SystemConfig",
    "Usage",
    "WorkerPool",
    "systems",
]

__getattr__ = lazy_exports(__name__)
