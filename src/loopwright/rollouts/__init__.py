"""Rollouts: agent loops turn tasks into episodes, judgers score them, and a producer supplies a trainer with groups.

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from loopwright.core.episode import Episode
from loopwright.core.imports import lazy_exports
from loopwright.core.task import Task

if TYPE_CHECKING:
    from loopwright.rollouts.build import build_judger_client, build_pool, rollout_env
    from loopwright.rollouts.collect import Collect, CollectConfig
    from loopwright.rollouts.config import RolloutConfig
    from loopwright.rollouts.env import PolicySource, RolloutEnv
    from loopwright.rollouts.evaluation import EvalConfig
    from loopwright.rollouts.group import DiscardedGroups, Group
    from loopwright.rollouts.judgers.base import (
        BatchJudger,
        BatchJudgerConfig,
        GroupJudger,
        JudgeFailed,
        Judger,
        JudgerConfig,
        Payload,
        Verdict,
    )
    from loopwright.rollouts.judgers.guard import JudgerDown, guard_judger
    from loopwright.rollouts.judgers.judger_client import JudgerClient, JudgeWorker
    from loopwright.rollouts.judgers.python import FunctionJudger
    from loopwright.rollouts.loops.base import AgentLoop, LoopConfig, SingleTurn, SingleTurnConfig
    from loopwright.rollouts.loops.worker import LoopWorker, RolloutRequest
    from loopwright.rollouts.pools.local import LocalPool
    from loopwright.rollouts.produce_config import ProduceConfig
    from loopwright.rollouts.producer import GroupProducer, ProductionFailed
    from loopwright.rollouts.tasks.files import DatasetsTasks, JsonlTasks, ParquetTasks
    from loopwright.rollouts.tasks.mix import Prompt, TaskMix
    from loopwright.rollouts.tasks.sources import PythonTasks, TasksConfig, TasksError


__all__ = [
    "AgentLoop",
    "BatchJudger",
    "BatchJudgerConfig",
    "Collect",
    "CollectConfig",
    "DatasetsTasks",
    "DiscardedGroups",
    "Episode",
    "EvalConfig",
    "FunctionJudger",
    "Group",
    "GroupJudger",
    "GroupProducer",
    "JsonlTasks",
    "JudgeFailed",
    "JudgeWorker",
    "Judger",
    "JudgerClient",
    "JudgerConfig",
    "JudgerDown",
    "LocalPool",
    "LoopConfig",
    "LoopWorker",
    "ParquetTasks",
    "Payload",
    "PolicySource",
    "ProduceConfig",
    "ProductionFailed",
    "Prompt",
    "PythonTasks",
    "RolloutConfig",
    "RolloutEnv",
    "RolloutRequest",
    "SingleTurn",
    "SingleTurnConfig",
    "Task",
    "TaskMix",
    "TasksConfig",
    "TasksError",
    "Verdict",
    "build_judger_client",
    "build_pool",
    "guard_judger",
    "rollout_env",
]

__getattr__ = lazy_exports(__name__)
