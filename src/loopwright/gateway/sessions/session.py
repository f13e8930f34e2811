"""A session: one agent's conversation with an engine. Only it renders messages, splices sampled ids and records."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace

from loopwright.core.episode import Attempt, Episode, Node
from loopwright.core.errors import LoopwrightError
from loopwright.core.outcome import FAULT_OF, Fault, Outcome
from loopwright.core.task import Message, Task
from loopwright.engines.base import BadSampling, Chunk, ContextFull, Engine, EngineError, Reasoning, Sampling
from loopwright.gateway.dialects.fields import BadRequest
from loopwright.gateway.sessions.exactness import Exactness, Verdict
from loopwright.gateway.sessions.graph import RAW, Graph, Key, copy_message
from loopwright.gateway.sessions.model_template import template_of
from loopwright.gateway.sessions.template import ChatTemplate
from loopwright.gateway.sessions.tool_calls import Tool
from loopwright.gateway.sessions.turn import Delta, Draft, EngineWait, Turn, check_chunk
from loopwright.gateway.sessions.turn_options import PLAIN, TurnOptions
from loopwright.gateway.sessions.turn_parser import THINK, TurnParser

OnDelta = Callable[[Delta], None]
"""Called with each delta of a turn while it is sampled."""
_EMPTY: Message = {"role": "assistant", "content": ""}
_WITHOUT_CALLS = PLAIN, replace(PLAIN, parse_tool_calls=False)


class BudgetSpent(LoopwrightError, RuntimeError):
    """The session may not sample more: its turns or tokens are used up, which is the policy's fault.

    `is_temporary` if running calls may still return some of what they have reserved.
    """

    is_temporary = False


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What a session may use; None for no limit."""

    turns: int | None = None
    tokens: int | None = None
    """Sampled tokens, over all turns."""
    recorded: int | None = None
    """Tokens in the graph, given and sampled, which bound its memory."""


@dataclass(frozen=True, slots=True)
class PromptRenderer:
    """How prompts are rendered: all that is needed to know the prompt of a turn, without an engine."""

    template: ChatTemplate
    forks: bool = False
    """Whether reasoning from before the last user message is removed."""
    thinks: bool = False
    """Whether turns start with `<think>`."""

    def ids(self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: TurnOptions = PLAIN) -> list[int]:
        """The prompt that a turn after these messages would have in a session of its own."""
        graph = Graph(self.template, forks=self.forks)
        place = graph.place(messages, tools, self.with_thinking(messages, options))
        return list(graph.ids(place.node, place.opening))

    def with_thinking(self, messages: Sequence[Message], options: TurnOptions) -> TurnOptions:
        """With a prefill that starts reasoning, if the model needs it and the turn has no other prefill."""
        if not self.thinks or options.prefill or messages[0].get("role") == RAW:
            return options
        return replace(options, prefill=f"{THINK}\n")


