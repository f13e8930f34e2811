"""Where trials run: local processes, and Python workers that can be killed."""

from loopwright.execution.base import CallResult, Command, Completion, Executor, FunctionCall, OnStart, Usage
from loopwright.execution.local.executor import LocalExecutor
from loopwright.execution.local.worker_pool import WorkerPool

__all__ = [
    "CallResult",
    "Command",
    "Completion",
    "Executor",
    "FunctionCall",
    "LocalExecutor",
    "OnStart",
    "Usage",
    "WorkerPool",
]
