"""Agents that propose actions one by one: the campaign loop, and what agents over a space share."""

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Literal, Protocol

from pydantic import Field

from loopwright.core.agent import Agent, AgentConfig
from loopwright.core.errors import InvalidAction, Problem
from loopwright.core.outcome import Outcome
from loopwright.core.trial import Action, Feedback, Observation, Proposal, Regime, Trial, key_of
from loopwright.envs.search import SearchEnv
from loopwright.ledger.trial_book import TrialBook
from loopwright.selection.confirmation import Confirmation
from loopwright.spaces.space import Space

_RETRIES_FOR_CONSTRAINTS = 16
_ENUMERABLE = 100_000


class Env(Protocol):
    """What the campaign loop needs of an environment."""

    book: TrialBook

    @property
    def may_propose(self) -> bool:
        """Whether the budget has room for another proposal."""

    def reset(self) -> Observation:
        """The observation to act on next."""

    def step(
        self, action: Action, note: Mapping[str, Any] | None = None, *, fresh: bool = False
    ) -> Awaitable[Feedback]:
        """Reserve a trial in this call, then run it. With `fresh`, the cache is not asked."""

    def history(self) -> Iterable[Proposal]:
        """What was proposed before, for an agent that continues a run."""

    def unfinished(self) -> list[list[Trial]]:
        """The groups of trials that an earlier process left unfinished."""

    def resume(self, trials: Sequence[Trial]) -> Awaitable[Feedback]:
        """Finish such a group."""

    def running(self) -> AbstractAsyncContextManager[Any]:
        """Open the environment for as long as the campaign lasts."""


class SearchAgent(Agent):
    """Proposes actions one by one and learns from their feedback; up to `parallel` trials are in flight.

    In a live run a trial is a step, an action an element of `env.action_space`, and `feedback.done` ends an episode.

    class Coin(SearchAgent):
        class Config(AgentConfig):
            type: Literal["coin"] = "coin"

        def select_action(self, observation: Observation) -> Action | None:
            return {"side": "heads"}

        def update_policy(self, feedback: Feedback) -> None:
            print(feedback.action, feedback.reward)
    """

    env: Env
    steps_live: ClassVar[bool] = True
    note: Mapping[str, Any] | None = None
    """Stored beside the action that `select_action` returned, so that a resumed run proposes as this one would."""

    def __init__(self, env: Any, config: Any, *, parallel: int = 1) -> None:
        super().__init__(env, config, parallel=parallel)
        self._in_flight = 0
        self._landed: asyncio.Event | None = None
        """Set when a trial has ended, if a slot waits for one."""

    @abstractmethod
    def select_action(self, observation: Observation) -> Action | None:
        """The next action, or None when there is nothing left to try."""

    def update_policy(self, feedback: Feedback) -> None:
        """Learn from a trial that has ended."""

    def restore(self, history: Iterable[Proposal]) -> None:
        """Continue from what was proposed before; the default learns from it again."""
        for proposal in history:
            if proposal.feedback is not None:
                self.update_policy(proposal.feedback)

    def run(self) -> int:
        """The campaign: restore, then propose, step and learn until there is nothing left to try."""
        if self.env.book.step:
            self.restore(self.env.history())
        asyncio.run(self._campaign())
        return 0

    async def _campaign(self) -> None:
        """Keep up to `parallel` trials in flight, one per slot; feedback comes as they finish."""
        book = self.env.book
        unfinished = self.env.unfinished() if book.step else []
        loop = asyncio.get_running_loop()
        async with self.env.running():
            slots = [asyncio.ensure_future(self._slot(unfinished)) for _ in range(self.parallel)]
            campaign = asyncio.gather(*slots)
            book.when_stopped(lambda: loop.call_soon_threadsafe(campaign.cancel))
            try:
                await campaign
            except asyncio.CancelledError:
                if not book.stopping:
                    raise
            finally:
                book.when_stopped(None)
                for slot in slots:
                    slot.cancel()
                await asyncio.gather(*slots, return_exceptions=True)
                book.ledger.flush()

    def next_trial(self, unfinished: list[list[Trial]], in_flight: int) -> Awaitable[Feedback] | None:
        """Reserve the next trial: an unfinished one, or what the agent proposes. None if it cannot be known yet."""
        if unfinished:
            return self.env.resume(unfinished.pop(0))
        if self.env.may_propose and (action := self.select_action(self.env.reset())) is not None:
            return self.env.step(action, self.note, fresh=self.measures_again)
        return None

    async def _slot(self, unfinished: list[list[Trial]]) -> None:
        """One trial after another, until there is nothing left to try and nothing in flight to learn from."""
        env = self.env
        while not env.book.stopping:
            trial = self.next_trial(unfinished, self._in_flight)
            if trial is None:
                env.book.ledger.flush()
                if self._in_flight:
                    self._landed = self._landed or asyncio.Event()
                    await self._landed.wait()
                    continue
                if self._landed is not None:
                    self._landed.set()
                return
            self._in_flight += 1
            try:
                feedback = await trial
            finally:
                self._in_flight -= 1
            if not feedback.phase:  # a trial that the agent proposed; the others are the campaign's own
                self.update_policy(feedback)
            if self._landed is not None:
                # Wakes the slots that wait now; later ones wait for the next trial to end.
                self._landed.set()
                self._landed = None
            if feedback.trial % 64 == 0:
                # Trials that are answered from the cache never wait; give those in flight their turn.
                await asyncio.sleep(0)


class SearchConfig(AgentConfig):
    """The settings that every agent over a space has."""

    start: Literal["first"] | tuple[dict[str, Any], ...] = ()
    """The first trials: "first" (the first candidate of each list, the low end of each range), or a list of points."""


