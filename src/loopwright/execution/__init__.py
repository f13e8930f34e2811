"""Where trials run: processes of this machine, and Python workers that can be killed."""

from loopwright.execution.base import Command, Completion, Executor, OnStart, Usage
from loopwright.execution.local.call import CallResult, FunctionCall
from loopwright.execution.local.callables import CallableSignature, check
from loopwright.execution.local.executor import LocalExecutor
from loopwright.execution.local.processes import descendants, end_leftovers, start_ticks
from loopwright.execution.local.reaper import Reaper
from loopwright.execution.local.worker import WorkerPool

__all__ = [
    "CallResult",
    "CallableSignature",
    "Command",
    "Completion",
    "Executor",
    "FunctionCall",
    "LocalExecutor",
    "OnStart",
    "Reaper",
    "Usage",
    "WorkerPool",
    "check",
    "descendants",
    "end_leftovers",
    "start_ticks",
]
