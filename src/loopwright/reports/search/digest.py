"""The digest of a run: what its ledger contains, read once, as reports need it."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from loopwright.core.errors import LoopwrightError
from loopwright.core.outcome import Outcome, without_numbers
from loopwright.core.trial import Regime, Trial, key_of
from loopwright.ledger.ledger import Ledger
from loopwright.reports.formatting import counted, number, short
from loopwright.reports.live.evaluations import Evaluations
from loopwright.reports.live.policy import PolicyComparison, comparison
from loopwright.reports.objective import Objective
from loopwright.selection.recommendation import Candidate, Recommendation, recommend
from loopwright.selection.trials import StoredTrial, stored_trials


@dataclass(frozen=True)
class FailureGroup:
    """Trials with the same bad outcome: `reasons` holds each reason with its trials, the most common first."""

    outcome: str
    fault: str
    reasons: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def count(self) -> int:
        """How many trials there were."""
        return sum(len(trials) for _, trials in self.reasons)

    def describe_reasons(self, most: int = 4) -> str:
        """Each reason with its count, the most common first; a single one without a count."""
        if len(self.reasons) == 1:
            return self.reasons[0][0]
        parts = [
            f"{number(len(trials))} × {short(reason or 'no reason', 160)}" for reason, trials in self.reasons[:most]
        ]
        left = len(self.reasons) - most
        return "; ".join([*parts, *([f"and {counted(left, 'more reason')}"] if left > 0 else [])])


@dataclass(frozen=True)
class Digest:
    """A search as its ledger records it. Whatever a half-written ledger lacks is empty here."""

    kind: ClassVar[str] = "search"

    folder: Path
    about: Mapping[str, Any]
    provenance: Mapping[str, Any]
    failure: str
    finished: bool
    trials: Sequence[StoredTrial]
    trouble: str
    """Why the ledger could not be read completely."""
    policy: PolicyComparison | None = None
    """The policy beside the best static action, if one was trained and evaluated."""
    evaluations: Evaluations = field(default_factory=Evaluations)
    """Of the policy of an RL agent, during training."""
    span: tuple[float | None, float | None] = (None, None)
    """When the first trial started, and when the last one ended."""

    @property
    def name(self) -> str:
        """The run's name; a name from the disk may hold bytes that are not text."""
        return str(self.about.get("name") or self.folder.name).encode("utf-8", "replace").decode()

    def table(self, name: str) -> dict[str, Any]:
        """A table of the run's description, or an empty one."""
        table = self.about.get(name)
        return table if isinstance(table, dict) else {}

    @property
    def status(self) -> tuple[str, str]:
        """How far the run got: a CSS class and a few words."""
        if self.failure:
            return "bad", "failed"
        if self.trouble:
            return "bad", "ledger damaged"
        if self.complete:
            return ("good", "finished") if self.succeeded else ("bad", "without a result")
        return "open", "in progress or interrupted"

    @property
    def progress(self) -> str:
        """How many trials have ended, of how many."""
        # `remeasure` adds trials beyond the budget.
        fits = self.budget and self.budget >= self.done
        return f"{number(self.done)} of {number(self.budget)}" if fits else number(self.done)

    @cached_property
    def best(self) -> Recommendation:
        """The answer."""
        return recommend(self.trials, self.about)

    @cached_property
    def ok(self) -> list[StoredTrial]:
        """The trials that have a reward."""
        return [trial for trial in self.trials if trial.objectives]

    def whole(self, numbers: Iterable[int]) -> list[Trial]:
        """These trials with everything that the ledger has of them."""
        with Ledger.read(self.folder / "ledger.db") as ledger:
            return [trial for number in numbers if (trial := ledger.trial(number)) is not None]

    @property
    def count(self) -> int:
        """How many trials were started."""
        return len(self.trials)

    @property
    def succeeded(self) -> int:
        """How many trials have a reward."""
        return len(self.ok)

    @cached_property
    def outcomes(self) -> Counter[str]:
        """How many trials ended in each way; those in flight count as `running`."""
        return Counter(str(trial.outcome or "running") for trial in self.trials)

    @property
    def unfinished(self) -> int:
        """How many trials are in flight or were aborted."""
        return self.outcomes["running"] + self.outcomes[Outcome.ABORTED]

    @property
    def done(self) -> int:
        """How many trials have ended."""
        return self.count - self.unfinished

    @property
    def cached(self) -> int:
        """How many trials were answered from the cache."""
        return sum(trial.cached_from is not None for trial in self.trials)

    @property
    def repeats(self) -> int:
        """How often each configuration is measured."""
        repeats = self.about.get("repeats")
        return repeats if isinstance(repeats, int) else 1

    @property
    def budget(self) -> int | None:
        """How many trials the run may use."""
        budget = self.about.get("budget")
        return budget if isinstance(budget, int) else None

    @property
    def complete(self) -> bool:
        """Whether the run is finished, or has used its budget as far as repeats allow."""
        if self.unfinished or self.failure or not self.count:
            return False
        return self.finished or self.budget is None or self.count + self.repeats > self.budget

    @property
    def labels(self) -> tuple[str, ...]:
        """A name for each objective."""
        return tuple(objective.name for objective in self.objectives)

    @cached_property
    def objectives(self) -> tuple[Objective, ...]:
        """The objectives, as their user measures them."""
        width = max((len(trial.objectives) for trial in self.ok), default=1)
        objectives = self.about.get("objectives")
        names = [str(label) for label in objectives] if isinstance(objectives, list) else []
        names += ["reward", *(f"objective {n}" for n in range(2, width + 1))][len(names) :]
        return tuple(Objective.of(name) for name in names[:width])

    @cached_property
    def regimes(self) -> list[Regime]:
        """The regimes that were met, in the order of their values."""
        regimes = {trial.regime_key: trial.regime for trial in self.trials if trial.regime}
        return sorted(regimes.values(), key=self.order)

    def order(self, regime: Regime) -> list[tuple[Any, ...]]:
        """Sorts regimes as the scenario lists their values, and otherwise numbers as numbers."""
        lists = self.table("parameters")
        return [_rank(value, lists.get(name)) for name, value in sorted(regime.items())]

    @cached_property
    def varied(self) -> dict[str, bool]:
        """The parameters of the ok trials, and whether they were varied."""
        varied: dict[str, bool] = {}
        first = self.ok[0].action if self.ok else {}
        for trial in self.ok:
            action = trial.action
            if action.keys() != first.keys():
                varied |= {name: varied.get(name, False) for name in action}
                varied |= dict.fromkeys(action.keys() ^ first.keys(), True)
            for name, value in action.items():
                if not varied.get(name):
                    varied[name] = value != first.get(name)
        return varied

    @property
    def by_regime(self) -> bool:
        """Whether the answer is an action for each regime."""
        return bool(self.about.get("conditions_on_regime")) and len(self.best.by_regime) > 1

    @property
    def wall_s(self) -> float | None:
        """From the first trial's start to the last one's end."""
        first, last = self.span
        return None if first is None or last is None else max(0.0, last - first)

    @property
    def started_at(self) -> float:
        """When the run began; runs are shown in this order."""
        started = self.provenance.get("started_at")
        if isinstance(started, (int, float)):
            return float(started)
        return float("inf") if self.span[0] is None else self.span[0]

    def baseline(self, candidate: Candidate) -> Candidate | None:
        """The pinned or first configuration, if it was measured under the candidate's regimes.

        A random first trial is not a baseline: nobody knows it.
        """
        if candidate.confirmed or not self.ok:
            return self.best.baseline
        agent = self.table("agent")
        if agent and not agent.get("start") and agent.get("type") != "grid":
            return None
        action = self.ok[0].action_key
        front = recommend((trial for trial in self.trials if trial.action_key == action), self.about).front
        regimes = {key_of(regime) for regime in candidate.regimes}
        return front[0] if front and {key_of(regime) for regime in front[0].regimes} == regimes else None

    def failures(self) -> list[FailureGroup]:
        """The bad outcomes, the most common first."""
        return grouped_failures(
            (trial.number, trial.outcome, trial.fault or "unknown", trial.reason)
            for trial in self.trials
            if trial.outcome not in (None, Outcome.OK, Outcome.STOPPED)
        )


