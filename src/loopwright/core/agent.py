"""The base of all agents: what learns or searches, and the loop that most of them share."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from loopwright.core.config import Config
from loopwright.core.env import Env
from loopwright.core.errors import Problem
from loopwright.core.registry import Registry
from loopwright.core.trial import Action, Feedback, Observation, Proposal, Trial


class AgentConfig(Config):
    """What every agent can be told."""

    type: str
    trials: int | None = Field(default=None, ge=1)
    """How many trials the run may use; repeats and cached trials count."""
    seed: int = 0
    """The source of all the run's randomness, draws included."""
    count_cached: bool = True
    """Whether a trial that was answered from the cache uses up budget."""


class Agent(ABC):
    """Proposes actions and learns from what became of them.

    class Coin(Agent):
        class Config(AgentConfig):
            type: Literal["coin"] = "coin"

        def select_action(self, observation: Observation) -> Action | None:
            return {"side": "heads"}
    """

    Config: ClassVar[type[AgentConfig]] = AgentConfig
    samples_env_params: ClassVar[bool] = False
    """Whether the agent can live with parameters that the environment draws; say in its docstring how it uses them."""
    conditions_on_regime: ClassVar[bool] = False
    """Whether the agent's answer is an action for each regime, not one for all."""
    steps_live: ClassVar[bool] = False
    """Whether the agent can act in a live environment, whose spaces come from a server."""
    several_objectives: ClassVar[bool] = False
    """Whether the agent can weigh several rewards against one another."""
    measures_again: ClassVar[bool] = False
    """Whether the agent wants an action measured afresh when it proposes it again, instead of the cached answer."""

    def __init__(self, env: Env, config: Any, *, parallel: int = 1) -> None:
        self.env, self.config, self.parallel = env, config, parallel

    @classmethod
    def problems(cls, config: Any, space: Any, home: Path) -> list[Problem]:
        """What is wrong with this configuration over this space; found before anything starts."""
        return []

    @abstractmethod
    def select_action(self, observation: Observation) -> Action | None:
        """The next action, or None when there is nothing left to try."""

    def update_policy(self, feedback: Feedback) -> None:
        """Learn from a trial that has ended."""

    def note(self) -> Mapping[str, Any] | None:
        """What must be stored beside the action just proposed, so that a resumed run proposes as this one would."""
        return None

    def restore(self, history: Iterable[Proposal]) -> None:
        """Go on from what was proposed before; the default learns from it again."""
        for proposal in history:
            if proposal.feedback is not None:
                self.update_policy(proposal.feedback)

    def run(self) -> int:
        """The whole campaign, in an event loop of its own.

        Returns 0, or another number for a failure that leaves the other runs of a scenario unharmed: it accumulates,
        and the next run starts. Raises for a bug: then no further run starts, the reports are still made, and the
        exception reaches the user as it was. Agents with a training loop of their own override this and turn a failed
        training into a code.
        """
        asyncio.run(self._campaign())
        return 0

    def shutdown(self) -> None:
        """Let go of what `run` built; always called, and its own failure is a non-zero code."""

    async def _campaign(self) -> None:
        flights = _Flights()
        self.env.run.when_stopped(flights.wake_from_outside(asyncio.get_running_loop()))
        try:
            async with self.env.running():
                try:
                    await self._fly(flights)
                finally:
                    await flights.abort()
                    self.env.run.ledger.flush()
        finally:
            self.env.run.when_stopped(None)

    async def _fly(self, flights: "_Flights") -> None:
        """Keep up to `parallel` trials in flight; feedback comes as they finish."""
        again = self.env.unfinished()
        while not self.env.run.stopping:
            launched = False
            while len(flights.flying) < self.parallel and (flight := self._launch(again)) is not None:
                flights.start(flight)
                launched = True
            if not flights.flying:
                break
            if not launched:
                # Otherwise what starts now writes it down along with itself.
                self.env.run.ledger.flush()
            for feedback in await flights.landed():
                self.update_policy(feedback)

    def _launch(self, again: list[list[Trial]]) -> Awaitable[Feedback] | None:
        if again:
            return self.env.resume(again.pop(0))
        if not self.env.may_propose:
            return None
        action = self.select_action(self.env.reset())
        return None if action is None else self.env.step(action, self.note(), fresh=self.measures_again)


class _Flights:
    """Trials in flight. Simpler than `asyncio.wait`, which costs as much as a small trial."""

    def __init__(self) -> None:
        self.flying: set[asyncio.Future[Feedback]] = set()
        self._down: list[asyncio.Future[Feedback]] = []
        self._wake = asyncio.Event()

    def start(self, flight: Awaitable[Feedback]) -> None:
        """Let a trial fly."""
        future = asyncio.ensure_future(flight)
        self.flying.add(future)
        future.add_done_callback(self._land)

    def _land(self, future: "asyncio.Future[Feedback]") -> None:
        self._down.append(future)
        self._wake.set()

    async def landed(self) -> list[Feedback]:
        """Wait until some have landed or the run is told to stop; by number, so that timing changes nothing."""
        await self._wake.wait()
        self._wake.clear()
        told = sorted((future.result() for future in self._down), key=lambda feedback: feedback.trial)
        # Only now: if one has failed, the others that landed with it are still to be waited for.
        self.flying.difference_update(self._down)
        self._down.clear()
        return told

    def wake_from_outside(self, loop: asyncio.AbstractEventLoop) -> Callable[[], object]:
        """A way to wake `landed` from a signal handler or another thread."""
        return lambda: loop.call_soon_threadsafe(self._wake.set)

    async def abort(self) -> None:
        """End what is still flying."""
        for flight in self.flying:
            flight.cancel()
        await asyncio.gather(*self.flying, return_exceptions=True)


agents: Registry[type[Agent]] = Registry("agent", "loopwright.agents")
