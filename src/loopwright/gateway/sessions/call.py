"""A call: one request that is being answered, independent of the connection it came by.

It is stored before anything is sampled, and complete only when what was sampled is committed. Connections follow it;
when the last one leaves, sampling stops. A retry of the same request joins the same call, which continues where it was.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from loopwright.engines.base import BadSampling, ContextFull
from loopwright.gateway.sessions.exactness import Exactness
from loopwright.gateway.sessions.store import INTENT, RESULT, DiskStore, Statement
from loopwright.gateway.sessions.turn import Delta, Draft, Turn

if TYPE_CHECKING:
    from loopwright.gateway.sessions.served_session import ServedSession

_STORED = ("ignored", "branch", "conversation", "has_instructions", "response")
ChoiceDelta = tuple[int, Delta]
"""The index of a choice, and its next delta."""
_MIN_GAP_S = 0.02
"""Deltas that follow others sooner are sent together: a write costs more than what is in it."""


@dataclass(frozen=True, slots=True)
class CallRecord:
    """What is recorded of a request besides its messages."""

    dialect: str = ""
    ignored: Mapping[str, Any] = field(default_factory=dict)
    """Fields that had no effect, with their values."""
    branch: str = ""
    """The client's name for the conversation."""
    conversation: str = ""
    """The id of the conversation that the client opened for it."""
    has_instructions: bool = False
    """Whether the first message was for this turn only."""
    response: Mapping[str, Any] = field(default_factory=dict)
    """What a stored response needs to know of its request."""

    def as_json(self, options_json: str) -> str:
        """The options of a turn with this record, for the store; the dialect has a column of its own."""
        data = {name: value for name in _STORED if (value := getattr(self, name))}
        return options_json if not data else orjson.dumps({**orjson.loads(options_json), "request": data}).decode()

    @classmethod
    def from_json(cls, dialect: str, stored: str) -> "CallRecord":
        """What `as_json` wrote."""
        return cls(dialect, **orjson.loads(stored).get("request", {}))


