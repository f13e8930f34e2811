"""A served session: a session with a key, a configuration, running calls, and a place in the store."""

import asyncio
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from loopwright.core.episode import Episode
from loopwright.core.errors import StorageError
from loopwright.core.outcome import Outcome
from loopwright.engines.base import Engine, Reasoning, Sampling
from loopwright.gateway.dialects.base import Dialect, TurnRequest
from loopwright.gateway.refusal import Refusal
from loopwright.gateway.sessions.call import CallRecord, SessionCall
from loopwright.gateway.sessions.description import SessionDescription
from loopwright.gateway.sessions.exactness import Exactness, Verdict
from loopwright.gateway.sessions.history import SessionHistory
from loopwright.gateway.sessions.session import Session, SessionLimits
from loopwright.gateway.sessions.session_config import SessionConfig
from loopwright.gateway.sessions.store import (
    GAP,
    NODE,
    SESSION,
    DiskStore,
    Statement,
    delete_statements,
    load_nodes,
    node_row,
    truncate_statements,
)
from loopwright.gateway.sessions.template import ChatTemplate
from loopwright.gateway.sessions.turn import Draft
from loopwright.gateway.sessions.turn_options import TurnOptions

_MAX_CALLS = 64
"""Calls of a session that a retry can find."""
_MAX_RESTORED_CALLS = 8
"""The same after a restart of the gateway."""
_MAX_WAITING = 256
"""Calls that may wait for a slot."""
_LOST = Verdict(Exactness.BROKEN, "the gateway stopped before this turn ended: what was sampled is unknown")


