"""Where trials run: processes of this machine, and Python workers that can be killed."""

from loopwright.execution.base import Command, Completion, Executor, Started, Usage
from loopwright.execution.local.call import Call, Returned
from loopwright.execution.local.callables import Checked, check
from loopwright.execution.local.executor import LocalExecutor
from loopwright.execution.local.processes import descendants, end_leftovers, start_ticks
from loopwright.execution.local.reaper import Keeper
from loopwright.execution.local.worker import WorkerPool

__all__ = [
    "Call",
    "Checked",
    "Command",
    "Completion",
    "Executor",
    "Keeper",
    "LocalExecutor",
    "Returned",
    "Started",
    "Usage",
    "WorkerPool",
    "check",
    "descendants",
    "end_leftovers",
    "start_ticks",
]
