"""The race of the finalists: rounds of fresh measurements, in which those that are plainly worse drop out.

Each round measures every finalist that is still in the race once, and the baseline beside them, under the same regime
and noise and in a shuffled order. The race is replayed from the ledger: what comes next depends on the recorded rounds
and the seed alone, so that a resumed run continues exactly where it stopped.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from loopwright.selection.estimate import Estimate, Sample, estimate, mean_difference
from loopwright.selection.trials import StoredTrial

MIN_ROUNDS = 3
"""Before this many rounds nobody drops out."""
ENOUGH_ROUNDS = 8
"""Once one finalist is left, or for a whole front, this many rounds are enough."""
MAX_ROUNDS = 20


@dataclass(frozen=True)
class RaceRules:
    """What a race depends on besides its measurements."""

    baseline: str | None
    """The action key of the baseline, which is measured in every round."""
    limit: int
    """How many measurements there may be."""
    weights: Mapping[str, float]
    """How much each regime counts, by its key."""
    cycle: int = 1
    """How many regimes the rounds go through."""
    seed: int = 0
    drops: bool = True
    """Whether finalists drop out; not for several objectives, where the whole front is confirmed."""


@dataclass(frozen=True)
class Standing:
    """Where a race stands: who is still in it, best first, and what to measure next."""

    alive: tuple[str, ...]
    next: tuple[str, ...] = ()
    """The action keys that the current round still has to measure; empty at the end of the race."""
    round: int = 0
    """The current round, from 1."""


def standing(rows: Mapping[str, Sequence[StoredTrial]], rules: RaceRules) -> Standing:
    """Replay the race. `rows` has the fresh measurements of each finalist, the baseline included, in order."""
    alive, used, number = list(rows), 0, 0
    while True:
        done = {key: rows[key][:number] for key in alive}
        alive = _still_in(done, rules) if number else alive
        number += 1
        room = rules.limit - used
        if not alive or room < 1 or _is_over(done, alive, number - 1, rules):
            return Standing(tuple(alive), round=number - 1)
        entrants = sorted(alive, key=lambda key: key == rules.baseline)[:room]
        missing = [key for key in entrants if len(rows[key]) < number]
        if missing:
            order = Random(f"{rules.seed}:confirm:{number}").sample(sorted(entrants), len(entrants))
            return Standing(tuple(alive), tuple(key for key in order if key in missing), number)
        used += len(entrants)


def difference(
    rows: Sequence[StoredTrial], others: Sequence[StoredTrial], weights: Mapping[str, float], tests: int = 1
) -> Estimate | None:
    """How much better the first is than the second, by pairs under the same regime and noise; None without any.

    In a race these are its rounds. Later measurements of the two may be in another order.
    """
    waiting: dict[tuple[str, str], deque[StoredTrial]] = defaultdict(deque)
    for row in others:
        waiting[row.regime_key, row.noise].append(row)
    samples: list[Sample] = []
    for row in rows:
        same = waiting[row.regime_key, row.noise]
        other = same.popleft() if same else None
        if row.objectives and other is not None and other.objectives:
            samples.append((row.regime_key, row.objectives[0] - other.objectives[0]))
    return mean_difference(samples, weights, tests) if samples else None


def samples_of(rows: Sequence[StoredTrial], objective: int = 0) -> list[Sample]:
    """The values of an objective, each with its regime."""
    return [(row.regime_key, row.objectives[objective]) for row in rows if row.objectives]


def _still_in(done: Mapping[str, Sequence[StoredTrial]], rules: RaceRules) -> list[str]:
    """Who has not failed and is not plainly worse than the leader; best first."""
    means = {
        key: estimate(samples, rules.weights).mean
        for key, rows in done.items()
        if all(row.objectives for row in rows if not row.is_lost) and (samples := samples_of(rows))
    }
    ranking = sorted(means, key=lambda key: -means[key])
    rounds = max(len(rows) for rows in done.values())
    if not rules.drops or rounds < max(MIN_ROUNDS, rules.cycle) or rounds % rules.cycle:
        return ranking
    leader = done[ranking[0]] if ranking else ()
    kept = []
    for key in ranking:
        # Measured beside the others to the end, whatever it is worth.
        gap = None if key == rules.baseline else difference(done[key], leader, rules.weights, len(ranking))
        if gap is None or gap.interval is None or gap.interval[1] >= 0:
            kept.append(key)
    return kept


def _is_over(done: Mapping[str, Sequence[StoredTrial]], alive: Sequence[str], rounds: int, rules: RaceRules) -> bool:
    """Whether further rounds would teach nothing, or little."""
    if rounds < max(MIN_ROUNDS, rules.cycle):
        return False
    if rounds >= max(MAX_ROUNDS, 4 * rules.cycle):
        return True
    finalists = [key for key in alive if key != rules.baseline]
    if rounds >= max(ENOUGH_ROUNDS, 2 * rules.cycle) and (len(finalists) < 2 or not rules.drops):
        return True
    if rounds < 2 * rules.cycle:
        return False
    # A workload that always gives the same value for the same question has nothing more to say.
    answers = {(key, row.regime_key, row.objectives) for key in alive for row in done[key]}
    return len(answers) == len({(key, regime) for key, regime, _ in answers})
