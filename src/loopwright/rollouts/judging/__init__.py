"""Judging: the judgers that come with Loopwright, and the one wrapper that makes each of them dependable."""

from loopwright.rollouts.judging.guard import JudgerDown
from loopwright.rollouts.judging.parse import parse_judger
from loopwright.rollouts.judging.verdicts import Verdicts
from loopwright.rollouts.judging.worker import JudgeWorker, build_judger

__all__ = ["JudgeWorker", "JudgerDown", "Verdicts", "build_judger", "parse_judger"]