@dataclass(slots=True, eq=False)
class SessionCall:
    """One request and its choices."""

    owner: "ServedSession"
    id: str
    digest: bytes
    record: CallRecord
    drafts: Sequence[Draft]
    streamed: bool
    deltas: list[ChoiceDelta] = field(default_factory=list)
    turns: list[Turn] | None = None
    """The result; None until all of it is committed, empty once nobody follows: the nodes have it."""
    tokens_counted: int = 0
    """How many of its tokens the metrics contain."""
    turns_counted: bool = False
    """Whether the metrics contain its turns."""
    _task: asyncio.Task[None] | None = None
    _followers: int = 0
    _waiters: set[asyncio.Future[None]] = field(default_factory=set)
    _woken_at: float = 0.0
    _next_wake: asyncio.TimerHandle | None = None
    _abandoned: bool = False
    """Whether we cancelled the task because nobody follows it; others may cancel it, too."""
    _is_delivered: bool = False
    """Whether a follower has got the whole response."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the task at work: an abandoned one may still be running when the next one starts."""

    @property
    def idle(self) -> bool:
        """Whether it has no result, and nothing is at work on one."""
        task = self._task
        return self.turns is None and (task is None or task.done() or self._abandoned)

    def join(self) -> None:
        """Start to follow; the call runs as long as it has followers."""
        self._followers += 1
        if self.idle:
            self.deltas, self._abandoned = [], False
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(self._on_done)
            if self.owner.store is not None:
                self.owner.store.calls += 1

    def leave(self, *, is_delivered: bool) -> None:
        """Stop following, with or without the whole response. Without followers, sampling stops."""
        self._followers -= 1
        self._is_delivered |= is_delivered and self.error is None
        if self._followers == 0:
            if self.turns is None:
                self._abandon()
            else:
                self.turns = []
            self.deltas = []
            if self.error is None:
                self.record_delivery(self._is_delivered)

    def record_delivery(self, is_delivered: bool) -> None:
        """Record whether the client has the turns that are finished, while the session is open."""
        self._is_delivered, nodes = is_delivered, self.owner.session.graph.nodes
        if self.owner.status != "open":
            return
        for draft in self.drafts:
            node = nodes[draft.node]
            if node.is_delivered != is_delivered and node.finish in ("stop", "length"):
                nodes[draft.node] = replace(node, is_delivered=is_delivered)
                if self.owner.store is not None:
                    self.owner.unsaved.add(self)  # written at the latest with the intent of the next call

    def _abandon(self) -> None:
        # Only once: a second cancellation would interrupt the final write.
        if self._task is not None and not self._abandoned:
            self._abandoned = True
            self._task.cancel()

    @property
    def error(self) -> BaseException | None:
        """The exception it failed with, if it did."""
        task = self._task
        return None if task is None or not task.done() or task.cancelled() else task.exception()

    async def stop(self) -> None:
        """Stop sampling now, whatever follows; returns when nothing more will be recorded."""
        self._abandon()
        async with self._lock:
            pass

    def prompts(self) -> list[tuple[int, ...]]:
        """The ids that the engine was given for each choice."""
        places = {(draft.parent, draft.opening): draft for draft in self.drafts}  # choices share theirs
        prompts = {place: self.owner.session.prompt_ids(draft) for place, draft in places.items()}
        return [prompts[draft.parent, draft.opening] for draft in self.drafts]

    async def result(self) -> Sequence[Turn]:
        """The turns, once they are committed."""
        task = self._task
        if self.turns is None and task is not None:
            while self.turns is None and not task.done():
                await self._wait()  # not `await task`: cancelling one follower must not cancel the call
            if self.turns is None:
                self._raise_failure(task)
        return self.turns or [self.owner.session.result(draft) for draft in self.drafts]

    async def follow(self, keepalive_s: float) -> AsyncGenerator[list[ChoiceDelta], None]:
        """The deltas as they are sampled; an empty list after each `keepalive_s` seconds without any."""
        if self.turns is not None and not self.deltas:
            session = self.owner.session
            yield [(choice, delta) for choice, draft in enumerate(self.drafts) for delta in session.deltas(draft)]
            return
        deltas, count, task = self.deltas, 0, self._task
        loop, timer = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
        since = loop.time()

        # One timer for all deltas: a stream has many. It is given itself: a cycle would keep the session in memory.
        def keep_alive(again: Callable[..., None]) -> None:
            left_s = since + keepalive_s - loop.time()
            if left_s <= 0:
                self._wake()
            timer[:] = [loop.call_later(left_s if left_s > 0 else keepalive_s, again, again)]

        keep_alive(keep_alive)
        try:
            while True:
                if count < len(deltas):
                    new, count, since = deltas[count:], len(deltas), loop.time()
                    yield new
                elif self.turns is not None or task is None:
                    return
                elif task.done():
                    self._raise_failure(task)
                    return
                elif loop.time() - since >= keepalive_s:
                    since = loop.time()
                    yield []
                else:
                    await self._wait()
        finally:
            timer[0].cancel()

    async def _wait(self) -> None:
        """Wait for a delta, the end, or the time to keep a connection alive."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def _wake(self) -> None:
        if self._next_wake is not None:
            self._next_wake.cancel()
        self._next_wake = None
        if self.streamed:
            self._woken_at = asyncio.get_running_loop().time()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # raised to followers; without any, asyncio must not log it as never retrieved
        if self.owner.store is not None:
            self.owner.store.calls -= 1
        if task is self._task:  # here, because a task that is cancelled at once never starts
            for draft in self.drafts:
                self.owner.session.release(draft)
            self._task = None if self.turns is not None else task
        self._wake()

    def _raise_failure(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            raise self.owner.refusal()
        if (error := task.exception()) is not None:
            raise error

    # -- sampling -----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        owner = self.owner
        async with self._lock:
            await owner.enter(self)
            try:
                owner.session.resume(self.drafts)
                self.turns = await (self._sample() if owner.store is None else self._sample_durably(owner.store))
            except (ContextFull, BadSampling):
                await owner.discard(self)
                raise
            finally:
                owner.leave(self)
        self._wake()

    async def _sample_durably(self, store: DiskStore) -> list[Turn]:
        """Sample, with the intent stored before and the result after it."""
        owner, has_intent = self.owner, False
        owner.unsaved.add(self)
        try:
            await owner.save(self._intents())
            has_intent = True
            return await self._sample()
        finally:
            # What was sampled is stored, even if nobody follows any more.
            await owner.save(self._results() if has_intent else self.statements())
            owner.unsaved.discard(self)

    async def _sample(self) -> list[Turn]:
        if len(self.drafts) == 1:
            return [await self._sample_choice(0, self.drafts[0])]
        tasks = [asyncio.ensure_future(self._sample_choice(index, draft)) for index, draft in enumerate(self.drafts)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _sample_choice(self, choice: int, draft: Draft) -> Turn:
        session, on_delta = self.owner.session, partial(self._add_delta, choice) if self.streamed else None
        if not session.is_done(draft):
            return await session.sample(draft, on_delta)
        if on_delta is not None:  # it was finished before the call was abandoned
            for delta in session.deltas(draft):
                on_delta(delta)
        return session.result(draft)

    def _add_delta(self, choice: int, delta: Delta) -> None:
        """The first delta is sent at once, and those after it when the gap since the last ones is long enough."""
        self.deltas.append((choice, delta))
        if self._next_wake is None:
            loop = asyncio.get_running_loop()
            if (left_s := self._woken_at + _MIN_GAP_S - loop.time()) > 0:
                self._next_wake = loop.call_later(left_s, self._wake)
            else:
                self._wake()

    # -- the store ----------------------------------------------------------------------------------------------

    def statements(self) -> list[Statement]:
        """All that has to be stored, in its current state."""
        return [*self._intents(), *self._results()]

    def _intents(self) -> list[Statement]:
        owner, now = self.owner, self.owner.clock()
        statements: list[Statement] = []
        for choice, draft in enumerate(self.drafts):
            verdict = draft.verdict
            sampling, options, sampling_json, options_json = owner.latest_intent
            if sampling is not draft.sampling or options is not draft.options:
                sampling_json, options_json = draft.sampling.model_dump_json(), draft.options.as_json()
                owner.latest_intent = draft.sampling, draft.options, sampling_json, options_json
            call = (self.id, choice, self.digest, self.record.dialect, sampling_json, draft.seed, now)
            prompt = (verdict.kind.value, verdict.reason, verdict.token, self.record.as_json(options_json))
            statements.append((INTENT, (*owner.node_row(draft.node), *call, *prompt)))
        return statements

    def _results(self) -> list[Statement]:
        owner, now = self.owner, self.owner.clock()
        statements: list[Statement] = []
        for draft in self.drafts:
            verdict = owner.session.verdicts[draft.node]
            failure = (verdict.reason, verdict.token) if verdict.kind == Exactness.BROKEN else (None, None)
            id, number, _, *turn = owner.node_row(draft.node)
            statements.append((RESULT, (*turn, now, *failure, id, number)))
        return statements
