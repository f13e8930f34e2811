"""A live environment for the campaign loop: an agent with only `select_action` and `update_policy` acts live (G13)."""

from collections.abc import AsyncIterator, Awaitable, Generator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from random import Random
from typing import Any, Self

from loopwright.core.outcome import FAULT_OF, Outcome
from loopwright.core.trial import Feedback, Observation, Proposal, Reward, Trial
from loopwright.envs.live.env import LiveEnv


class LiveCampaignEnv:
    """Steps a live environment for the campaign loop, and begins the next episode when one is over.

    `observation.metrics["observation"]` is the server's observation, `observation.context` the regime of the episode.
    An action is an element of `action_space`, or `{"action": element}`. `feedback.done` ends an episode.
    """

    def __init__(self, live: LiveEnv, seed: int) -> None:
        self.live, self.book, self.server = live, live.book, live.server
        self.action_space, self.observation_space = live.server.action_space, live.server.observation_space
        self.objectives, self.metric_names = live.objectives, live.metric_names
        self._seed: int | None = Random(f"{seed}:{live.book.step}").getrandbits(31) if live.book.step else seed
        self._pending: Observation | None = None

    @property
    def may_propose(self) -> bool:
        """Whether the budget has room for another step."""
        return not self.book.stopping and self.book.has_budget()

    def reset(self) -> Observation:
        """The observation to act on next; begins an episode where none is in progress."""
        if self._pending is None:
            observation, info = self.live.start_episode(self._seed)
            self._seed = None  # later episodes continue the server's own random sequence
            self._pending = Observation({"observation": observation}, info.get("env_params", {}))
        return self._pending

    def step(self, action: Any, note: Mapping[str, Any] | None = None, *, fresh: bool = False) -> Awaitable[Feedback]:
        """One step, finished when this returns: the server is stepped synchronously, and notes are not kept."""
        del note, fresh
        previous, self._pending = self.reset(), None
        is_wrapped = isinstance(action, Mapping) and action.keys() == {"action"}
        observation, reward, terminated, truncated, info = self.live.step_now(
            action["action"] if is_wrapped else action
        )
        outcome = Outcome(info.get("outcome", Outcome.OK))
        after = Observation({"observation": observation}, previous.context)
        done = terminated or truncated
        if not done:
            self._pending = after
        succeeded = outcome is Outcome.OK
        is_penalty_set = self.live.penalties.for_outcome(outcome) is not None
        return _Finished(
            Feedback(
                trial=info["trial"],
                action=action,
                reward=Reward(reward) if succeeded else None,
                values=(reward,) if succeeded or is_penalty_set else None,
                observation=after,
                previous=previous,
                regime=previous.context,
                outcome=outcome,
                fault=FAULT_OF.get(outcome),
                done=done,
                group=self.book.group,
            )
        )

    def history(self) -> Iterator[Proposal]:
        """The steps of the run so far, for an agent that continues it; nothing if only whole episodes were recorded."""
        for group, trials in groupby(self.book.ledger.trials(), key=lambda trial: trial.group):
            steps = [trial for trial in trials if trial.action is not None]
            previous = Observation({"observation": None}, steps[0].regime if steps else {})
            for trial in steps:
                outcome = trial.outcome or Outcome.ABORTED
                after = Observation({"observation": trial.metrics.get("observation")}, trial.regime)
                feedback = Feedback(
                    trial=trial.number,
                    action=trial.action,
                    reward=trial.reward,
                    values=trial.reward.objectives if trial.reward else None,
                    observation=after,
                    previous=previous,
                    regime=trial.regime,
                    outcome=outcome,
                    fault=trial.fault,
                    done=trial is steps[-1],
                    group=group,
                )
                yield Proposal(group, trial.action, trial.regime, None, feedback)
                previous = after

    def unfinished(self) -> list[list[Trial]]:
        """None: a step that was interrupted is over, and so is its episode."""
        return []

    def resume(self, trials: Sequence[Trial]) -> Awaitable[Feedback]:
        """Take such a step again, in the episode in progress."""
        return self.step(trials[0].action)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Close the server at the end."""
        try:
            yield self
        finally:
            self.live.close()


class _Finished(Awaitable[Feedback]):
    """Feedback that is there already: awaiting it costs no turn of the event loop."""

    def __init__(self, feedback: Feedback) -> None:
        self._feedback = feedback

    def __await__(self) -> Generator[Any, None, Feedback]:
        yield from ()
        return self._feedback
