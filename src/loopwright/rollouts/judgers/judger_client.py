"""The judger in a pool, and the client that asks it for rewards, whether it is in this process or on Ray."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from loopwright.core.episode import Episode
from loopwright.core.trial import Reward
from loopwright.rollouts.judgers.base import JudgeFailed, JudgerConfig, Payload, Verdict
from loopwright.rollouts.judgers.guard import GuardedJudger, build_judger
from loopwright.rollouts.pools.base import Pool, PoolDown, Worker
from loopwright.rollouts.pools.steps import current_call

_MARGIN_S = 10.0
_REISSUES = 5
"""How many times its own time a judger waits for parts on Ray, which are issued again when others end their worker."""


class JudgeWorker(Worker):
    """Judges payloads. `partial(JudgeWorker.build, config, scenario_dir)` makes one in the process where it runs."""

    def __init__(self, judger: GuardedJudger) -> None:
        self._judger = judger

    @classmethod
    def build(cls, config: JudgerConfig, scenario_dir: Path, parts: "Sequence[JudgerClient]" = ()) -> "JudgeWorker":
        """A worker with the judger of a config. `parts` are those that it consists of and that run elsewhere."""

        def build_part(member: JudgerConfig, scenario_dir: Path) -> GuardedJudger:
            client = next((client for client in parts if client.config == member), None)
            if client is None:
                return build_judger(member, scenario_dir, build_part=build_part if member.members() else None)
            return PlacedJudger(client)

        return cls(build_judger(config, scenario_dir, build_part=build_part if parts else None))

    async def handle(self, request: Sequence[Payload]) -> list[Verdict]:
        """A verdict for each payload."""
        if (call := current_call.get()) is not None:
            call.limit_s = _longest_attempt_s(self._judger.config)
        return await self._judger.judge_group(request)

    def describe(self) -> tuple[tuple[str, ...], bool]:
        """The facts that the judger needs, and whether it compares groups."""
        return self._judger.needs, self._judger.compares

    async def close(self) -> None:
        await self._judger.close()


class JudgerClient:
    """Sends the judger what it needs of an episode. Training and evaluation can share one client.

    client = JudgerClient(pool, config)
    await client.start()
    reward = await client.judge(episode)
    """

    def __init__(self, pool: Pool, config: JudgerConfig, parts: "Sequence[JudgerClient]" = ()) -> None:
        self._pool, self.config, self._parts = pool, config, parts
        # Verdicts queue here, where no timeout runs, and not in a busy worker.
        self._slots = asyncio.Semaphore(config.capacity() * max(1, config.workers))
        self.needs: tuple[str, ...] = ()
        self.compares = False

    async def start(self) -> None:
        """Start the judger, after the parts that run elsewhere, since it asks what they need."""
        for part in self._parts:
            await part.start()
        await self._pool.start()
        self.needs, self.compares = self._pool.description

    async def judge(self, episode: Episode) -> Reward:
        """The reward of one episode; JudgeFailed without one, whatever the reason."""
        (verdict,) = await self._call([Payload.of(episode, self.needs)])
        if isinstance(verdict, JudgeFailed):
            raise verdict
        return verdict

    async def judge_group(self, episodes: Sequence[Episode]) -> list[Verdict]:
        """A verdict for each episode, compared with the others if the judger compares."""
        return await self.judge_payloads([Payload.of(episode, self.needs) for episode in episodes])

    async def judge_payloads(self, payloads: Sequence[Payload]) -> list[Verdict]:
        """A verdict for each payload of a group."""
        if self.compares:
            return await self._call(payloads)
        # One call each, so that they spread over all workers.
        verdicts = await asyncio.gather(*(self._call([payload]) for payload in payloads))
        return [verdict for (verdict,) in verdicts]

    async def close(self) -> None:
        """Stop the judger."""
        try:
            await self._pool.close()
        finally:
            await asyncio.gather(*(part.close() for part in self._parts))

    async def _call(self, payloads: Sequence[Payload]) -> list[Verdict]:
        timeout_s = self.config.total_timeout_s() * max(1, len(payloads)) + _MARGIN_S
        if self._parts:
            timeout_s *= _REISSUES
        async with self._slots:
            try:
                verdicts: list[Verdict] = await self._pool.call(payloads, timeout_s=timeout_s)
            except PoolDown:
                raise
            except Exception as error:  # noqa: BLE001  however a worker fails, the verdict is missing
                name, reason = self.config.label(), f"{type(error).__name__}: {error}".rstrip(": ")
                failure = JudgeFailed(f"judger {name!r} gave no verdict: {reason}")
                failure.__cause__ = error
                return [failure] * len(payloads)
        return verdicts


def _longest_attempt_s(config: JudgerConfig) -> float:
    return max(config.attempt_timeout_s(), *map(_longest_attempt_s, config.members().values()), 0.0)


class PlacedJudger(GuardedJudger):
    """A part of another judger with its own workers, which guard and weigh its verdicts."""

    def __init__(self, client: JudgerClient) -> None:
        self.config, self.needs, self.compares = client.config, client.needs, client.compares
        self._client = client

    async def judge_group(self, payloads: Sequence[Payload]) -> list[Verdict]:
        return await self._client.judge_payloads(payloads)

    async def close(self) -> None:
        """Nothing to do: the client that started it closes it."""
