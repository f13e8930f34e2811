"""A live session: a session with a key, config, calls under way, and a place in the store."""

import asyncio
import hmac
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

from loopwright.core.episode import Episode
from loopwright.core.errors import StorageError
from loopwright.core.outcome import Outcome
from loopwright.engines.base import Engine, Reasoning, Sampling
from loopwright.gateway.dialects.base import Dialect, TurnRequest
from loopwright.gateway.refusal import Refusal
from loopwright.gateway.server.body import Bodies
from loopwright.gateway.sessions.call import SessionCall
from loopwright.gateway.sessions.draft import Draft
from loopwright.gateway.sessions.exactness import Exactness, Verdict
from loopwright.gateway.sessions.manner import Manner
from loopwright.gateway.sessions.session import Session, SessionLimits
from loopwright.gateway.sessions.session_config import SessionConfig
from loopwright.gateway.sessions.snapshot import snapshot_of
from loopwright.gateway.sessions.store import GAP, Statement, Store, forgotten, node_statement, nodes_of
from loopwright.gateway.sessions.template import ChatTemplate

_REMEMBERED = 64
"""Calls of a session that a retry can still find."""
_RETRIED = 8
"""The same after a restart."""
_WAITING = 256
"""Calls that may wait for a slot."""
_SESSION = "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
_LOST = "the gateway ended before this turn did: what was sampled is not known"


