"""The judger as a worker, so that it can live in a pool, near or far."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

from loopwright.core.reward import Reward
from loopwright.rollouts.judgers.base import JudgerConfig, Payload, Verdict, judgers
from loopwright.rollouts.judgers.guard import Guarded, judge_all
from loopwright.rollouts.pools.base import Worker

ABOUT = "about"
"""The message to which a worker answers with what it needs and whether it compares."""


def build_judger(config: JudgerConfig, home: Path, rng: Random | None = None) -> Guarded:
    """A judger behind its guard; `rng` spreads its retries."""
    return Guarded(judgers.get(config.type)(config, home), rng)


class JudgeWorker(Worker):
    """Judges one payload, or a group of them. `partial(JudgeWorker, config, home)` makes one where it will live."""

    def __init__(self, config: JudgerConfig, home: Path) -> None:
        self._judger = build_judger(config, home)

    async def handle(self, request: Payload | Sequence[Payload]) -> Reward | list[Verdict]:
        """The reward, or JudgeFailed; for a group, a reward or a JudgeFailed for each."""
        if isinstance(request, Payload):
            return await self._judger.judge(request)
        return await judge_all(self._judger, request)

    async def apply_update(self, update: object) -> tuple[tuple[str, ...], bool] | None:
        """What it needs, and whether it compares, if that is asked."""
        return (self._judger.needs, self._judger.compares) if update == ABOUT else None

    async def close(self) -> None:
        await self._judger.close()
