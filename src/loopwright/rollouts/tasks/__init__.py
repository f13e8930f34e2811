"""Tasks: where they come from and in which order they are attempted."""

from loopwright.rollouts.tasks.mix import Prompt, TaskMix
from loopwright.rollouts.tasks.sources import JsonlTasks, ParquetTasks, PythonTasks, TasksConfig, TasksError

__all__ = ["JsonlTasks", "ParquetTasks", "Prompt", "PythonTasks", "TaskMix", "TasksConfig", "TasksError"]
