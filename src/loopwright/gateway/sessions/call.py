"""A call: one request being answered, apart from the connection it came by. Those who wait for it follow it.

It is written down before anything is sampled, and done only once what was sampled is committed. When the last follower
leaves, sampling ends; a retry of the same request follows the same call, which goes on where it was.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from loopwright.gateway.sessions.draft import Draft
from loopwright.gateway.sessions.exactness import Exactness
from loopwright.gateway.sessions.pieces import Delta
from loopwright.gateway.sessions.store import INTENT, RESULT, Statement, node_statement

if TYPE_CHECKING:
    from loopwright.gateway.sessions.served_session import ServedSession
    from loopwright.gateway.sessions.session import Turn

Heard = tuple[int, Delta]
"""A choice, and its next piece."""


@dataclass(eq=False)
class SessionCall:
    """One request and its choices."""

    served: "ServedSession"
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
    _given_up: bool = False
    """Whether nobody waits for the task; others than we may cancel it, too, for a moment."""
    _alone: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the task that is at it: one that was given up may not yet be gone when the next one comes."""

    @property
    def idle(self) -> bool:
        """Whether it is neither answered nor about to be."""
        task = self._task
        return self.turns is None and (task is None or task.done() or self._given_up)

    def join(self) -> None:
        """Begin to follow; the call runs as long as somebody does."""
        self._followers += 1
        if self.idle:
            self.pieces, self._given_up = [], False
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(self._ended)

    def leave(self) -> None:
        """Follow it no more. An answer that nobody waits for is not sampled to its end."""
        self._followers -= 1
        if self._followers == 0:
            if self.turns is None:
                self._give_up()
            self.pieces = []

    def _give_up(self) -> None:
        # Once: a second time would cut short what is written last.
        if self._task is not None and not self._given_up:
            self._given_up = True
            self._task.cancel()

    @property
    def error(self) -> BaseException | None:
        """What it failed with, if it did."""
        task = self._task
        return None if task is None or not task.done() or task.cancelled() else task.exception()

    async def end(self) -> None:
        """Give it up now, whoever follows; done once nothing more is recorded of it."""
        self._give_up()
        async with self._alone:
            pass

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
        if task is self._task:  # here, as one that is given up at once never begins
            for draft in self.drafts:
                self.served.session.release(draft)
        self._wake()

    def _raise(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            raise self.served.refusal()
        if (error := task.exception()) is not None:
            raise error

    def _retold(self, draft: Draft) -> list[Delta]:
        return self.served.session.retold(draft)

    # -- sampling -----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        served = self.served
        async with self._alone, served.slot(self):
            served.session.resume(self.drafts)
            served.unsure.add(self)
            turns = await self._recorded()
        self.turns = turns
        self._wake()

    async def _recorded(self) -> list["Turn"]:
        """Sample, with the intent on disk before and the result after it."""
        served, intended = self.served, False
        try:
            await served.keep(self._intents())
            intended = True
            return await self._speak()
        finally:
            # Whatever was sampled is kept, also when nobody waits any more.
            await served.keep(self._results() if intended else self.rows())
            served.unsure.discard(self)

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
        session, heard = self.served.session, partial(self._heard, choice) if self.streamed else None
        if not session.ended(draft):
            return await session.speak(draft, heard)
        if heard is not None:  # it came to its end before the call was given up
            for piece in session.retold(draft):
                heard(piece)
        return session.said(draft)

    def _heard(self, choice: int, piece: Delta) -> None:
        self.pieces.append((choice, piece))
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiting:
            _tell(waiter, True)

    def rows(self) -> list[Statement]:
        """All that is to be stored of it, as it is now."""
        return [*self._intents(), *self._results()]

    def _intents(self) -> list[Statement]:
        served, now = self.served, self.served.clock()
        statements: list[Statement] = []
        for choice, draft in enumerate(self.drafts):
            verdict = draft.verdict
            values = (served.id, draft.node, self.id, choice, self.digest, self.dialect)
            more = (draft.sampling.model_dump_json(), draft.seed, now, verdict.kind, verdict.reason, verdict.token)
            statements.append((INTENT, (*values, *more, draft.manner.written)))
        return statements

    def _results(self) -> list[Statement]:
        served, now = self.served, self.served.clock()
        statements: list[Statement] = []
        for draft in self.drafts:
            node, verdict = served.session.graph.nodes[draft.node], served.session.verdicts[draft.node]
            statements.append(node_statement(served.id, draft.node, node, served.session.graph.keys.get(draft.node)))
            failure = (verdict.reason, verdict.token) if verdict.kind == Exactness.BROKEN else (None, None)
            statements.append((RESULT, (now, *failure, served.id, draft.node)))
        return statements


def _tell(waiter: asyncio.Future[bool], news: bool) -> None:
    if not waiter.done():
        waiter.set_result(news)
