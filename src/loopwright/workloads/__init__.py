"""Workloads: what a trial runs."""

from typing import TYPE_CHECKING

from loopwright.core.imports import lazy_exports
from loopwright.workloads.base import Job, Site, Workload, WorkloadConfig

if TYPE_CHECKING:
    from loopwright.workloads.command import CommandWorkload
    from loopwright.workloads.python import PythonWorkload

__all__ = ["CommandWorkload", "Job", "PythonWorkload", "Site", "Workload", "WorkloadConfig"]

__getattr__ = lazy_exports(__name__, {"CommandWorkload": "command", "PythonWorkload": "python"})
