"""Remeasurement: more measurements of what a finished search recommends. No agent learns from them."""

from collections import Counter
from collections.abc import Awaitable, Iterable
from random import Random
from typing import Any

from loopwright.agents.search.base import SearchAgent
from loopwright.core.trial import Action, Feedback, Observation, Proposal, Regime, Trial, key_of
from loopwright.envs.search import SearchEnv
from loopwright.selection.recommendation import recommend
from loopwright.selection.trials import stored_trials


class Remeasurement(SearchAgent):
    """Measures each recommended action `again` times under each of its regimes, as rows of phase `confirm`.

    The actions take turns, the baseline beside them, in a shuffled order and under the same noise in each round.
    """

    env: SearchEnv

    def __init__(self, env: SearchEnv, config: Any, *, again: int, parallel: int = 1) -> None:
        super().__init__(env, config, parallel=parallel)
        ledger = env.book.ledger
        about, trials = ledger.state("run"), list(stored_trials(ledger))
        best = recommend(trials, about)
        candidates = best.by_regime if about.get("conditions_on_regime") else best.front
        first = {trial.action_key: trial for trial in reversed(trials) if not trial.phase}
        by_action = {key_of(trial.action): trial for trial in first.values()}
        repeats = Counter(trial.action_key for trial in trials)
        confirmed = Counter(trial.action_key for trial in trials if trial.phase == "confirm")
        points = [(by_action[key_of(each.action)], regime) for each in candidates for regime in each.regimes or ({},)]
        baseline = next(trial for trial in trials if not trial.phase and trial.counts and trial.objectives)
        if baseline.action_key not in {origin.action_key for origin, _ in points}:
            points += [(baseline, regime) for regime in {str(regime): regime for _, regime in points}.values()]
        self.planned: list[tuple[Action, Regime, int, int, int]] = []
        """What is left to measure: action, regime, draw of the noise, group and repeat."""
        unused_draw = env.rules.repeats + max(confirmed.values(), default=0) + 1
        for turn in range(again):
            for origin, regime in Random(f"{config.seed}:remeasure:{len(trials) + turn}").sample(points, len(points)):
                repeat = repeats[origin.action_key]
                self.planned.append((origin.action, regime, unused_draw + turn, origin.group, repeat))
                repeats[origin.action_key] += 1
        env.book.budget = env.book.step + len(self.planned)  # shown as the total; the agent's own is used up

    def select_action(self, observation: Observation) -> Action | None:
        return None

    def restore(self, history: Iterable[Proposal]) -> None:
        """There is nothing to learn."""

    def next_trial(self, unfinished: list[list[Trial]], in_flight: int) -> Awaitable[Feedback] | None:
        if unfinished:
            return self.env.resume(unfinished.pop(0))
        if not self.planned:
            return None
        action, regime, draw, group, repeat = self.planned.pop(0)
        noise = self.env.noise.sample(draw)
        return self.env.measure_again(action, regime, noise, group=group, repeat=repeat, phase="confirm")
