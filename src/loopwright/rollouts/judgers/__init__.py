"""Judging: the judgers that come with Loopwright, and the one wrapper that makes each of them dependable."""

from loopwright.rollouts.judgers.guard import JudgerDown
from loopwright.rollouts.judgers.judger_client import JudgerClient
from loopwright.rollouts.judgers.parse import parse_judger
from loopwright.rollouts.judgers.worker import JudgeWorker, build_judger

__all__ = ["JudgeWorker", "JudgerClient", "JudgerDown", "build_judger", "parse_judger"]
