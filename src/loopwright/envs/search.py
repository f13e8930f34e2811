"""The trial environment: an action over a workload's parameters in, its metrics out."""

import time
from typing import Any

import orjson

from loopwright.core.trial import Action, Regime, Result, Trial
from loopwright.ledger.env import Env, Terms
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.observer import Observers
from loopwright.ledger.run import Run
from loopwright.ledger.shared_cache import SharedCache
from loopwright.spaces.draws import Draws
from loopwright.spaces.space import Space
from loopwright.workloads.base import Job, Workload


class TrialEnv(Env):
    """Runs a workload once per trial. What is drawn overlays the arguments, and is not checked again."""

    def __init__(
        self,
        run: Run,
        terms: Terms,
        observers: Observers,
        shared: SharedCache | None = None,
        *,
        space: Space,
        workload: Workload,
        draws: Draws,
        metric_names: tuple[str, ...],
    ) -> None:
        super().__init__(run, terms, observers, shared)
        self.space, self.workload, self.draws, self.metric_names = space, workload, draws, metric_names
        self._marker = run.ledger.state("id")
        self._opened_at = time.time()

    @property
    def cardinality(self) -> int | None:
        size = self.space.size
        for choice in self.draws.values.values():
            size = None if size is None else size * choice.size
        return size

    def validate(self, action: Action) -> Action:
        return self.space.validate(action)

    def question(self, action: Action) -> Any:
        return self.space.arguments(action, {})

    def infeasible(self, action: Action, regime: Regime) -> str | None:
        return self.space.violated(action, regime)

    def sample(self, draw: int) -> Regime:
        return self.draws.sample(draw)

    async def measure(self, trial: Trial) -> Result:
        arguments = self.space.arguments(trial.action, trial.regime)
        record: dict[str, Any] = {"trial": trial.number, "arguments": arguments, "action": trial.action}
        if trial.regime:
            record["env_params"] = trial.regime
        job = Job(
            trial=trial.number,
            directory=self.run.trial_directory(trial.number),
            arguments=arguments,
            parameters_json=orjson.dumps(record, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE),
            marker=f"{self._marker}.{trial.number}",
            on_start=_Attempt(self.run.ledger, trial.number).started,
            flush_reservation=self.run.ledger.flush,
            is_retry=trial.reserved_at < self._opened_at,
        )
        return await self.workload.run(job)

    def open(self) -> None:
        self.workload.open()

    async def close(self) -> None:
        await self.workload.close()

    def kill(self) -> None:
        self.workload.kill()


class _Attempt:
    """One try at a trial, which may take several processes, one after another."""

    def __init__(self, ledger: Ledger, number: int) -> None:
        self._ledger, self._number, self._attempt = ledger, number, 0

    def started(self, pid: int, start_ticks: int) -> None:
        if self._attempt:
            self._ledger.running(self._number, self._attempt, pid, start_ticks)
        else:
            self._attempt = self._ledger.attempt(self._number, pid, start_ticks)