def read_search(ledger: Ledger, history: list[StoredTrial] | None = None) -> Digest:
    """The digest of a search, or of an RL agent that was trained on batch trials.

    `history` holds the first trials, if they were read before; the others are added to it.
    """
    trials, trouble = _readable(ledger, [] if history is None else history)
    try:
        evaluations = Evaluations.read(ledger)
    except LoopwrightError:  # a damaged ledger
        evaluations = Evaluations()
    return Digest(
        **basics(ledger),
        trials=trials,
        trouble=trouble,
        policy=comparison(lambda name: _state(ledger, name)),
        evaluations=evaluations,
        span=span_of(ledger),
    )


def span_of(ledger: Ledger) -> tuple[float | None, float | None]:
    """When the first trial started, and when the last one ended, as far as the ledger can be read."""
    query = "SELECT (SELECT reserved_at FROM trials ORDER BY number LIMIT 1), (SELECT max(finished_at) FROM trials)"
    try:
        first, last = ledger.transaction.rows(query)[0]
    except LoopwrightError:
        return None, None
    return first, last


def basics(ledger: Ledger) -> dict[str, Any]:
    """The fields that every digest has."""
    states = {name: _state(ledger, name) for name in ("run", "provenance", "failure", "finished")}
    return {
        "folder": ledger.path.parent,
        "about": states["run"] if isinstance(states["run"], dict) else {},
        "provenance": states["provenance"] if isinstance(states["provenance"], dict) else {},
        "failure": str(states["failure"] or ""),
        "finished": bool(states["finished"]),
    }


def grouped_failures(failed: Iterable[tuple[int, str, str, str]]) -> list[FailureGroup]:
    """Failed trials (number, outcome, fault, reason) by outcome and reason, the most common first.

    Reasons that differ in numbers only are one, with the text of the first.
    """
    groups: dict[tuple[str, str], dict[str, tuple[str, list[int]]]] = defaultdict(dict)
    for trial, outcome, fault, reason in failed:
        groups[outcome, fault].setdefault(without_numbers(reason), (reason, []))[1].append(trial)
    failures = [
        FailureGroup(
            outcome,
            fault,
            tuple((reason, tuple(numbers)) for reason, numbers in sorted(reasons.values(), key=lambda r: -len(r[1]))),
        )
        for (outcome, fault), reasons in groups.items()
    ]
    return sorted(failures, key=lambda failure: -failure.count)


def _rank(value: Any, candidates: Any) -> tuple[int, bool, float, str]:
    place = candidates.index(value) if isinstance(candidates, list) and value in candidates else -1
    return place, isinstance(value, str), value if isinstance(value, (int, float)) else 0.0, str(value)


def _readable(ledger: Ledger, trials: list[StoredTrial]) -> tuple[list[StoredTrial], str]:
    try:
        for trial in stored_trials(ledger, after=trials[-1].number if trials else 0):
            trials.append(trial)  # noqa: PERF402  what was read before the damage is kept
    except (LoopwrightError, ValueError, KeyError, TypeError) as error:
        return trials, f"Only {len(trials)} trials could be read: {error}"
    return trials, ""


def _state(ledger: Ledger, name: str) -> Any:
    try:
        return ledger.state(name)
    except (LoopwrightError, ValueError):
        return None