class Session:
    """Turns messages into a turn of the policy, and records the message graph.

    Messages that it has seen before are found again. Only new ones are rendered, and sampled ids are never tokenised a
    second time. A conversation that differs from what was recorded is a separate branch.
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
        forks = (reasoning or getattr(config, "reasoning", "preserve")) == "fork"
        thinks = getattr(config, "thinks", False) if thinks is None else thinks
        self.prompts = PromptRenderer(self.template, forks, bool(thinks))
        self.graph = Graph(self.template, forks=forks)
        self.verdicts: dict[int, Verdict] = {}
        """The exactness of each turn, by its node."""
        self._without_calls = _WITHOUT_CALLS
        self._reshapes = sampling, sampling.reshapes
        self._running: dict[int, Draft] = {}
        self._turns = self._sampled = self._reserved = 0
        self.phases_s: dict[str, float] = {}
        """Seconds per phase so far: `generate`, and what a loop adds with `phase`."""
        self.engine_wait = EngineWait()
        self.interrupted: tuple[str, float, float] | None = None
        """The phase that was last cancelled: its name, start and end."""

    async def turn(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, sampling: Sampling | None = None
    ) -> Turn:
        """The policy's turn after these messages. BudgetSpent if the limits are reached, EngineError on failure."""
        return await self.sample(self.draft(messages, tools, sampling=sampling))

    def draft(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        sampling: Sampling | None = None,
        seed: str | None = None,
        options: TurnOptions = PLAIN,
        choices: int = 1,
        frozen: bool = False,
    ) -> Draft:
        """Reserve a turn's place after these messages, before anything is sampled; `frozen` ones never change.

        With `choices`, it is the first of several that share what is left of the budget. BudgetSpent if that is not
        enough for all of them.
        """
        if not messages:
            raise ValueError("a turn needs at least one message")
        limit = self.limits.turns
        if limit is not None and self._turns + choices > limit:
            if self._turns >= limit:
                raise BudgetSpent(f"all {limit} turns are used up")
            raise BudgetSpent(f"{self._turns} of {limit} turns are used up; {choices} more were requested")
        sampling = sampling or self.sampling
        if self._reshapes[0] is not sampling:  # usually that of the previous turn
            self._reshapes = sampling, sampling.reshapes
        if reshapes := self._reshapes[1]:
            self.engine.check_sampling(sampling)
        if self.limits.tokens is not None:
            sampling = self._fit_budget(sampling, sampling.max_tokens, choices)
        if options.chat_template_kwargs and not self.template.takes_kwargs:
            name = "chat_template_kwargs"
            raise BadRequest(f"{name}: this model's prompts are not rendered with a Jinja template; leave it out", name)
        if not tools and options.parse_tool_calls:  # there is nothing to call
            if self._without_calls[0] is not options:  # usually the same as in the previous turn
                self._without_calls = options, replace(options, parse_tool_calls=False)
            options = self._without_calls[1]
        count = len(self.graph.nodes)
        try:
            if self.prompts.thinks:
                options = self.prompts.with_thinking(messages, options)
            place = self.graph.place(messages, tools, options, frozen=frozen)
            prompt = self.graph.ids(place.node, place.opening)
            sampling = self._fit_context(sampling, len(prompt), len(place.opening))
        except BaseException:
            self.graph.truncate(count)
            raise
        node, verdict = len(self.graph.nodes), place.verdict
        seed = seed or f"{self._seed}:{node}"
        draft = Draft(node, place.node, prompt, len(prompt), place.opening, sampling, seed, verdict, place.options)
        draft.first_node, draft.reshapes = count, reshapes
        self.graph.add(draft.as_node(_EMPTY, "cut"))  # reserves its number while other calls run
        self.verdicts[node] = verdict
        self._turns += 1
        draft.reserved = draft.remaining
        self._reserved += draft.reserved
        return draft

    def _fit_context(self, sampling: Sampling, prompt: int, opening: int) -> Sampling:
        """The sampling that fits after a prompt of so many tokens. ContextFull or BudgetSpent if it is too long."""
        recorded = self.graph.tokens + opening
        if self.limits.recorded is not None and recorded > self.limits.recorded:
            raise BudgetSpent(
                f"{recorded} tokens would be recorded, and {self.limits.recorded} may be (session_tokens)"
            )
        limit = self.engine.max_context
        if limit is None or prompt + sampling.max_tokens <= limit:
            return sampling
        if prompt >= limit:
            raise ContextFull(limit, prompt)
        return sampling.model_copy(update={"max_tokens": limit - prompt})

    def discard(self, drafts: Sequence[Draft]) -> bool:
        """Remove the drafts of a refused request and their messages; False if the graph has more by now."""
        first = drafts[0].first_node
        if first is None or drafts[-1].node != len(self.graph.nodes) - 1 or any(draft.sampled for draft in drafts):
            return False
        self.graph.truncate(first)
        for draft in drafts:
            self.release(draft)
            del self.verdicts[draft.node]
        self._turns -= len(drafts)
        return True

    def resume(self, drafts: Sequence[Draft]) -> None:
        """Reserve tokens for interrupted drafts, a share for each. BudgetSpent if there are too few."""
        open_drafts = [each for each in drafts if not each.reserved and each.remaining > 0 and not self.is_done(each)]
        for index, draft in enumerate(open_drafts):
            if self.limits.tokens is not None:
                choices = len(open_drafts) - index
                draft.sampling = self._fit_budget(draft.sampling, draft.remaining, choices, len(draft.ids))
            draft.reserved = draft.remaining
            self._reserved += draft.reserved

    def release(self, draft: Draft) -> None:
        """Return the tokens that a draft has reserved and will not use."""
        self._reserved -= draft.reserved
        draft.reserved = 0

    async def sample(self, draft: Draft, on_delta: OnDelta | None = None) -> Turn:
        """Sample a turn to its end; an interrupted draft continues where it was."""
        node, before = draft.node, len(draft.ids)
        self.resume((draft,))
        self._running[node] = draft
        finish, parser = "cut", self._parser(draft)
        is_live = on_delta is not None or parser.may_stop
        if before and is_live:  # a continued turn is streamed from its start
            _feed(parser, on_delta, draft.ids, draft.logprobs, draft.tops)
        clock = asyncio.get_running_loop().time
        self.engine_wait.count("generate", 1, start := clock())
        try:
            finish = await self._generate(draft, parser if is_live else None, on_delta, clock)
            self.verdicts[node] = draft.verdict
        except asyncio.CancelledError:
            self.interrupted = "generate", start, clock()
            raise
        except (ContextFull, BadSampling) as error:  # the request's fault; everything that was sampled is known
            if isinstance(error, ContextFull) and not draft.ids:
                self.engine.max_context = error.limit  # so that the next prompt of this length is not even rendered
            raise
        except EngineError as error:
            reason = f"the engine failed: {error}".encode("utf-8", "replace").decode()  # so that a store can write it
            self.verdicts[node] = Verdict(Exactness.BROKEN, reason, len(draft.prompt) + len(draft.ids))
            raise
        finally:
            self._end_phase("generate", start, clock())
            # What was sampled is recorded, even if this call ends here: as a branch that leads no further.
            self._sampled += len(draft.ids) - before
            self.release(draft)
            del self._running[node]
            rest: Sequence[Delta] = ()
            try:
                if is_live:
                    rest = parser.finish()
                else:
                    parser.parse(draft.ids)
            finally:
                self.graph.nodes[node] = recorded = draft.as_node(parser.message, finish)
                self.graph.tokens += len(draft.ids) - before
                if parser.raw_text:
                    self.template.latest_turn = recorded, parser.raw_text
            if on_delta is not None and finish != "cut":
                for delta in rest:
                    on_delta(delta)
        self.graph.index(node)
        draft.prompt, draft.ids, draft.logprobs = (), [], []  # its node has them
        return self._turn(draft, parser)

    async def _generate(
        self, draft: Draft, parser: TurnParser | None, on_delta: OnDelta | None, clock: Callable[[], float]
    ) -> str:
        """Sample until the turn ends, and return why it did. After a pause, sampling continues with a new span."""
        sampling = draft.sampling
        while draft.remaining > 0:
            chunk: Chunk | None = None
            rest = sampling.after(len(draft.ids)) if draft.ids else sampling
            ids = [*draft.prompt, *draft.ids] if draft.ids else draft.prompt
            async with aclosing(self.engine.generate(ids, rest, seed=draft.seed)) as stream:
                async for chunk in stream:
                    check_chunk(chunk)
                    if not draft.ids:
                        draft.cached_tokens = chunk.cached_tokens
                    count = len(chunk.ids)
                    if parser is not None:
                        count = _feed(parser, on_delta, chunk.ids, chunk.logprobs, chunk.tops)
                    draft.add(chunk, count)
                    if chunk.ids:
                        self.engine.activity.last_at = clock()
                    if parser is not None and parser.done:
                        return "stop"
            if chunk is None or chunk.finish is None:
                raise EngineError("the engine ended a turn without a finish reason")
            if chunk.finish != "abort":
                return chunk.finish
        return "length"

    def _fit_budget(self, sampling: Sampling, tokens: int, choices: int, sampled: int = 0) -> Sampling:
        """The sampling that the budget allows a draft that may use this many more tokens, the first of `choices`."""
        limit = self.limits.tokens or 0
        share = (limit - self._sampled - self._reserved) // choices
        if share > 0:
            return sampling if tokens <= share else sampling.model_copy(update={"max_tokens": sampled + share})
        if self._sampled >= limit:
            raise BudgetSpent(f"all {limit} tokens are used up")
        error = BudgetSpent(
            f"{self._sampled} of {limit} tokens are used up, and {self._reserved} are reserved for running calls: "
            "too few are left"
        )
        error.is_temporary = True
        raise error

    def is_done(self, draft: Draft) -> bool:
        """Whether a turn was sampled to its end."""
        return self.graph.nodes[draft.node].finish in ("stop", "length")

    def deltas(self, draft: Draft) -> list[Delta]:
        """The deltas of a finished turn."""
        parser, node, start = self._parser(draft), self.graph.nodes[draft.node], len(draft.opening)
        return [*parser.feed(node.ids[start:], node.logprobs[start:], draft.tops), *parser.finish()]

    def result(self, draft: Draft) -> Turn:
        """The finished turn of a draft."""
        parser = self._parser(draft)
        parser.parse(self.graph.nodes[draft.node].ids[len(draft.opening) :])
        return self._turn(draft, parser)

    def _turn(self, draft: Draft, parser: TurnParser) -> Turn:
        """A finished turn."""
        node, message, start = self.graph.nodes[draft.node], parser.message, len(draft.opening)
        return Turn(
            copy_message(message) if "tool_calls" in message else message,  # the node has the same calls
            node.finish or "cut",
            draft.node,
            draft.prompt_tokens,
            draft.sampled,
            parser.malformed,
            node.ids[start:],
            node.logprobs[start:],
            parser.stopped_by,
            None if draft.tops is None else tuple(draft.tops),
            parser.hidden,
            draft.cached_tokens,
        )

    def _parser(self, draft: Draft) -> TurnParser:
        raw = self.graph.nodes[draft.parent].message.get("role") == RAW
        stop, options = draft.sampling.stop, draft.options
        return self.template.parser(call_id=f"call_{draft.node}", stop=stop, raw=raw, options=options)

    def prompt_ids(self, draft: Draft) -> tuple[int, ...]:
        """The ids that the engine was given for a turn."""
        return tuple(self.graph.ids(draft.parent, draft.opening))

    def restore(self, nodes: Sequence[tuple[Node, Key | None]], verdicts: Mapping[int, Verdict]) -> None:
        """Continue from what was recorded: nodes, with the keys of those that can be found again."""
        for node, key in nodes:
            self.graph.add(node, key)
            self._turns += node.finish is not None
            self._sampled += node.sampled
        self.verdicts.update(verdicts)

    def restore_draft(
        self, number: int, sampling: Sampling, seed: str, verdict: Verdict, options: TurnOptions = PLAIN
    ) -> Draft:
        """The draft of a restored turn, to be returned again or continued."""
        node = self.graph.nodes[number]
        start = len(node.ids) - node.sampled
        opening, parent = node.ids[:start], node.parent or 0
        prompt = self.graph.ids(parent, opening)
        draft = Draft(number, parent, prompt, len(prompt), opening, sampling, seed, verdict, options)
        draft.spans, draft.sampled, draft.reshapes = list(node.spans), node.sampled, sampling.reshapes
        if self.is_done(draft):
            draft.prompt = ()
        else:
            draft.ids, draft.logprobs = list(node.ids[start:]), list(node.logprobs[start:])
        return draft

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds inside to a phase, such as `tools`: work that was done on behalf of the policy."""
        clock = asyncio.get_running_loop().time
        self.engine_wait.count(name, 1, start := clock())
        try:
            yield
        except asyncio.CancelledError:
            self.interrupted = name, start, clock()
            raise
        finally:
            self._end_phase(name, start, clock())

    def _end_phase(self, name: str, start: float, end: float) -> None:
        self.phases_s[name] = self.phases_s.get(name, 0.0) + end - start
        self.engine_wait.count(name, -1, end)

    def silent_s(self, now: float | None = None) -> float:
        """How long the engine has returned no token, or had, without `now`, when a turn was last cancelled.

        An engine that is paused, or samples for other sessions meanwhile, is not silent: the session is in its queue.
        """
        if now is not None:
            since = self.engine_wait.since
            return 0.0 if since is None or self.engine.is_paused else now - max(self.engine.activity.last_at, since)
        name, start, end = self.interrupted or ("", 0.0, 0.0)
        return max(0.0, end - max(self.engine.activity.last_at, start)) if name == "generate" else 0.0

    def episode(
        self, task: Task, outcome: Outcome = Outcome.OK, *, fault: Fault | None = None, reason: str = ""
    ) -> Episode:
        """Everything that was recorded, as an episode without a reward."""
        nodes = list(self.graph.nodes)
        for node, draft in self._running.items():  # turns that are not finished: what was sampled so far
            parser = self._parser(draft)
            parser.parse(draft.ids)
            nodes[node] = draft.as_node(parser.message, "cut")
        reason = reason.encode("utf-8", "replace").decode()
        attempt = Attempt(0.0, dict(self.phases_s), outcome, reason)
        return Episode(task, tuple(nodes), outcome, fault or FAULT_OF.get(outcome), reason, attempts=(attempt,))


def _feed(
    parser: TurnParser,
    on_delta: OnDelta | None,
    ids: Sequence[int],
    logprobs: Sequence[float],
    tops: Sequence[tuple[tuple[int, float], ...]] | None,
) -> int:
    """Parse tokens and publish their deltas; how many tokens there are up to the end of a stop string."""
    # If text may end the turn, it must be clear which token did: what follows it is not shown.
    step = 1 if parser.may_stop else len(ids) or 1
    for start in range(0, len(ids), step):
        end = start + step
        for delta in parser.feed(ids[start:end], logprobs[start:end], None if tops is None else tops[start:end]):
            if on_delta is not None:
                on_delta(delta)
        if parser.done:
            return end
    return len(ids)
