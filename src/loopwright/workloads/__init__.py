"""Workloads: what a trial runs."""

from typing import TYPE_CHECKING

from loopwright.core.imports import lazy_exports
from loopwright.workloads.base import Job, Site, Workload, WorkloadConfig, workloads

if TYPE_CHECKING:
    from loopwright.workloads.command import CommandWorkload
    from loopwright.workloads.command_config import CommandConfig, MetricConfig, SuccessConfig
    from loopwright.workloads.python import PythonConfig, PythonWorkload

__all__ = [
    "CommandConfig",
    "CommandWorkload",
    "Job",
    "MetricConfig",
    "PythonConfig",
    "PythonWorkload",
    "Site",
    "SuccessConfig",
    "Workload",
    "WorkloadConfig",
    "workloads",
]

__getattr__ = lazy_exports(__name__)