class ServedSession:
    """One agent's session on the wire. `status` is `open`, `frozen`, `complete`, or `expired`."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        clock: Callable[[], float],
        id: str,
        config: SessionConfig,
        key: str | None = None,
        *,
        template: ChatTemplate | None = None,
        reasoning: Reasoning | None = None,
        thinks: bool | None = None,
    ) -> None:
        self.id, self.config, self.store, self.clock = id, config, store, clock
        self.key = key or f"sk-{secrets.token_urlsafe(24)}"
        limits = SessionLimits(config.calls, config.tokens)
        self.session = Session(
            engine,
            config.defaults,
            seed=config.seed or id,
            limits=limits,
            template=template,
            reasoning=reasoning,
            thinks=thinks,
        )
        self.status, self.reason, self.snapshot = "open", "", ""
        self.outcome = Outcome.OK
        self.opened_at = self._used_at = clock()
        self.closed_at: float | None = None
        self.silent_s = 0.0
        """How long the engine had given no token, to a call that was under way when the session was closed."""
        self.restored = False
        """Whether the gateway was started anew while it was open."""
        self._calls: OrderedDict[bytes, SessionCall] = OrderedDict()
        # Random once per process and session: asking the kernel for every call costs more than it is worth.
        self._mark, self._numbers = secrets.token_hex(8), count(1)
        self._running: set[SessionCall] = set()
        self.unsure: set[SessionCall] = set()
        """Calls of which the store may not have all that is known here."""
        self._dialects: dict[int, str] = {}
        self._bodies: dict[str, Bodies] = {}
        self._pinned: tuple[Sampling | None, tuple[str, ...], Sampling] = (None, (), config.defaults)
        self.voices: dict[str, Dialect] = {}
        """The dialects that it is spoken to in, by path."""
        self._saved, self._kept = 1, ""
        self._settling: asyncio.Task[None] | None = None
        self._slots = None if config.concurrency is None else asyncio.Semaphore(config.concurrency)
        self._waiting = 0

    def admits(self, key: str) -> bool:
        """Whether this is its key; takes as long for a wrong one, however much of it is right."""
        return hmac.compare_digest(key.encode("utf-8", "replace"), self.key.encode())

    # -- calls --------------------------------------------------------------------------------------------------

    def read(self, dialect: str, body: bytes) -> tuple[dict[str, Any], bytes]:
        """What a request says, and its digest."""
        if self.status != "open":
            raise self.refusal()
        bodies = self._bodies.get(dialect)
        if bodies is None:
            bodies = self._bodies[dialect] = Bodies(dialect)
        return bodies.read(body)

    def call(self, dialect: str, ask: TurnRequest, digest: bytes, *, retried: bool) -> SessionCall:
        """The call that a request stands for: an SDK's retry is the one that it retries."""
        found = self._calls.get(digest) if retried else None
        if found is not None and not found.idle:
            return found
        now = self.clock()
        if self.config.time_s is not None and now - self.opened_at >= self.config.time_s:
            raise Refusal.spent(f"its {self.config.time_s:g} s are over")
        if self._waiting >= _WAITING:
            raise Refusal(429, "quota", f"{self._waiting} calls of this session wait already")
        self._used_at = now
        if found is not None:
            return found
        call = self._new(dialect, ask, digest)
        self.unsure.add(call)
        self._remember(call)
        return call

    def _new(self, dialect: str, ask: TurnRequest, digest: bytes) -> SessionCall:
        sampling = self._sampling(ask)
        drafts: list[Draft] = []
        manner = ask.manner(self.session.template.grammar)
        for choice in range(ask.n):
            seed = None if ask.seed is None else f"{ask.seed}:{choice}"
            draft = self.session.draft(
                ask.messages, ask.tools, sampling=sampling, seed=seed, manner=manner, of=ask.n - choice
            )
            drafts.append(draft)
            draft.verdict = self.session.verdicts[draft.node] = drafts[0].verdict  # choices share their prompt
        return SessionCall(self, f"{self._mark}{next(self._numbers):x}", digest, dialect, drafts, ask.stream)

    def _sampling(self, ask: TurnRequest) -> Sampling:
        """How a call is sampled; mostly as the one before it."""
        asked, stop, pinned = self._pinned
        if ask.sampling is not asked or ask.stop != stop:
            pinned = self.config.pinned(ask.sampling, ask.stop)
            self._pinned = ask.sampling, ask.stop, pinned
        return pinned

    def _remember(self, call: SessionCall) -> None:
        self._calls[call.digest] = call
        self._dialects.update({draft.node: call.dialect for draft in call.drafts})
        while len(self._calls) > _REMEMBERED:
            self._calls.popitem(last=False)

    @asynccontextmanager
    async def slot(self, call: SessionCall) -> AsyncIterator[None]:
        """A place among the calls that are answered at once."""
        self._running.add(call)
        try:
            if self.status != "open":  # closed between the request and now
                raise self.refusal()
            if self._slots is None:
                yield
                return
            self._waiting += 1
            try:
                await self._slots.acquire()
            finally:
                self._waiting -= 1
            try:
                yield
            finally:
                self._slots.release()
        finally:
            self._running.discard(call)
            self._used_at = self.clock()

    @property
    def running(self) -> int:
        """How many calls are under way."""
        return len(self._running)

    # -- the store ----------------------------------------------------------------------------------------------

    async def keep(self, statements: Sequence[Statement] = ()) -> None:
        """Write this down, and with it all else that the store is not known to have. StorageError if it cannot be."""
        graph, since = self.session.graph, self._saved
        self._saved = len(graph.nodes)
        others = self.unsure - self._running  # those under way write themselves down
        rows = [
            node_statement(self.id, number, graph.nodes[number], graph.keys.get(number))
            for number in range(since, self._saved)
        ]
        try:
            await self.store.write([*rows, *(row for call in others for row in call.rows()), *statements])
        except BaseException:
            self._saved = min(self._saved, since)
            raise
        self.unsure -= others - self._running

    async def settled(self) -> None:
        """Done once the store has the session as it is: one task does that for all who wait, whoever leaves."""
        while self._kept != self.status:
            if self._settling is None or self._settling.done():
                self._settling = asyncio.create_task(self._settle())
                self._settling.add_done_callback(_heed)
            await asyncio.shield(self._settling)

    @property
    def untold(self) -> bool:
        """Whether it has ended, the store could not be told, and nobody tries to."""
        tried = self._settling is None or self._settling.done()
        return tried and self.status != "open" and self._kept != self.status

    async def _settle(self) -> None:
        status = self.status
        if self._running and status != "open":
            await self.rest()
            self.silent_s = self.session.silent_s()
        if status == "deleted":
            await self.store.write(forgotten(self.id))
        else:
            if status != "open":
                self.snapshot = self.snapshot or snapshot_of(self.describe())
            config = self.config.model_dump_json(exclude_unset=True)
            state = (self.opened_at, status, self.closed_at, str(self.outcome), self.reason, self.snapshot)
            await self.keep([(_SESSION, (self.id, self.key, config, *state))])
        self._kept = status
        if status != "open":
            self._let_go()

    def _let_go(self) -> None:
        """Keep no more than what can be asked for: it takes no more calls."""
        self._calls.clear()
        self._bodies.clear()
        self.voices.clear()
        self.unsure.clear()
        self.session.graph.let_go()

    # -- its life -----------------------------------------------------------------------------------------------

    def refusal(self) -> Refusal:
        """What a call is told that this session does not take, or that was ended with it."""
        return Refusal.closed(self.id, "closing" if self.status == "open" else self.status)

    def expires(self) -> bool:
        """Whether its time is up."""
        return self.status == "open" and not self._running and self.clock() - self._used_at >= self.config.ttl_s

    def ended_s(self) -> float:
        """Seconds since it ended, and the store knows that; 0 before."""
        return 0.0 if self.closed_at is None or self._kept != self.status else self.clock() - self.closed_at

    async def close(self, status: str = "complete", outcome: Outcome = Outcome.OK, reason: str = "") -> Episode:
        """End it: calls under way are given up, and what was recorded changes no more.

        Who closes it again waits for the same; if that failed, it is tried again.
        """
        if self.status in ("open", "frozen"):
            reason = reason.encode("utf-8", "replace").decode()  # what no store can write would never be closed
            self.status, self.outcome, self.reason, self.closed_at = status, outcome, reason, self.clock()
        await self.settled()
        return self.episode()

    async def freeze(self) -> None:
        """Take no more calls, and give what was recorded an id; how it went is told later, by closing it."""
        if self.status == "open":
            self.status, self.closed_at = "frozen", self.clock()
        await self.settled()

    async def delete(self) -> None:
        """End it, and have the store forget it."""
        self.status, self.outcome, self.reason, self.closed_at = "deleted", Outcome.ABORTED, "deleted", self.clock()
        await self.settled()

    async def leave(self) -> None:
        """Leave it to the next gateway, as this one ends: calls under way are given up."""
        await self.rest()
        with suppress(StorageError):  # whoever was to have it written down was told
            if self.status != "open":
                await self.settled()
            elif self.unsure:
                await self.keep()

    def checked(self, snapshot: str | None = None) -> dict[str, Any]:
        """The session for whoever opened it; refused if it is not what was frozen, or not that snapshot."""
        shown = self.describe()
        if snapshot is not None and snapshot != self.snapshot:
            told = f"is at snapshot {self.snapshot}" if self.snapshot else "is not frozen: it has no snapshot yet"
            raise Refusal(409, "closed", f"session {self.id!r} {told}", param="snapshot", retry=False)
        if self.snapshot and snapshot_of(shown) != self.snapshot:
            told = "what is stored is not what was frozen; its store is damaged, or was changed"
            raise Refusal(409, "internal", f"session {self.id!r}: {told}", retry=False)
        return shown

    async def rest(self) -> None:
        """Give up calls under way."""
        await asyncio.gather(*(call.end() for call in list(self._running)))

    def episode(self) -> Episode:
        """Everything that was recorded, yet to be judged."""
        return self.session.episode(self.config.task_of(self.id), self.outcome, reason=self.reason)

    def describe(self) -> dict[str, Any]:
        """The session for whoever opened it: the graph, rows for training, and a verdict per turn."""
        episode, verdicts = self.episode(), self.session.verdicts
        counts = {str(kind): sum(verdict.kind == kind for verdict in verdicts.values()) for kind in Exactness}
        running = len(self._running)
        return {
            "id": self.id,
            "run": self.config.run,
            "trial": self.config.trial,
            "status": self.status,
            "snapshot": self.snapshot or None,
            "running": running,
            "silent_s": self.silent_s,
            "restored": self.restored,
            "trainable": not counts[Exactness.BROKEN] and not running and episode.sampled > 0,
            "verdicts": counts,
            "turns": [self._told(number, verdict) for number, verdict in sorted(verdicts.items())],
            "rows": [
                {
                    "prompt_ids": row.prompt_ids,
                    "response_ids": row.response_ids,
                    "response_mask": row.response_mask,
                    "logprobs": row.logprobs,
                    "versions": row.versions,
                }
                for row in episode.rows()
            ],
            "episode": episode.as_json(),
        }

    def _told(self, number: int, verdict: Verdict) -> dict[str, Any]:
        node = self.session.graph.nodes[number]
        return {
            "node": number,
            "dialect": self._dialects.get(number, ""),
            "verdict": verdict.kind,
            "reason": verdict.reason,
            "token": verdict.token,
            "finish": node.finish,
            "sampled_tokens": node.sampled,
        }

    # -- recovery -----------------------------------------------------------------------------------------------

    def restore(self, row: tuple[Any, ...]) -> None:
        """Take up what the store has of it. A turn that had not come to its end is broken, unless it is retried."""
        self.opened_at, self.status, self.closed_at, outcome, self.reason, self.snapshot = row
        self.outcome, self.restored, self._kept = Outcome(outcome), self.status == "open", self.status
        query = (
            "SELECT node, call, choice, digest, dialect, sampling, seed, manner, ended_at, verdict, reason, token, "
            "failure, failed_at FROM calls WHERE session = ? ORDER BY begun_at, choice"
        )
        rows = self.store.rows(query, (self.id,))
        prompts, verdicts = {}, {}
        for node, *_, ended_at, kind, reason, token, failure, failed_at in rows:
            prompts[node] = verdicts[node] = Verdict(Exactness(kind), reason, token)
            if ended_at is None:
                verdicts[node] = Verdict(Exactness.BROKEN, _LOST, None)
            elif failure is not None:
                verdicts[node] = Verdict(Exactness.BROKEN, failure, failed_at)
        nodes, lost = nodes_of(self.store, self.id), set[int | None]()
        for number, (found, _) in enumerate(nodes, 1):
            if found is GAP or found.parent in lost:
                lost.add(number)
        verdicts |= {node: Verdict(Exactness.BROKEN, _LOST, None) for node in verdicts if node in lost}
        self.session.restore(nodes, verdicts)
        self._saved = len(self.session.graph.nodes)
        calls: dict[str, list[Any]] = {}
        for each in rows:
            self._dialects[each[0]] = each[4]
            if each[0] not in lost:
                calls.setdefault(each[1], []).append(each)
        for id, parts in list(calls.items())[-_RETRIED:]:
            drafts = []
            for node, _, _, _, _, sampling, seed, manner, *_ in parts:
                read, how = Sampling.model_validate_json(sampling), Manner.model_validate_json(manner)
                drafts.append(self.session.redraft(node, read, seed, prompts[node], how))
            call = SessionCall(self, id, parts[0][3], parts[0][4], drafts, True)
            if all(map(self.session.ended, drafts)):
                call.turns = [self.session.said(draft) for draft in drafts]
            self._remember(call)


def _heed(task: asyncio.Task[None]) -> None:
    """Those who wait are told how it went; that nobody does is no error of its own."""
    if not task.cancelled():
        task.exception()