class ServedSession:
    """One agent's session at the gateway. `status` is `open`, `frozen`, `complete`, `expired` or `deleted`."""

    def __init__(
        self,
        engine: Engine,
        store: DiskStore | None,
        clock: Callable[[], float],
        id: str,
        config: SessionConfig,
        key: str | None = None,
        *,
        template: ChatTemplate | None = None,
        reasoning: Reasoning | None = None,
        thinks: bool | None = None,
        max_recorded: int | None = None,
    ) -> None:
        self.id, self.config, self.store, self.clock = id, config, store, clock
        self.number = 0 if store is None else next(store.session_numbers)
        """What the store knows it by."""
        self.key = key or f"sk-{secrets.token_urlsafe(24)}"
        sampling = config.defaults
        self.session = Session(
            engine,
            sampling,
            seed=config.seed or id,
            limits=SessionLimits(config.calls, config.tokens, max_recorded),
            template=template,
            reasoning=reasoning,
            thinks=thinks,
        )
        self.status, self.reason, self.snapshot = "open", "", ""
        self.outcome = Outcome.OK
        self.opened_at = self._used_at = clock()
        self.closed_at: float | None = None
        self.silent_s = 0.0
        """How long the engine had returned no token to a call that was running when the session was closed."""
        self.restored = False
        """Whether the gateway was restarted while it was open."""
        self._calls: OrderedDict[bytes, SessionCall] = OrderedDict()
        # Random once per process and session: asking the kernel for every call costs too much.
        self._call_prefix, self._call_numbers = secrets.token_hex(8), count(1)
        self._running: set[SessionCall] = set()
        self.unsaved: set[SessionCall] = set()
        """Calls that may not be stored completely yet."""
        self.history = SessionHistory(self)
        self._pinned: tuple[Sampling | None, tuple[str, ...], Sampling, Mapping[str, str]]
        self._pinned = None, (), sampling, {}
        self.latest_intent: tuple[Sampling | None, TurnOptions | None, str, str] = None, None, "", ""
        """The sampling and the options of the latest turn, and both as JSON: usually those of the next one, too."""
        self.dialects: dict[str, Dialect] = {}
        """The dialects that its agent uses, by path."""
        self._saved_nodes, self._saved_status = 1, "" if store else self.status
        self._settling: asyncio.Task[None] | None = None
        self._slots = None if config.concurrency is None else asyncio.Semaphore(config.concurrency)
        self._waiting = 0
        self.large_body_lock = asyncio.Lock()  # a session has one large body in memory at a time

    def admits(self, key: str) -> bool:
        """Whether this is its key, compared in constant time; its holder may call models."""
        return hmac.compare_digest(key.encode("utf-8", "replace"), self.key.encode())

    def is_owned_by(self, key: str) -> bool:
        """Whether this key may read, end and delete it."""
        owner_key = self.config.owner_key or self.key
        return hmac.compare_digest(key.encode("utf-8", "replace"), owner_key.encode("utf-8", "replace"))

    def belongs_to(self, config: SessionConfig) -> bool:
        """Whether the same run opens it again, for the same trial."""
        same = (self.config.run, self.config.trial) == (config.run, config.trial)
        ours, theirs = (
            each.encode("utf-8", "replace") for each in (self.config.owner_key or "", config.owner_key or "")
        )
        return same and hmac.compare_digest(ours, theirs)

    # -- calls --------------------------------------------------------------------------------------------------

    def call(self, dialect: str, request: TurnRequest, digest: bytes, *, is_retry: bool) -> SessionCall:
        """The call for a request; an SDK's retry, and a repetition of what a restart lost, get the original call."""
        call = self._calls.get(digest)
        if call is not None and not is_retry:
            is_lost = call.idle and any(self.session.verdicts.get(draft.node) == _LOST for draft in call.drafts)
            call = call if is_lost else None
        if call is not None and not call.idle:
            return call
        now = self.clock()
        if self.config.time_s is not None and now - self.opened_at >= self.config.time_s:
            raise Refusal.out_of_quota(f"its {self.config.time_s:g} s are over")
        if self._waiting >= _MAX_WAITING:
            raise Refusal(429, "quota", f"{self._waiting} calls of this session are waiting already")
        self._used_at = now
        if call is not None:
            return call
        requested, stop, sampling, overridden = self._pinned  # usually the same as in the previous call
        if request.sampling is not requested or request.stop != stop:
            sampling = self.config.pin(request.sampling, request.stop)
            overridden = dict.fromkeys(self.config.overridden(request.sampling), "pinned by the session")
            self._pinned = request.sampling, request.stop, sampling, overridden
        drafts = self._drafts(request, sampling)
        call_id = f"{self._call_prefix}{next(self._call_numbers):x}"
        ignored = {**request.ignored, **overridden}
        names = request.branch, request.conversation
        record = CallRecord(dialect, ignored, *names, request.has_instructions, request.recorded)
        call = SessionCall(self, call_id, digest, record, drafts, request.stream)
        if self.store is not None:
            self.unsaved.add(call)
        self._calls[digest] = call
        self.history.add(call)
        while len(self._calls) > _MAX_CALLS:
            self._calls.popitem(last=False)
        return call

    def _drafts(self, request: TurnRequest, sampling: Sampling) -> list[Draft]:
        """A draft for each choice of each conversation."""
        drafts: list[Draft] = []
        conversations = request.conversations
        total = request.n * len(conversations)
        try:
            for choice in range(total):
                conversation, index = divmod(choice, request.n)
                draft = self.session.draft(
                    conversations[conversation],
                    request.tools,
                    sampling=sampling,
                    seed=None if request.seed is None else f"{request.seed}:{choice}",
                    options=request.options,
                    choices=total - choice,
                    frozen=True,
                )
                drafts.append(draft)
                first = drafts[choice - index]  # choices share their prompt
                draft.verdict = self.session.verdicts[draft.node] = first.verdict
        except BaseException:
            if drafts:
                self.session.discard(drafts)
            raise
        return drafts

    async def discard(self, call: SessionCall) -> None:
        """Remove a call that the engine refused, from memory and store, if nothing was added after it."""
        if not self.session.discard(call.drafts):
            return
        self._calls = OrderedDict((digest, each) for digest, each in self._calls.items() if each is not call)
        self.history.remove(call)
        for dialect in self.dialects.values():
            if dialect.name == call.record.dialect:
                dialect.bodies.forget()
        self._saved_nodes = min(self._saved_nodes, first := call.drafts[0].first_node or 1)
        if self.store is not None:
            await self.store.write(truncate_statements(self.number, first))

    async def enter(self, call: SessionCall) -> None:
        """Wait for a place among the calls that run at the same time; the call has to `leave` it."""
        if self.status != "open":  # closed between the request and now
            raise self.refusal()
        self._running.add(call)
        if self._slots is None:
            return
        self._waiting += 1
        try:
            await self._slots.acquire()
        except BaseException:
            self._running.discard(call)
            raise
        finally:
            self._waiting -= 1

    def leave(self, call: SessionCall) -> None:
        """Free the place of a call."""
        if self._slots is not None:
            self._slots.release()
        self._running.discard(call)
        self._used_at = self.clock()

    @property
    def running(self) -> int:
        """How many calls are running."""
        return len(self._running)

    def is_running(self, node: int) -> bool:
        """Whether a turn is being sampled."""
        return any(draft.node == node for call in self._running for draft in call.drafts)

    # -- the store ----------------------------------------------------------------------------------------------

    async def save(self, statements: Sequence[Statement] = ()) -> None:
        """Store these statements and everything else that the store may lack. StorageError if that fails."""
        if self.store is None:
            return
        graph, since = self.session.graph, self._saved_nodes
        self._saved_nodes = len(graph.nodes)
        # Running calls save themselves; usually there are no others.
        others = set() if self.unsaved <= self._running else self.unsaved - self._running
        numbers = range(since, self._saved_nodes)  # without those of turns, which their calls write
        rows: list[Statement] = [(NODE, self.node_row(each)) for each in numbers if each not in self.history.records]
        try:
            rows += [row for call in others for row in call.statements()]
            await self.store.write([*rows, *statements])
        except BaseException:
            self._saved_nodes = min(self._saved_nodes, since)
            raise
        if others:
            self.unsaved -= others - self._running

    def node_row(self, number: int) -> tuple[Any, ...]:
        """A node as the store has it."""
        graph = self.session.graph
        return node_row(self.number, number, graph.nodes[number], graph.keys.get(number))

    async def settle(self) -> None:
        """Return once the store has the session's current status. One task writes it for all who wait."""
        while self._saved_status != self.status:
            if self._settling is None or self._settling.done():
                self._settling = asyncio.create_task(self._write_status())
                # So that asyncio does not log a failure as never retrieved: it is raised to those who wait.
                self._settling.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.shield(self._settling)

    async def _write_status(self) -> None:
        status = self.status
        if self._running and status != "open":
            await self.stop_calls()
            self.silent_s = self.session.silent_s()
        if status == "deleted":
            if self.store is not None:
                await self.store.write(delete_statements(self.number))
        else:
            if status != "open":
                self.snapshot = self.snapshot or await self.description().snapshot()
            if self.store is not None:
                config = self.config.model_dump_json(exclude_unset=True)
                state = (self.opened_at, status, self.closed_at, str(self.outcome), self.reason, self.snapshot)
                await self.save([(SESSION, (self.number, self.id, self.key, config, *state))])
        self._saved_status = status
        if status != "open":  # it takes no more calls: free what only they need
            self._calls.clear()
            self.dialects.clear()
            self.unsaved.clear()
            self.session.graph.release()

    # -- lifecycle ----------------------------------------------------------------------------------------------

    def refusal(self) -> Refusal:
        """The refusal of a call that this session does not accept, or that was stopped with it."""
        return Refusal.closed(self.id, "closing" if self.status == "open" else self.status)

    async def tidy(self) -> None:
        """Close it if it was idle for longer than its `ttl_s`; if it has ended, the store has to know that."""
        if self.status == "open":
            if not self._running and self.clock() - self._used_at >= self.config.ttl_s:
                await self.close("expired", Outcome.EXPIRED, f"no call for {self.config.ttl_s:g} s")
        elif self._settling is None or self._settling.done():
            await self.settle()

    def seconds_since_end(self) -> float:
        """Seconds since it ended, if the store knows that; 0 before."""
        return 0.0 if self.closed_at is None or self._saved_status != self.status else self.clock() - self.closed_at

    async def close(self, status: str = "complete", outcome: Outcome = Outcome.OK, reason: str = "") -> Episode:
        """End it: running calls are stopped, and the record is final.

        Closing it again waits for the same write, or tries it again if it failed.
        """
        if self.status in ("open", "frozen"):
            reason = reason.encode("utf-8", "replace").decode()  # or the store could never write it
            self.status, self.outcome, self.reason, self.closed_at = status, outcome, reason, self.clock()
        await self.settle()
        return self.episode()

    async def freeze(self) -> None:
        """Accept no more calls, and give the record a snapshot id; the outcome follows when it is closed."""
        if self.status == "open":
            self.status, self.closed_at = "frozen", self.clock()
        await self.settle()

    async def delete(self) -> None:
        """End it, and delete it from the store."""
        self.status, self.outcome, self.reason, self.closed_at = "deleted", Outcome.ABORTED, "deleted", self.clock()
        await self.settle()

    async def detach(self) -> None:
        """Leave it to the next gateway, as this one ends: running calls are stopped."""
        await self.stop_calls()
        with suppress(StorageError):  # already raised to the callers that waited for the write
            if self.status != "open":
                await self.settle()
            elif self.unsaved:
                await self.save()

    async def stop_calls(self) -> None:
        """Stop all running calls."""
        await asyncio.gather(*(call.stop() for call in list(self._running)))

    # -- what was recorded --------------------------------------------------------------------------------------

    def episode(self) -> Episode:
        """Everything that was recorded, without a reward."""
        return self.session.episode(self.config.task_of(self.id), self.outcome, reason=self.reason)

    def summary(self) -> dict[str, Any]:
        """The session in a list: no content, and no key."""
        return {
            "id": self.id,
            "run": self.config.run,
            "trial": self.config.trial,
            "status": self.status,
            "running": len(self._running),
            "turns": len(self.session.verdicts),
            "sampled_tokens": sum(node.sampled for node in self.session.graph.nodes),
            "opened_at": self.opened_at,
            "closed_at": self.closed_at,
        }

    def describe(self) -> dict[str, Any]:
        """The session for its owner: the graph, rows for training, and a verdict per turn."""
        return self.description().as_dict()

    def description(self) -> SessionDescription:
        """The same as it is now, to be written later."""
        now = asyncio.get_running_loop().time()
        status = {
            "id": self.id,
            "run": self.config.run,
            "trial": self.config.trial,
            "status": self.status,
            "snapshot": self.snapshot or None,
            "running": len(self._running),
            "silent_s": self.silent_s or self.session.silent_s(now),
            "engine_s": self.session.engine_wait.total_s(now),
            "restored": self.restored,
        }
        return SessionDescription(status, self.episode(), dict(self.session.verdicts), dict(self.history.records))

    async def verify(self, snapshot: str | None = None) -> SessionDescription:
        """Describe it; refused if it is not what was frozen, or does not have the requested snapshot."""
        description = self.description()
        if snapshot is not None and snapshot != self.snapshot:
            state = f"is at snapshot {self.snapshot}" if self.snapshot else "is not frozen: it has no snapshot yet"
            raise Refusal(409, "closed", f"session {self.id!r} {state}", param="snapshot", retry=False)
        if self.snapshot and await description.snapshot() != self.snapshot:
            reason = "the stored record differs from what was frozen; the store is damaged, or was changed"
            raise Refusal(409, "internal", f"session {self.id!r}: {reason}", retry=False)
        return description

    # -- recovery -----------------------------------------------------------------------------------------------

    def restore(self, row: tuple[Any, ...], store: DiskStore) -> None:
        """Restore it from the store. An unfinished turn is broken, unless it is retried."""
        self.number, self.opened_at, self.status, self.closed_at, outcome, self.reason, self.snapshot = row
        self.outcome, self.restored, self._saved_status = Outcome(outcome), self.status == "open", self.status
        query = (
            "SELECT number, call, choice, digest, dialect, sampling, seed, options, ended_at, verdict, reason, token, "
            "failure, failed_at FROM nodes WHERE session = ? AND call IS NOT NULL ORDER BY begun_at, choice"
        )
        rows = store.rows(query, (self.number,))
        prompts, verdicts = {}, {}
        for node, *_, ended_at, kind, reason, token, failure, failed_at in rows:
            prompts[node] = verdicts[node] = Verdict(Exactness(kind), reason, token)
            if ended_at is None:
                verdicts[node] = _LOST
            elif failure is not None:
                verdicts[node] = Verdict(Exactness.BROKEN, failure, failed_at)
        nodes, lost_nodes = load_nodes(store.rows, self.number), set[int | None]()
        for number, (stored, _) in enumerate(nodes, 1):
            if stored is GAP or stored.parent in lost_nodes:
                lost_nodes.add(number)
        verdicts |= {node: _LOST for node in verdicts if node in lost_nodes}
        self.session.restore(nodes, verdicts)
        self._saved_nodes = len(self.session.graph.nodes)
        calls: dict[str, list[Any]] = {}
        self.history.restore([(each[0], each[1], CallRecord.from_json(each[4], each[7])) for each in rows], store)
        for each in rows:
            if each[0] not in lost_nodes:
                calls.setdefault(each[1], []).append(each)
        for id, choices in list(calls.items())[-_MAX_RESTORED_CALLS:]:
            drafts = []
            for node, _, _, _, _, sampling_json, seed, options_json, *_ in choices:
                sampling, options = Sampling.model_validate_json(sampling_json), TurnOptions.from_json(options_json)
                drafts.append(self.session.restore_draft(node, sampling, seed, prompts[node], options))
            call = SessionCall(self, id, choices[0][3], self.history.records[choices[0][0]], drafts, True)
            if all(map(self.session.is_done, drafts)):
                call.turns = []
            self._calls[call.digest] = call
