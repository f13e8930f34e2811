"""Batches: payloads that arrive together are judged together, and each gets its own verdict back."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

from pydantic import Field

from loopwright.core.reward import Reward
from loopwright.rollouts.judgers.base import JudgeFailed, JudgerConfig, Payload, Verdict
from loopwright.rollouts.judgers.verdict_parsing import BadVerdict, BadVerdictType

T = TypeVar("T")
Judge = Callable[[Sequence[Payload]], Awaitable[Sequence[Verdict]]]
Place = asyncio.Future[Verdict]
"""Where somebody waits for a verdict."""


class BatchedConfig(JudgerConfig):
    """A judger that can be given several payloads at a time. A batch is tried, timed and counted as one."""

    batch: int = Field(default=1, ge=1)
    """How many payloads it is given at a time at most; 1: each by itself."""
    batch_wait_s: float = Field(default=0.01, ge=0)
    """Seconds that the first payload of a batch waits for others, unless the batch is full before."""

    def patience_s(self) -> float:
        return super().patience_s() + (self.batch_wait_s if self.batch > 1 else 0.0)

    def room(self) -> int:
        return self.concurrency * self.batch


class _Batch:
    """Payloads, and for each of them the place where its verdict is awaited."""

    def __init__(self) -> None:
        self.places: dict[Place, Payload] = {}
        self.timer: asyncio.TimerHandle | None = None
        self.work: asyncio.Task[None] | None = None

    def leave(self, place: Place) -> None:
        """Nobody waits there any more; where nobody waits at all, nothing is judged."""
        self.places.pop(place, None)
        if not self.places and self.work is not None:
            self.work.cancel()


class Batches:
    """Gathers payloads until there are `size` of them, or `wait_s` after the first, and has them judged."""

    def __init__(self, judge: Judge, size: int, wait_s: float) -> None:
        self._judge, self._size, self._wait_s = judge, size, wait_s
        self._open: _Batch | None = None
        self._flying: set[_Batch] = set()

    async def judge(self, payload: Payload) -> Reward:
        """The verdict on one of them. A batch without an answer is a failure of each payload in it."""
        batch, place = self._join(payload)
        try:
            verdict = await place
        except asyncio.CancelledError:
            batch.leave(place)
            raise
        if isinstance(verdict, JudgeFailed):
            raise verdict
        return verdict

    async def close(self) -> None:
        """Give up on all that is waited for."""
        batches = [*self._flying, *([self._open] if self._open else [])]
        self._open = None
        for batch in batches:
            if batch.timer is not None:
                batch.timer.cancel()
            _settle(batch.places, JudgeFailed("the judger was closed"))
            if batch.work is not None:
                batch.work.cancel()
        if works := [batch.work for batch in batches if batch.work is not None]:
            await asyncio.wait(works)

    def _join(self, payload: Payload) -> tuple[_Batch, Place]:
        loop = asyncio.get_running_loop()
        batch, place = self._open or _Batch(), loop.create_future()
        batch.places[place] = payload
        if len(batch.places) >= self._size:
            self._send(batch)
        elif self._open is None:
            batch.timer = loop.call_later(self._wait_s, self._send, batch)
            self._open = batch
        return batch, place

    def _send(self, batch: _Batch) -> None:
        if self._open is batch:
            self._open = None
        if batch.timer is not None:
            batch.timer.cancel()
        if batch.places:
            self._flying.add(batch)
            batch.work = asyncio.create_task(self._work(batch))
            batch.work.add_done_callback(lambda _: self._flying.discard(batch))

    async def _work(self, batch: _Batch) -> None:
        places, payloads = list(batch.places), list(batch.places.values())
        try:
            for place, verdict in zip(places, await self._judge(payloads), strict=True):
                _settle((place,), verdict)
        except Exception as error:  # noqa: BLE001  It is raised where the verdicts are awaited.
            _settle(places, error)


def _settle(places: Iterable[Place], verdict: Verdict | Exception) -> None:
    for place in places:
        if place.done():
            continue
        if isinstance(verdict, Reward | JudgeFailed):
            place.set_result(verdict)
        else:
            place.set_exception(verdict)


def one_each(values: Any, name: str, count: int) -> list[Any]:
    """What a judger called `name` returned for so many payloads; a breach if it is not a list of as many entries."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list | tuple):
        raise BadVerdictType(f"judger {name!r} returned {type(values).__name__}, not a list with an entry for each")
    if len(values) != count:
        raise BadVerdict(f"judger {name!r} returned {len(values)} entries for {count} episodes")
    return list(values)


def or_failed(make: Callable[..., T], *args: Any) -> T | JudgeFailed:
    """What is made of one entry, or its failure, as a value: it costs no other entry its reward."""
    try:
        return make(*args)
    except JudgeFailed as error:
        return error
