"""Warm start: the trials of an earlier run that fit this one."""

from collections.abc import Iterator

from loopwright.core.errors import InvalidAction
from loopwright.core.outcome import Outcome
from loopwright.core.trial import Action, Regime
from loopwright.envs.search import SearchEnv
from loopwright.ledger.ledger import Ledger


def warm_trials(env: SearchEnv, folder: str) -> Iterator[tuple[Action, Regime, tuple[float, ...]]]:
    """Actions that are valid here, each with its regime and its reward under this run's reward function."""
    with Ledger.read(env.workload.site.scenario_dir / folder / "ledger.db") as ledger:
        # The other run may have continued since: after a resume this one must learn from the same trials as before.
        until = env.book.ledger.state("warm_until")
        if until is None:
            until = ledger.last()[0]
            env.book.ledger.set_state("warm_until", until)
        for trial in ledger.trials():
            if trial.number > until:
                break
            if trial.outcome is not Outcome.OK or trial.cached_from is not None:
                continue
            try:
                action = env.space.validate(trial.action)
                reward = env.objectives.score(trial.metrics)
            except (InvalidAction, ArithmeticError, ValueError, KeyError, TypeError):
                continue
            if reward is not None:
                yield action, trial.regime, reward.objectives
