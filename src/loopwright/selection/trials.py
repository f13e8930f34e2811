"""Trials as selection and reports need them: a fifth of the memory of a Trial, since there may be 200,000 of them."""

from collections.abc import Iterator
from sys import intern

import orjson

from loopwright.core.outcome import Fault, Outcome
from loopwright.core.trial import Action, Phase, Regime, canonical, key_of
from loopwright.ledger.ledger import Ledger

_QUERY = (
    "SELECT number, grp, action, regime, outcome, fault, reason, reward, reward_detail, usage, cached_from, "
    "noise, phase FROM trials WHERE number > ? AND {where} ORDER BY number LIMIT 2000"
)
_OUTCOMES, _FAULTS = {str(outcome): outcome for outcome in Outcome}, {str(fault): fault for fault in Fault}
_LOST = (None, "aborted", "lost")
ONE_OBJECTIVE = '"more":[]}'
"""How the details of a reward end if there is one objective."""
_SCALARS = frozenset((int, str, bool, type(None)))


class StoredTrial:
    """What reports need of every trial. The rest of a few trials is read from the ledger when it is shown."""

    __slots__ = (
        "_action",
        "action_key",
        "cached_from",
        "counts",
        "cpu_s",
        "fault",
        "group",
        "noise",
        "number",
        "objectives",
        "outcome",
        "phase",
        "reason",
        "regime",
        "regime_key",
        "wall_s",
    )

    _action: str
    number: int
    group: int
    outcome: Outcome | None
    fault: Fault | None
    reason: str
    regime: Regime
    regime_key: str
    """Equal for trials under the same regime; empty without one."""
    action_key: str
    """Equal for equal actions of a run."""
    objectives: tuple[float, ...]
    """Empty without a reward."""
    cached_from: str | None
    counts: bool
    """Whether it measures its action: it is not a copy of another trial of this run, and not lost."""
    wall_s: float | None
    cpu_s: float
    noise: str
    """Equal for trials with the same draw of the run's noise, as JSON."""
    phase: Phase

    @property
    def action(self) -> Action:
        """What the agent chose."""
        return orjson.loads(self._action)  # type: ignore[no-any-return]

    @property
    def unfinished(self) -> bool:
        """In flight or aborted."""
        return self.outcome in (None, Outcome.ABORTED)

    @property
    def is_lost(self) -> bool:
        """Lost through no fault of its own, or not finished: it says nothing about its action."""
        return self.outcome in (None, Outcome.ABORTED, Outcome.LOST)


def stored_trials(ledger: Ledger, phase: Phase | None = None, after: int = 0) -> Iterator[StoredTrial]:
    """All trials by number, or those of one phase, or after a number.

    Raises ValueError, KeyError or TypeError at a senseless one.
    """
    regimes: dict[str, tuple[Regime, str]] = {}
    first = ledger.transaction.rows("SELECT action FROM trials ORDER BY number LIMIT 1")
    # Of the run's first trial, whatever is read: equal actions get equal keys.
    names = list(orjson.loads(first[0][0])) if first else []
    query = _QUERY.format(where="1" if phase is None else f"phase = '{phase}'")
    loads, dumps = orjson.loads, orjson.dumps
    while rows := ledger.transaction.rows(query, (after,)):
        for row in rows:
            number, group, text, regime, outcome, fault, reason, reward, detail, usage, cached_from, noise, phase = row
            trial = StoredTrial()
            trial.number, trial.group = number, number if group == number else group
            action = loads(text)
            trial._action = trial.action_key = text
            # The text is the key if equal actions of this run have the same: no need for a hash, nor for its memory.
            is_key = [*action] == names
            for value in action.values():
                if type(value) is float:
                    if value.is_integer():
                        is_key = False
                elif type(value) not in _SCALARS:
                    is_key = False
            if not is_key:
                if action.keys() == set(names):
                    trial.action_key = dumps({name: canonical(action[name]) for name in names}).decode()
                else:
                    trial.action_key = key_of(action)
            if regime not in regimes:
                values = loads(regime)
                regimes[regime] = values, key_of(values) if values else ""
            trial.regime, trial.regime_key = regimes[regime]
            trial.outcome = None if outcome is None else _OUTCOMES[outcome]
            trial.fault = None if fault is None else _FAULTS[fault]
            trial.reason, trial.cached_from = reason, cached_from
            trial.counts = outcome not in _LOST and (cached_from is None or not cached_from.isdigit())
            trial.noise, trial.phase = intern(noise or "{}"), phase or ""
            if detail is None:
                trial.objectives = ()
            else:
                trial.objectives = (reward,) if detail.endswith(ONE_OBJECTIVE) else (reward, *loads(detail)["more"])
            spent = loads(usage) if usage else {}
            wall_s, user_s, system_s = spent.get("wall_s"), spent.get("user_s"), spent.get("system_s")
            trial.wall_s = wall_s if isinstance(wall_s, (int, float)) else None
            trial.cpu_s = (user_s or 0.0) + (system_s or 0.0) if user_s or system_s else 0.0
            yield trial
        after = rows[-1][0]
