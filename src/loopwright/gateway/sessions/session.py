"""A session: one agent's conversation with an engine. It alone renders messages, splices sampled ids and records."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from loopwright.core.episode import Attempt, Episode, Node
from loopwright.core.errors import LoopwrightError
from loopwright.core.outcome import FAULT_OF, Fault, Outcome
from loopwright.core.task import Message, Task
from loopwright.engines.base import BadSampling, ContextFull, Engine, EngineError, Reasoning, Sampling
from loopwright.gateway.sessions.draft import Draft, check
from loopwright.gateway.sessions.exactness import Exactness, Verdict
from loopwright.gateway.sessions.graph import RAW, Graph, Key, copied, ids_of
from loopwright.gateway.sessions.manner import PLAIN, Manner
from loopwright.gateway.sessions.pieces import Delta, Heard
from loopwright.gateway.sessions.reader import THINK, TurnParser
from loopwright.gateway.sessions.template import ChatTemplate, Tool, template_of
from loopwright.gateway.sessions.turn import Turn as Turn


class BudgetSpent(LoopwrightError, RuntimeError):
    """The session may sample no more: its turns or tokens are used up, which is the policy's own doing.

    `held` if calls under way may yet give some of it back.
    """

    held = False


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What a session may use; None for no limit."""

    turns: int | None = None
    tokens: int | None = None
    """Sampled tokens, over all turns."""


