"""The confirmation of a run: what its campaign measures besides the agent's proposals, and when.

During the search, a canary: the first configuration again, to notice a machine that drifts. After it, the finalists in
fresh runs beside the baseline. The agent learns nothing from either.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Mapping, Sequence
from heapq import nlargest
from math import fsum
from statistics import fmean
from typing import Any

from loopwright.core.outcome import Outcome
from loopwright.core.trial import Feedback, Trial
from loopwright.envs.search import SearchEnv
from loopwright.selection.estimate import RegimeWeights
from loopwright.selection.plan import regimes_of
from loopwright.selection.race import MIN_ROUNDS, standing
from loopwright.selection.recommendation import confirm_rules, race_rules, recommend
from loopwright.selection.trials import StoredTrial, stored_trials


def finalists(trials: Sequence[StoredTrial], about: Mapping[str, Any]) -> tuple[list[StoredTrial], str | None]:
    """The configurations to measure again, each as its first trial, with the baseline; and the baseline's action key.

    The trials of the search choose them, compared with others under the same regime and noise.
    """
    rules, weigh = confirm_rules(about), RegimeWeights(about)
    searched = [trial for trial in trials if not trial.phase and trial.counts]
    failed = {trial.action_key for trial in searched if not trial.objectives}
    ok = [trial for trial in searched if trial.objectives and trial.action_key not in failed]
    if not ok:
        return [], None
    baseline = ok[0].action_key
    # Fewer finalists that are measured well rather than many that are not, but two where they fit: a single one is the
    # luckiest trial.
    several, limit, cycle = len(ok[0].objectives) > 1, rules["limit"], rules["cycle"]
    room = limit // max(2 if several else 2 * MIN_ROUNDS, cycle) - 1
    room = max(1, room, min(2, limit // max(MIN_ROUNDS, cycle) - 1))
    if several:
        chosen = _undominated(ok, weigh)
        step = max(1.0, len(chosen) / room)
        chosen = [chosen[int(place * step)] for place in range(min(room, len(chosen)))]
    else:
        scores = _scores(ok, weigh)
        if rules["per_regime"]:
            chosen = sorted(scores, key=lambda key: -scores[key])
            leaders = [candidate.trials[0] for candidate in recommend(searched).by_regime]
            ahead = {trial.action_key for trial in ok if trial.number in leaders}
            chosen = [key for key in chosen if key in ahead][:room]
        else:
            most = min(rules["finalists"], room)
            chosen = [key for key in nlargest(most + 1, scores, scores.__getitem__) if key != baseline][:most]
    keys = dict.fromkeys([*chosen, baseline])
    first = {trial.action_key: trial for trial in reversed(ok) if trial.action_key in keys}
    return [first[key] for key in keys], baseline


def _undominated(trials: Sequence[StoredTrial], weigh: RegimeWeights) -> list[str]:
    """The action keys that no other one beats in every objective, in the order of the first objective."""
    columns = [_scores(trials, weigh, objective) for objective in range(len(trials[0].objectives))]
    front: dict[str, tuple[float, ...]] = {}
    # In falling order of the first objective, only an earlier one can beat a later one.
    for point, key in sorted(((tuple(c[key] for c in columns), key) for key in columns[0]), key=lambda p: p[0])[::-1]:
        if not any(all(a >= b for a, b in zip(other, point, strict=True)) for other in front.values()):
            front[key] = point
    return list(front)


def _scores(trials: Sequence[StoredTrial], weigh: RegimeWeights, objective: int = 0) -> dict[str, float]:
    """By action key, how far above the average under its conditions each was measured."""
    conditions: dict[tuple[str, str], list[float]] = defaultdict(list)
    weights: dict[str, float] = {}
    groups: dict[str, list[StoredTrial] | StoredTrial] = {}  # almost all actions are measured once
    for trial in trials:
        conditions[trial.regime_key, trial.noise].append(trial.objectives[objective])
        if trial.regime_key not in weights:
            weights[trial.regime_key] = weigh(trial.regime)
        earlier = groups.setdefault(trial.action_key, trial)
        if isinstance(earlier, list):
            earlier.append(trial)
        elif earlier is not trial:
            groups[trial.action_key] = [earlier, trial]
    averages = {condition: fmean(values) for condition, values in conditions.items()}
    scores: dict[str, float] = {}
    for action, group in groups.items():
        if not isinstance(group, list):
            value = group.objectives[objective] - averages[group.regime_key, group.noise]
            scores[action] = value if weights[group.regime_key] else 0.0
            continue
        above: dict[str, list[float]] = defaultdict(list)
        for trial in group:
            above[trial.regime_key].append(trial.objectives[objective] - averages[trial.regime_key, trial.noise])
        total = fsum(weights[regime] for regime in above) or 1.0
        scores[action] = fsum(weights[regime] * fmean(values) for regime, values in above.items()) / total
    return scores


class Confirmation:
    """Gives the campaign its own measurements one by one. All it decides comes from the ledger and the seed."""

    def __init__(self, env: SearchEnv) -> None:
        self._env, self._about = env, env.book.ledger.state("run")
        self._rules: Mapping[str, Any] = confirm_rules(self._about)
        self._regimes = regimes_of(env.draws, self._rules["cycle"])
        self._canaries = sum(1 for _ in env.book.ledger.trials(where="phase = 'canary'"))
        self._first: list[Trial] = []
        """The trials of the first group, once they are needed."""
        self._measured_again = 0
        """How many canaries came after these."""
        self._proposals = max(1, (self._about["budget"] - env.rules.reserve) // env.rules.repeats)
        self._batch: deque[tuple[str, int]] = deque()
        """The action keys that the current round still has to measure, and its number."""
        self._contestants: dict[str, StoredTrial] = {}
        self._counts: Counter[str] = Counter()
        self._baseline: str | None = None

    def canary(self) -> Awaitable[Feedback] | None:
        """The first configuration again, if it is time for that."""
        book, planned = self._env.book, self._rules["canaries"]
        # Spread evenly over the search.
        if self._canaries >= planned or book.group * (planned + 1) < self._proposals * (self._canaries + 1):
            return None
        self._canaries += 1
        # Finding it reads all trials; nothing else adds to it until the search is over.
        group = self._first or book.ledger.group(1)
        first = group[0]
        if first.outcome is not Outcome.OK:
            return None
        self._first, repeat = group, len(group) + self._measured_again
        self._measured_again += 1
        return self._env.measure_again(first.action, first.regime, first.noise, group=1, repeat=repeat, phase="canary")

    def next(self, *, in_flight: int) -> Awaitable[Feedback] | None:
        """The next measurement of a finalist; None at the end, or while a round has to be awaited."""
        if not self._batch and not in_flight and not self._env.halted:
            self._begin_round()
        if not self._batch:
            return None
        key, number = self._batch.popleft()
        contestant, env = self._contestants[key], self._env
        repeat = self._counts[key]
        self._counts[key] += 1
        return env.measure_again(
            contestant.action,
            self._regimes[(number - 1) % len(self._regimes)] if self._regimes else {},
            env.noise.sample(env.rules.repeats + number),
            group=contestant.group,
            repeat=repeat,
            phase="confirm",
        )

    def _begin_round(self) -> None:
        ledger = self._env.book.ledger
        if not self._contestants:
            trials = list(stored_trials(ledger))
            if not any(trial.unfinished for trial in trials):
                self._env.book.history = trials
            chosen, self._baseline = finalists(trials, self._about)
            self._contestants = {trial.action_key: trial for trial in chosen}
            self._counts = Counter(trial.action_key for trial in trials if trial.action_key in self._contestants)
        if not self._contestants:
            return
        rows: dict[str, list[StoredTrial]] = {key: [] for key in self._contestants}
        weigh, weights = RegimeWeights(self._about), dict[str, float]()
        for trial in stored_trials(ledger, phase="confirm"):
            weights[trial.regime_key] = weigh(trial.regime)
            if trial.action_key in rows:
                rows[trial.action_key].append(trial)
        width = len(next(iter(self._contestants.values())).objectives)
        race = standing(rows, race_rules(self._baseline, weights, self._rules, width))
        self._batch.extend((key, race.round) for key in race.next)
