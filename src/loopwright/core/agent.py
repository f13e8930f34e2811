"""The base of all agents: what learns or searches, and the loop that most of them share."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar

from pydantic import Field

from loopwright.core.config import Config
from loopwright.core.errors import Problem
from loopwright.core.registry import Registry
from loopwright.core.trial import Action, Feedback, Observation, Proposal, Trial
from loopwright.ledger.env import Env


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
    rolls_out: ClassVar[bool] = False
    """Whether the agent works on rollouts: tasks in, judged episodes out."""
    gives_weights: ClassVar[bool] = False
    """Whether the agent trains the policy, so that engines must take weights from it."""
    several_objectives: ClassVar[bool] = False
    """Whether the agent can weigh several rewards against one another."""
    measures_again: ClassVar[bool] = False
    """Whether the agent wants an action measured afresh when it proposes it again, instead of the cached answer."""

    counterpart: ClassVar[str | None] = None
    """`module:Class` of the agent that goes by the same name in a run with rollouts, where that is another one."""

    def __init__(self, env: Env, config: Any, *, parallel: int = 1) -> None:
        self.env, self.config, self.parallel = env, config, parallel
        self._flying = 0
        self._landing = asyncio.Event()

    @classmethod
    def for_rollouts(cls) -> "type[Agent]":
        """The agent of this name in a run with rollouts."""
        found: type[Agent] = cls if cls.counterpart is None else resolve_name(cls.counterpart)
        return found

    @classmethod
    def problems(cls, config: Any, space: Any, home: Path) -> list[Problem]:
        """What is wrong with this configuration over this space; found before anything starts."""
        return []

    @classmethod
    def too_little(cls, config: Any, space: Any, repeats: int = 1, parallel: int = 1) -> list[Problem]:
        """Why the budget is too small to give a result; of a live run only the configuration is known."""
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
        """Keep up to `parallel` trials in flight, each in a slot of its own; feedback comes as they finish."""
        again = self.env.unfinished()
        loop = asyncio.get_running_loop()
        async with self.env.running():
            slots = [asyncio.ensure_future(self._slot(again)) for _ in range(self.parallel)]
            self.env.run.when_stopped(lambda: loop.call_soon_threadsafe(_cancel, slots))
            try:
                await asyncio.gather(*slots)
            except asyncio.CancelledError:
                if not self.env.run.stopping:
                    raise
            finally:
                self.env.run.when_stopped(None)
                _cancel(slots)
                await asyncio.gather(*slots, return_exceptions=True)
                self.env.run.ledger.flush()

    async def _slot(self, again: list[list[Trial]]) -> None:
        """One trial after another, until there is nothing left to try and nothing in flight to learn from."""
        while not self.env.run.stopping:
            flight = self._launch(again)
            if flight is None:
                self.env.run.ledger.flush()
                if not self._flying:
                    self._landing.set()
                    return
                await self._landing.wait()
                continue
            self._flying += 1
            try:
                feedback = await flight
            finally:
                self._flying -= 1
            self.update_policy(feedback)
            # Whoever waits for news gets them; the event is for those that wait now.
            self._landing.set()
            self._landing = asyncio.Event()
            if feedback.trial % 64 == 0:
                # Trials that are answered from the cache never wait; let those in flight have their turn.
                await asyncio.sleep(0)

    def _launch(self, again: list[list[Trial]]) -> Awaitable[Feedback] | None:
        if again:
            return self.env.resume(again.pop(0))
        if not self.env.may_propose:
            return None
        action = self.select_action(self.env.reset())
        return None if action is None else self.env.step(action, self.note(), fresh=self.measures_again)


def _cancel(slots: "list[asyncio.Task[None]]") -> None:
    for slot in slots:
        slot.cancel()


def agent_of(config: AgentConfig) -> type[Agent]:
    """The agent that a config is for."""
    found = agents.get(config.type)
    return found if isinstance(config, found.Config) else found.for_rollouts()


agents: Registry[type[Agent]] = Registry("agent", "loopwright.agents", Agent)