class Session:
    """Turns messages into a turn of the policy, and keeps the message graph.

    Messages that were seen before are found again, so that only new ones are rendered and what was sampled is never
    tokenised a second time. A conversation that begins or goes on otherwise is a branch of its own.
    """

    def __init__(
        self,
        engine: Engine,
        sampling: Sampling,
        *,
        seed: str,
        limits: SessionLimits = SessionLimits(),  # noqa: B008  frozen
        template: ChatTemplate | None = None,
        reasoning: Reasoning | None = None,
        thinks: bool | None = None,
    ) -> None:
        self.engine, self.sampling, self.limits = engine, sampling, limits
        self._seed, config = seed, getattr(engine, "config", None)
        self.template = template or template_of(getattr(config, "template", "auto"), engine.tokenizer)
        self._forks = (reasoning or getattr(config, "reasoning", "preserve")) == "fork"
        self._thinks = getattr(config, "thinks", False) if thinks is None else thinks
        self.graph = Graph(self.template, forks=self._forks)
        self.verdicts: dict[int, Verdict] = {}
        """What each turn is worth, by its node."""
        self._drafts: dict[int, Draft] = {}
        self._turns = self._spent = self._reserved = 0
        self.phases_s: dict[str, float] = {}
        """Seconds per phase so far: `generate`, and what a loop adds with `phase`."""
        self.last_token_at: float | None = None
        """When the engine last gave a token, on the event loop's clock."""
        self.cut: tuple[str, float, float] | None = None
        """The phase that was last cut short: its name, when it began, and when it ended."""

    async def turn(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, sampling: Sampling | None = None
    ) -> Turn:
        """What the policy says after these messages. BudgetSpent if it may not, EngineError if the engine fails."""
        return await self.speak(self.draft(messages, tools, sampling=sampling))

    def draft(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        sampling: Sampling | None = None,
        seed: str | None = None,
        manner: Manner = PLAIN,
        of: int = 1,
    ) -> Draft:
        """The place of a turn after these messages, before anything is sampled.

        It is the first `of` so many that are wanted together: the budget has to do for all of them, or there is none.
        """
        if not messages:
            raise ValueError("a turn needs at least one message")
        self._check_turns(of)
        sampling = sampling or self.sampling
        sampling = self._within(sampling, sampling.max_tokens, of)
        parent, verdict = self.graph.place(messages, tools)
        if self.template.grammar.bare and not tools:  # without marks, only who has tools can mean a call
            manner = manner.model_copy(update={"calls": False})
        manner = self._begun(messages, manner)
        opening = self.graph.opening(parent, manner)
        prompt = self.graph.ids(parent) + ids_of(opening)
        node = len(self.graph.nodes)
        seed = seed or f"{self._seed}:{node}"
        draft = Draft(node, parent, prompt, len(prompt), opening, sampling, seed, verdict, manner)
        self.graph.add(draft.as_node(_SILENCE, "cut"))  # its place, whatever comes meanwhile
        self.verdicts[node] = verdict
        self._turns += 1
        self._reserve(draft)
        return draft

    def resume(self, drafts: Sequence[Draft]) -> None:
        """Reserve what turns that were given up may still use, a share for each. BudgetSpent if there is none."""
        again = [draft for draft in drafts if not draft.reserved and draft.left > 0 and not self.ended(draft)]
        for index, draft in enumerate(again):
            draft.sampling = self._within(draft.sampling, draft.left, len(again) - index, len(draft.ids))
            self._reserve(draft)

    def _reserve(self, draft: Draft) -> None:
        """What a turn may still use is nobody else's."""
        draft.reserved = draft.left
        self._reserved += draft.reserved

    def release(self, draft: Draft) -> None:
        """Give back what a turn had reserved and will not use."""
        self._reserved -= draft.reserved
        draft.reserved = 0

    async def speak(self, draft: Draft, heard: Heard | None = None) -> Turn:
        """Sample a turn to its end; one that was given up before goes on where it was. `heard` follows it."""
        node, before = draft.node, len(draft.ids)
        self.resume((draft,))
        self._drafts[node] = draft
        finish, reader = "cut", self._reader(draft)
        live = heard is not None or reader.stops
        show = _shown(heard)
        if before and live:  # a turn that goes on is told from its beginning
            show(reader, draft.ids, draft.logprobs, draft.tops)
        try:
            with self.phase("generate"):
                finish = await self._sample(draft, reader if live else None, show)
            self.verdicts[node] = draft.verdict
        except (ContextFull, BadSampling):  # the request is at fault, and nothing is unknown
            raise
        except EngineError as error:
            told = f"the engine failed: {error}".encode("utf-8", "replace").decode()  # what a store can write
            self.verdicts[node] = Verdict(Exactness.BROKEN, told, len(draft.prompt) + len(draft.ids))
            raise
        finally:
            # Whatever was sampled is kept, also when this call ends here: it is a branch that leads no further.
            self._spent += len(draft.ids) - before
            self.release(draft)
            del self._drafts[node]
            try:
                rest = reader.finish() if live else reader.whole(draft.ids)
            finally:
                self.graph.nodes[node] = draft.as_node(reader.message, finish)
            if heard is not None and finish != "cut":
                for piece in rest:
                    heard(piece)
        self.graph.know(node)
        draft.prompt = ids_of()
        return self._turn(draft, reader, finish)

    def count(self, messages: Sequence[Message], tools: Sequence[Tool] = (), manner: Manner = PLAIN) -> int:
        """How many tokens the prompt of a turn after these messages would have."""
        apart = Graph(self.template, forks=self._forks)
        parent, _ = apart.place(messages, tools)
        return len(apart.ids(parent)) + len(apart.opening(parent, self._begun(messages, manner)))

    def _begun(self, messages: Sequence[Message], manner: Manner) -> Manner:
        """The manner of a turn that begins with reasoning, unless it is to begin with something else."""
        if not self._thinks or manner.given or messages[0].get("role") == RAW:
            return manner
        return manner.model_copy(update={"given": f"{THINK}\n"})

    def ended(self, draft: Draft) -> bool:
        """Whether a turn has come to its end."""
        return self.graph.nodes[draft.node].finish in ("stop", "length")

    def retold(self, draft: Draft) -> list[Delta]:
        """The pieces of a turn that has come to its end."""
        reader = self._reader(draft)
        return [*reader.feed(draft.ids, draft.logprobs, draft.tops), *reader.finish()]

    def said(self, draft: Draft) -> Turn:
        """A turn that has come to its end, once more."""
        reader = self._reader(draft)
        reader.whole(draft.ids)
        return self._turn(draft, reader, self.graph.nodes[draft.node].finish or "cut")

    def _turn(self, draft: Draft, reader: TurnParser, finish: str) -> Turn:
        return Turn(
            copied(reader.message),
            finish,
            draft.node,
            draft.prompt_tokens,
            len(draft.ids),
            reader.malformed,
            tuple(draft.ids),
            tuple(draft.logprobs),
            reader.stopped_by,
            None if draft.tops is None else tuple(draft.tops),
            reader.unshown,
        )

    def _reader(self, draft: Draft) -> TurnParser:
        raw = self.graph.nodes[draft.parent].message.get("role") == RAW
        stop, manner = draft.sampling.stop, draft.manner
        return self.template.reader(call_id=f"call_{draft.node}", stop=stop, raw=raw, manner=manner)

    def restore(self, nodes: Sequence[tuple[Node, Key | None]], verdicts: Mapping[int, Verdict]) -> None:
        """Go on from what was recorded: nodes with the keys of those that can be found again."""
        for node, key in nodes:
            self.graph.add(node, key)
            self._turns += node.finish is not None
            self._spent += node.sampled
        self.verdicts.update(verdicts)

    def redraft(self, node: int, sampling: Sampling, seed: str, verdict: Verdict, manner: Manner = PLAIN) -> Draft:
        """The draft of a turn that was restored, to be told again or to go on."""
        found = self.graph.nodes[node]
        begun = len(found.ids) - found.sampled
        opening, parent = found.ids[:begun], found.parent or 0
        prompt = self.graph.ids(parent) + ids_of(opening)
        draft = Draft(node, parent, prompt, len(prompt), opening, sampling, seed, verdict, manner)
        draft.ids, draft.logprobs = list(found.ids[begun:]), list(found.logprobs[begun:])
        draft.spans = list(found.spans)
        if self.ended(draft):
            draft.prompt = ids_of()
        return draft

    def phase(self, name: str) -> "_Phase":
        """Count the seconds within as those of a phase, such as `tools`: what the policy had done on its behalf."""
        return _Phase(self, name)

    def silent_s(self) -> float:
        """For how long the engine had given no token when a turn was last cut short."""
        name, begun, ended = self.cut or ("", 0.0, 0.0)
        return ended - max(self.last_token_at or begun, begun) if name == "generate" else 0.0

    def episode(
        self, task: Task, outcome: Outcome = Outcome.OK, *, fault: Fault | None = None, reason: str = ""
    ) -> Episode:
        """Everything that was recorded, as an episode that is yet to be judged."""
        nodes = list(self.graph.nodes)
        for node, draft in self._drafts.items():  # turns that nobody waited for: what they have said by now
            reader = self._reader(draft)
            reader.whole(draft.ids)
            nodes[node] = draft.as_node(reader.message, "cut")
        reason = reason.encode("utf-8", "replace").decode()
        attempt = Attempt(0.0, dict(self.phases_s), outcome, reason)
        return Episode(task, tuple(nodes), outcome, fault or FAULT_OF.get(outcome), reason, attempts=(attempt,))

    # -- the engine ---------------------------------------------------------------------------------------------

    def _check_turns(self, wanted: int) -> None:
        limit = self.limits.turns
        if limit is not None and self._turns >= limit:
            raise BudgetSpent(f"all {limit} turns are used up")
        if limit is not None and self._turns + wanted > limit:
            raise BudgetSpent(f"{self._turns} of {limit} turns are used up, and {wanted} more are asked for")

    def _within(self, sampling: Sampling, wanted: int, of: int, said: int = 0) -> Sampling:
        """The sampling that the budget allows a turn which wants so many more tokens, the first `of` several."""
        limit = self.limits.tokens
        if limit is None:
            return sampling
        share = (limit - self._spent - self._reserved) // of
        if share > 0:
            return sampling if wanted <= share else sampling.model_copy(update={"max_tokens": said + share})
        if self._spent >= limit:
            raise BudgetSpent(f"all {limit} tokens are used up")
        held = f"and {self._reserved} are reserved for calls under way"
        spent = BudgetSpent(f"{self._spent} of {limit} tokens are used up, {held}: too few are left")
        spent.held = True
        raise spent

    async def _sample(self, draft: Draft, reader: TurnParser | None, show: "_Show") -> str:
        """Sample until the turn ends, and say why it did; a pause in between only begins a new span."""
        clock, sampling = asyncio.get_running_loop().time, draft.sampling
        while (left := draft.left) > 0:
            finish = None
            rest = sampling.model_copy(update={"max_tokens": left}) if draft.ids else sampling
            # A copy only where it must be: a prompt is long, and most turns are never paused.
            ids = draft.prompt + ids_of(draft.ids) if draft.ids else draft.prompt
            async with aclosing(self.engine.generate(ids, rest, seed=draft.seed)) as stream:
                async for chunk in stream:
                    check(chunk)
                    kept = len(chunk.ids) if reader is None else show(reader, chunk.ids, chunk.logprobs, chunk.tops)
                    draft.add(chunk, kept)
                    if chunk.ids:
                        self.last_token_at = clock()
                    finish = chunk.finish
                    if reader is not None and reader.ended:
                        return "stop"
            if finish is None:
                raise EngineError("the engine ended a turn without saying why")
            if finish != "abort":
                return finish
        return "length"


class _Phase:
    """One phase of a session, by the clock of its event loop."""

    def __init__(self, session: Session, name: str) -> None:
        self._session, self._name = session, name

    def __enter__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._begun = self._clock()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        session, name, ended = self._session, self._name, self._clock()
        if isinstance(error, asyncio.CancelledError):
            session.cut = name, self._begun, ended
        session.phases_s[name] = session.phases_s.get(name, 0.0) + ended - self._begun


_SILENCE: Message = {"role": "assistant", "content": ""}
_Show = Callable[[TurnParser, Sequence[int], Sequence[float], Sequence[Any] | None], int]


def _shown(heard: Heard | None) -> _Show:
    """Reads tokens, lets them be heard, and tells how many there are up to the end of a stop string."""

    def show(
        reader: TurnParser, ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[Any] | None = None
    ) -> int:
        # Where a text may end the turn it must be known which token did: nobody is shown what came after it.
        step = 1 if reader.stops else len(ids) or 1
        for start in range(0, len(ids), step):
            end = start + step
            for piece in reader.feed(ids[start:end], logprobs[start:end], None if tops is None else tops[start:end]):
                if heard is not None:
                    heard(piece)
            if reader.ended:
                return start + step
        return len(ids)

    return show
