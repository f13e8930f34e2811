"""A call: one request being answered, apart from the connection it came by. Those who wait for it follow it.

It is written down before anything is sampled, and done only once what was sampled is committed. When the last follower
leaves, sampling ends; a retry of the same request follows the same call, which goes on where it was.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from loopwright.gateway.draft import Draft
from loopwright.gateway.pieces import Piece
from loopwright.gateway.store import INTENT, RESULT, Statement, node_statement, written

if TYPE_CHECKING:
    from loopwright.gateway.live import Live
    from loopwright.gateway.session import Turn

Heard = tuple[int, Piece]
"""A choice, and its next piece."""


@dataclass(eq=False)
class Call:
    """One request and its choices."""

    live: "Live"
    id: str
    digest: bytes
    dialect: str
    drafts: Sequence[Draft]
    streamed: bool
    pieces: list[Heard] = field(default_factory=list)
    turns: list["Turn"] | None = None
    """What came of it; None until all of it is committed."""
    counted: int = 0
    """The tokens of it that are in the metrics, and whether its turns are."""
    told: bool = False
    _task: asyncio.Task[None] | None = None
    _followers: int = 0
    _waiting: set[asyncio.Future[bool]] = field(default_factory=set)

    def join(self) -> None:
        """Begin to follow; the call runs as long as somebody does."""
        self._followers += 1
        if self.turns is None and (self._task is None or self._task.done()):
            self.pieces = []
            self._task = asyncio.create_task(self._run(self._task))
            self._task.add_done_callback(self._ended)

    def leave(self) -> None:
        """Follow it no more. An answer that nobody waits for is not sampled to its end."""
        self._followers -= 1
        if self._followers == 0:
            if self.turns is None and self._task is not None:
                self._task.cancel()
            self.pieces = []

    @property
    def error(self) -> BaseException | None:
        """What it failed with, if it did."""
        task = self._task
        return None if task is None or not task.done() or task.cancelled() else task.exception()

    async def end(self) -> None:
        """Give it up now, whoever follows."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def result(self) -> "Sequence[Turn]":
        """The turns, once they are committed."""
        task = self._task
        if self.turns is None and task is not None:
            while not task.done():
                await self._news()
            self._raise(task)
        return self.turns or ()

    async def follow(self, patience_s: float) -> AsyncGenerator[list[Heard], None]:
        """The pieces as they come; an empty list whenever there was none for so long."""
        if self.turns is not None and not self.pieces:
            yield [(choice, piece) for choice, draft in enumerate(self.drafts) for piece in self._retold(draft)]
            return
        pieces, shown, task = self.pieces, 0, self._task
        while True:
            if shown < len(pieces):
                news, shown = pieces[shown:], len(pieces)
                yield news
            elif self.turns is not None or task is None:
                return
            elif task.done():
                self._raise(task)
                return
            elif not await self._news(patience_s):
                yield []

    async def _news(self, patience_s: float | None = None) -> bool:
        """Wait for a piece or the end; False if neither came for so long."""
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiting.add(waiter)
        timer = None if patience_s is None else loop.call_later(patience_s, _tell, waiter, False)
        try:
            return bool(await waiter)
        finally:
            self._waiting.discard(waiter)
            if timer is not None:
                timer.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # whoever follows is told; that nobody does is no error of its own
        self._wake()

    def _raise(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            raise self.live.refusal()
        if (error := task.exception()) is not None:
            raise error

    def _retold(self, draft: Draft) -> list[Piece]:
        return self.live.session.retold(draft)

    # -- sampling -----------------------------------------------------------------------------------------------

    async def _run(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:  # given up, but perhaps not yet gone
            await asyncio.wait([before])
        live = self.live
        try:
            async with live.slot(self):
                turns = await self._recorded()
        finally:
            for draft in self.drafts:
                live.session.release(draft)
        self.turns = turns
        self._wake()

    async def _recorded(self) -> list["Turn"]:
        """Sample, with the intent on disk before and the result after it."""
        store = self.live.store
        try:
            await written(store, self._intents())
            turns = await self._speak()
        finally:
            # Whatever was sampled is kept, also when nobody waits any more.
            done = store.write(self._results())
        await done
        return turns

    async def _speak(self) -> list["Turn"]:
        if len(self.drafts) == 1:
            return [await self._turn(0, self.drafts[0])]
        tasks = [asyncio.ensure_future(self._turn(choice, draft)) for choice, draft in enumerate(self.drafts)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _turn(self, choice: int, draft: Draft) -> "Turn":
        session, heard = self.live.session, partial(self._heard, choice) if self.streamed else None
        if not session.ended(draft):
            return await session.speak(draft, heard)
        if heard is not None:  # it came to its end before the call was given up
            for piece in session.retold(draft):
                heard(piece)
        return session.said(draft)

    def _heard(self, choice: int, piece: Piece) -> None:
        self.pieces.append((choice, piece))
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiting:
            _tell(waiter, True)

    def _intents(self) -> list[Statement]:
        live, now = self.live, self.live.clock()
        statements = live.unsaved()
        for choice, draft in enumerate(self.drafts):
            verdict = draft.verdict
            values = (live.id, draft.node, self.id, choice, self.digest, self.dialect)
            more = (draft.sampling.model_dump_json(), draft.seed, now, verdict.kind, verdict.reason, verdict.token)
            statements.append((INTENT, (*values, *more, draft.manner.written)))
        return statements

    def _results(self) -> list[Statement]:
        live, now = self.live, self.live.clock()
        statements: list[Statement] = []
        for draft in self.drafts:
            node, verdict = live.session.graph.nodes[draft.node], live.session.verdicts[draft.node]
            statements.append(node_statement(live.id, draft.node, node, live.session.graph.keys.get(draft.node)))
            values = (now, verdict.kind, verdict.reason, verdict.token, live.id, draft.node)
            statements.append((RESULT, values))
        return statements


def _tell(waiter: asyncio.Future[bool], news: bool) -> None:
    if not waiter.done():
        waiter.set_result(news)
