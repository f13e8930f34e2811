"""Judgers: how an episode, or a group of them, becomes a reward. A guard makes each of them dependable."""

from loopwright.rollouts.judgers.base import (
    BaseJudger,
    BatchJudger,
    BatchJudgerConfig,
    GroupJudger,
    JudgeFailed,
    Judger,
    JudgerConfig,
    Payload,
    Verdict,
    parse_judger,
)
from loopwright.rollouts.judgers.guard import GuardedJudger, JudgerDown, build_judger, guard_judger
from loopwright.rollouts.judgers.judger_client import JudgerClient, JudgeWorker
from loopwright.rollouts.judgers.python import FunctionJudger

__all__ = [
    "BaseJudger",
    "BatchJudger",
    "BatchJudgerConfig",
    "FunctionJudger",
    "GroupJudger",
    "GuardedJudger",
    "JudgeFailed",
    "JudgeWorker",
    "Judger",
    "JudgerClient",
    "JudgerConfig",
    "JudgerDown",
    "Payload",
    "Verdict",
    "build_judger",
    "guard_judger",
    "parse_judger",
]
