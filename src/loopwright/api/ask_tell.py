"""Ask and tell: a search whose trials the caller measures, with the usual cache, constraints and ledger."""

import asyncio
import threading
from collections import deque
from collections.abc import Coroutine, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from loopwright.agents.search.base import SearchAgent
from loopwright.api.resume import check_same_study
from loopwright.core.errors import LoopwrightError, Problem, ScenarioError
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.trial import Result
from loopwright.envs.search import SearchEnv
from loopwright.reports.page import write_all
from loopwright.scenario.dispatch import begin, build, hold
from loopwright.scenario.load import load
from loopwright.scenario.make import select_run
from loopwright.workloads.base import Job
from loopwright.workloads.in_process import ExternalWorkload, result_of

T = TypeVar("T")


class AskTellError(LoopwrightError, ValueError):
    """A trial was told that is not pending, or a study was used outside its `with` block."""


@dataclass(frozen=True)
class PendingTrial:
    """A trial that waits to be measured."""

    number: int
    params: Mapping[str, Any]
    """Every argument: what the agent chose, what the environment drew, and the fixed ones."""
    directory: Path
    """Where the trial may write files. It is not created unless you do."""


class AskTell:
    """Drives a search agent from the outside. Its event loop runs in a thread, so notebooks can use it."""

    def __init__(
        self, scenario: str | Path | Mapping[str, Any], output: Path, run: str | None, overrides: Mapping[str, Any]
    ) -> None:
        self._loaded = load(scenario, set=overrides)
        config = select_run(self._loaded, run)
        # Measuring by hand takes effort, so confirmation is off unless the scenario asks for it.
        without = {"confirm": False, "confirmation": None}
        self._config = config.model_copy(update=without) if config.confirm is None else config
        if self._config.kind != "search" or not issubclass(self._config.agent_class or object, SearchAgent):
            problem = Problem("[run.agent] type", "ask and tell need a search agent over a workload, such as tpe.")
            raise ScenarioError(self._loaded.label, [problem])
        self._output = output
        self._ready: deque[PendingTrial] = deque()
        self._pending: dict[int, asyncio.Future[Result]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_complete = False
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def name(self) -> str:
        """The name of the run."""
        return self._config.name

    def start(self) -> None:
        """Open the ledger and continue from what it contains."""
        with ExitStack() as undo:
            undo.enter_context(hold(self._output))
            if (self._output / "campaign.json").exists():
                check_same_study(self._loaded, self._output)
            else:
                begin(self._loaded, self._output)
            built = build(self._loaded, self._config, self._output)
            undo.enter_context(built.resources)
            assert isinstance(built.env, SearchEnv) and isinstance(built.agent, SearchAgent)  # noqa: S101, PT018
            self._env, self._agent = built.env, built.agent
            self._env.workload = ExternalWorkload(self._env.workload.config, self._env.workload.site, self._measure)
            self._agent.restore(self._env.history())
            self._unfinished = self._env.unfinished()
            self._loop = asyncio.new_event_loop()
            thread = threading.Thread(target=self._loop.run_forever, name="loopwright-study", daemon=True)
            thread.start()
            undo.callback(self._loop.close)
            undo.callback(thread.join)
            undo.callback(self._loop.call_soon_threadsafe, self._loop.stop)
            self._open = undo.pop_all()

    def ask(self) -> PendingTrial | None:
        """The next trial to measure; None if there is nothing to hand out."""
        return self._run(self._ask())

    def tell(self, trial: PendingTrial, metrics: Mapping[str, float] | float) -> None:
        """Record the metrics of a pending trial."""
        self._run(self._settle(trial, result_of(dict(metrics) if isinstance(metrics, Mapping) else metrics)))

    def fail(self, trial: PendingTrial, reason: str) -> None:
        """Record that a pending trial failed."""
        self._run(self._settle(trial, Result(Outcome.CRASHED, reason=reason, fault=Fault.WORKLOAD)))

    def close(self) -> int:
        """Abort what is pending, write the reports, and return an exit code: 0 if a trial succeeded."""
        ledger = self._env.book.ledger
        try:
            self._run(self._abort())
            ledger.set_state("finished", self._is_complete)
            code = 0 if ledger.counts().get(Outcome.OK) else 1
        finally:
            self._open.close()
            self._loop = None
        return code | write_all(self._output)

    # -- inside the event loop ----------------------------------------------------------------------------------

    async def _ask(self) -> PendingTrial | None:
        while not self._ready:
            trial = self._agent.next_trial(self._unfinished, len(self._tasks))
            if trial is None:
                self._is_complete = not self._pending
                return None
            self._tasks.add(asyncio.ensure_future(self._learn(trial)))
            # Until it needs a measurement, a trial never suspends, except to wait for an equal one that is pending.
            await asyncio.sleep(0)
            self._raise_errors()
        return self._ready.popleft()

    async def _learn(self, trial: Any) -> None:
        feedback = await trial
        if not feedback.phase:  # a trial that the agent proposed
            self._agent.update_policy(feedback)

    async def _measure(self, job: Job) -> Result:
        job.flush_reservation()
        self._pending[job.trial] = asyncio.get_running_loop().create_future()
        self._ready.append(PendingTrial(job.trial, job.arguments, job.directory))
        try:
            return await self._pending[job.trial]
        finally:
            del self._pending[job.trial]

    async def _settle(self, trial: PendingTrial, result: Result) -> None:
        if not isinstance(trial, PendingTrial):
            raise AskTellError(f"pass the trial that `ask` returned, not {trial!r}")
        future = self._pending.get(trial.number)
        if future is None or future.done():
            raise AskTellError(f"trial {trial.number} is not pending: it was already told, or never asked for")
        future.set_result(result)
        # Two turns of the event loop: the trial wakes up, then commits and learns without suspending again.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self._env.book.ledger.flush()
        self._raise_errors()

    async def _abort(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._env.book.ledger.flush()

    def _raise_errors(self) -> None:
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.remove(task)
            task.result()

    # -- from the caller's thread -------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            work.close()
            raise AskTellError("the study is not open: use `with loopwright.Study.open(...) as study:`")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