class BudgetedConfig(SearchConfig):
    """The settings of agents over a space that never come to an end by themselves."""

    trials: int = Field(ge=1)
    """How many trials the run may use; repeats and cached trials count."""


class SpaceAgent(SearchAgent):
    """Proposes points of a space one after another: pinned first trials, and no point again that has failed.

    class Middle(SpaceAgent):
        def propose(self, n: int, retry: int, observation: Observation) -> Action | None:
            return {name: parameter.decode(0.5) for name, parameter in self.space.tunable.items()}
    """

    env: SearchEnv
    steps_live: ClassVar[bool] = False
    heeds_constraints: ClassVar[bool] = False
    """Whether a proposal that breaks a constraint is retried first, instead of spending a trial on it."""
    retries: ClassVar[int] = 32
    """How often a point that has failed is given up for the agent's next one, before any other point is taken."""

    def __init__(self, env: SearchEnv, config: Any, *, parallel: int = 1) -> None:
        super().__init__(env, config, parallel=parallel)
        self.space = env.space
        self.proposed = 0
        self._start = [self.space.first()] if config.start == "first" else list(config.start)
        self._failed: set[str] = set()
        self._open: dict[int, tuple[Action, Regime]] = {}
        self._waiting: tuple[int, Action] | None = None
        self._confirmation = Confirmation(env) if env.rules.reserve else None
        self._is_confirming = False

    @classmethod
    def problems(cls, config: Any, space: Space, home: Path) -> list[Problem]:
        problems = []
        for index, point in enumerate(() if config.start == "first" else config.start):
            try:
                space.validate(point)
            except InvalidAction as error:
                problems.append(Problem(f"start[{index}]", f"{error}."))
        return problems

    def run(self) -> int:
        """The campaign, then the confirmation of the best configurations. 1 if trials that fail alike ended it."""
        return super().run() | bool(self.env.halted)

    def next_trial(self, unfinished: list[list[Trial]], in_flight: int) -> Awaitable[Feedback] | None:
        if self._confirmation is None or unfinished:
            return super().next_trial(unfinished, in_flight)
        if not self._is_confirming:
            if (trial := self._confirmation.canary() or super().next_trial(unfinished, in_flight)) is not None:
                return trial
            # With nothing in flight to learn from, the agent has nothing left to propose.
            self._is_confirming = not in_flight
        return self._confirmation.next(in_flight=in_flight) if self._is_confirming else None

    @abstractmethod
    def propose(self, n: int, retry: int, observation: Observation) -> Action | None:
        """The n-th proposal, a function of the seed, n, `retry` and what was learned; None at the end.

        With a higher `retry` it should differ: the earlier tries are points that failed.
        """

    def select_action(self, observation: Observation) -> Action | None:
        n, pinned = self.proposed + 1, self.proposed < len(self._start)
        if pinned:
            retry, action = 0, self._start[n - 1]
        else:
            retry, action = self._waiting or (0, self.propose(n, 0, observation))
            self._waiting = None
        while action is not None:
            point = action, observation.context
            if not pinned and point in self._open.values() and not self.measures_again:
                # Whether this point fails is not known yet: wait, so that the choice never depends on timing.
                self._waiting = retry, action
                return None
            avoided = self.has_failed(*point) or (self.heeds_constraints and self.avoids(action, observation, retry))
            if pinned or not avoided:
                self.proposed, self._open[n] = n, point
                return action
            retry += 1
            if retry >= self.retries and self._open:
                # Which points have not failed is known only when nothing is in flight: wait here too.
                self._waiting = retry, action
                return None
            action = self.propose(n, retry, observation) if retry < self.retries else self.other(n, observation)
        return None

    def avoids(self, action: Action, observation: Observation, retry: int) -> bool:
        """Whether to try for another point first, because this one breaks a constraint."""
        return retry < _RETRIES_FOR_CONSTRAINTS and self.space.violated(action, observation.context) is not None

    def other(self, n: int, observation: Observation) -> Action | None:
        """Any point that has not failed, once all of the agent's own proposals have; None if every point has."""
        size = self.space.size
        if size is None or size > _ENUMERABLE or not self.space.enumerable:
            candidates = [self.space.sample(self.config.seed, f"{n}:{retry}:other") for retry in range(100)]
        else:
            candidates = list(self.space.points())
        alive = [point for point in candidates if not self.has_failed(point, observation.context)]
        return Random(f"{self.config.seed}:{n}:other").choice(alive) if alive else None

    def update_policy(self, feedback: Feedback) -> None:
        self._open.pop(feedback.group, None)
        if feedback.outcome not in (Outcome.OK, Outcome.ABORTED, Outcome.LOST):
            self._failed.add(_point(feedback.action, feedback.regime))
        self.learn(feedback)

    def has_failed(self, action: Action, regime: Regime) -> bool:
        """Whether this point has failed."""
        return bool(self._failed) and _point(action, regime) in self._failed

    def learn(self, feedback: Feedback) -> None:
        """Learn from a trial that has ended."""

    def restore(self, history: Iterable[Proposal]) -> None:
        for proposal in history:
            self.proposed = proposal.group
            self.recall(proposal)
            if proposal.feedback is not None:
                self.update_policy(proposal.feedback)
            else:
                self._open[proposal.group] = proposal.action, proposal.regime

    def recall(self, proposal: Proposal) -> None:
        """Restore one proposal, before its feedback is replayed."""


def _point(action: Action, regime: Regime) -> str:
    """A key for a point, also for one outside every space, which the environment will refuse."""
    try:
        return key_of(action, regime)
    except InvalidAction:
        return f"{action!r} under {regime!r}"
