"""JudgerClient: what whoever has episodes asks for their rewards, wherever the judger lives."""

import asyncio
from collections.abc import Sequence
from typing import Any

from loopwright.core.episode import Episode
from loopwright.core.reward import Reward
from loopwright.rollouts.judgers.base import JudgeFailed, JudgerConfig, Payload, Verdict
from loopwright.rollouts.judgers.worker import ABOUT
from loopwright.rollouts.pools.base import Pool, PoolDown

_MARGIN_S = 10.0


class JudgerClient:
    """Takes from an episode the little that the judger needs and asks the pool. Training and evaluation can share one.

    verdicts = JudgerClient(pool, config)
    await verdicts.start()
    reward = await verdicts.judge(episode)
    """

    def __init__(self, pool: Pool, config: JudgerConfig) -> None:
        self._pool, self._config = pool, config
        # JudgerClient queue here, where no time runs, and not in a worker that is busy.
        self._room = asyncio.Semaphore(config.room() * max(1, config.workers))
        self.needs: tuple[str, ...] = ()
        self.compares = False

    async def start(self) -> None:
        """Have the judger ready."""
        await self._pool.start()
        self.needs, self.compares = (await self._pool.publish(ABOUT))[0]

    async def judge(self, episode: Episode) -> Reward:
        """The reward of one episode; JudgeFailed if there is none, whatever the reason."""
        reward: Reward = await self._call(Payload.of(episode, self.needs), self._config.patience_s())
        return reward

    async def judge_group(self, episodes: Sequence[Episode]) -> list[Verdict]:
        """A reward or a JudgeFailed for each episode; compared with one another if the judger does that."""
        if not self.compares:
            return list(await asyncio.gather(*map(self._judge_or_fail, episodes)))
        payloads = [Payload.of(episode, self.needs) for episode in episodes]
        try:
            verdicts: list[Verdict] = await self._call(payloads, self._config.patience_s() * max(1, len(payloads)))
        except JudgeFailed as error:
            return [error] * len(payloads)
        return verdicts

    async def close(self) -> None:
        """Let the judger go."""
        await self._pool.close()

    async def _judge_or_fail(self, episode: Episode) -> Verdict:
        try:
            return await self.judge(episode)
        except JudgeFailed as error:
            return error

    async def _call(self, request: Any, patience_s: float) -> Any:
        async with self._room:
            try:
                return await self._pool.call(request, timeout_s=patience_s + _MARGIN_S)
            except (JudgeFailed, PoolDown):
                raise
            except Exception as error:
                name, reason = self._config.label(), f"{type(error).__name__}: {error}".rstrip(": ")
                raise JudgeFailed(f"judger {name!r} gave no verdict: {reason}") from error
