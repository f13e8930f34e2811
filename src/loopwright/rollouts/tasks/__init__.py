"""Tasks: where they come from and in which order they are attempted."""

from loopwright.rollouts.tasks.files import DatasetsTasks, JsonlTasks, ParquetTasks
from loopwright.rollouts.tasks.mix import Prompt, TaskMix
from loopwright.rollouts.tasks.sources import PythonTasks, TasksConfig, TasksError

__all__ = [
    "DatasetsTasks",
    "JsonlTasks",
    "ParquetTasks",
    "Prompt",
    "PythonTasks",
    "TaskMix",
    "TasksConfig",
    "TasksError",
]
