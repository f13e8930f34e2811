"""Replay: a recorded search as an environment, so that other agents can be tried on it without running anything.

A point that was measured is answered from the record, any other by a model of it; each trial says which.
"""

import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from math import fsum
from pathlib import Path
from typing import Any, Self

from loopwright.core.errors import InvalidAction, LedgerError
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.trial import Action, Identity, Objectives, Regime, Result, Trial, key_of
from loopwright.envs.failures import FAILED
from loopwright.envs.neighbour_model import NeighbourModel
from loopwright.envs.search import SearchEnv
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.outputs import search_ledger
from loopwright.ledger.trial_book import TrialBook
from loopwright.spaces.parameter import Parameter, parameters
from loopwright.spaces.space import Draws, EnvParamConfig, Space
from loopwright.workloads.base import Job, Site
from loopwright.workloads.in_process import ExternalConfig, ExternalWorkload

ESTIMATED = "estimated by a model of the recorded trials"
"""The reason of every trial that was not measured."""


class Recording:
    """The measurements of a search, read at one moment; the campaign may still be running."""

    def __init__(self, about: Mapping[str, Any], trials: Sequence[Trial], source: Path) -> None:
        self.about, self.source = about, source
        self.labels: tuple[str, ...] = tuple(about.get("objectives") or ())
        table: dict[str, Parameter] = dict(parameters(about["parameters"]))
        self.env_params = {name: EnvParamConfig(**config) for name, config in (about.get("env_params") or {}).items()}
        self.space = Space(table, tuple(about.get("constraints") or ()), frozenset(self.env_params))
        self.proposals = len({trial.group for trial in trials if not trial.phase})
        self._answers: dict[str, list[Result]] = defaultdict(list)
        self.points: dict[str, tuple[Action, Regime]] = {}
        """Each measured point, by the key of its arguments."""
        for trial in trials:
            if (answer := self._answer_of(trial)) is None:
                continue
            try:
                action = self.space.validate(trial.action)
            except InvalidAction:
                continue  # the parameters were changed on resume
            key = key_of(self.space.arguments(action, trial.regime))
            self.points.setdefault(key, (action, trial.regime))
            self._answers[key].append(answer)
        ok = [result for answers in self._answers.values() for result in answers if result.outcome is Outcome.OK]
        if not self.labels or not ok:
            raise LedgerError(f"{source} has no trial with a reward, so there is nothing to replay.")
        common = (name for name in ok[0].metrics if all(name in result.metrics for result in ok))
        self._names = list(dict.fromkeys([*self.labels, *common]))
        """What the model predicts; it is fitted to the first."""
        self._means: dict[str, list[float] | None] = {}
        """The mean of each value over the measurements of a point; None if it ever failed."""
        for key, answers in self._answers.items():
            self._means[key] = None
            if all(answer.outcome is Outcome.OK for answer in answers):
                sums = (fsum(answer.metrics[name] for answer in answers) for name in self._names)
                self._means[key] = [value / len(answers) for value in sums]
        arguments = [self._free(self.space.arguments(*point)) for point in self.points.values()]
        self.model = NeighbourModel(table, arguments, list(self._means.values()))

    @classmethod
    def read(cls, output: str | Path, run: str | None = None) -> Self:
        """The recording of the search in an output directory."""
        path = search_ledger(Path(output), run)
        with Ledger.read(path) as ledger:
            return cls(ledger.state("run", {}), list(ledger.trials()), path.parent)

    def _answer_of(self, trial: Trial) -> Result | None:
        """What a trial measured; None if nothing, or if it is a copy."""
        if trial.cached_from is not None:
            return None
        source = f"measured in trial {trial.number} of {self.source}"
        if trial.outcome is Outcome.OK and trial.reward is not None:
            # The objectives under their own names: the functions that made them may not exist here.
            values = dict(zip(self.labels, trial.reward.objectives, strict=True))
            return Result(Outcome.OK, {**trial.metrics, **values}, source)
        if trial.outcome in FAILED:
            return Result(trial.outcome, reason=f"{source}: {trial.reason}", fault=trial.fault)
        return None

    def answer(self, arguments: Mapping[str, Any], turn: int = 0) -> Result:
        """The answer to a trial with these arguments. A point that was measured several times gives these in turn."""
        if answers := self._answers.get(key_of(arguments)):
            return answers[turn % len(answers)]
        expected = self.model.predict(self._free(arguments))
        if expected.failing > 0.5:
            share = f"{expected.failing:.0%} of its measured neighbours failed"
            return Result(Outcome.CRASHED, reason=f"{ESTIMATED}: {share}", fault=Fault.WORKLOAD)
        return Result(Outcome.OK, dict(zip(self._names, expected.values, strict=True)), ESTIMATED)

    def value(self, action: Action, regime: Regime) -> float | None:
        """The mean of the first objective at a point, as the replay gives it in the long run; None if it fails."""
        arguments = self.space.arguments(action, regime)
        if (key := key_of(arguments)) in self._means:
            mean = self._means[key]
            return None if mean is None else mean[0]
        return self.answer(arguments).metrics.get(self.labels[0])

    def _free(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in arguments.items() if name not in self.space.fixed}


class ReplayEnv(SearchEnv, AbstractContextManager["ReplayEnv"]):
    """A search environment over a recording. Its own ledger is in a temporary directory, deleted by `close`."""

    def __init__(self, recording: Recording, *, trials: int | None = None, seed: int = 0) -> None:
        self.recording = recording
        self.estimated = 0
        """How many trials the model answered."""
        self._turns: Counter[str] = Counter()
        self._directory = Path(tempfile.mkdtemp(prefix="loopwright-"))
        ledger = Ledger.create(self._directory / "ledger.db")
        labels = recording.labels
        super().__init__(
            TrialBook("replay", self._directory, ledger, budget=trials or recording.proposals),
            space=recording.space,
            workload=ExternalWorkload(ExternalConfig(), Site(self._directory, self._directory), self._replay),
            draws=Draws(seed, recording.space.parameters, recording.env_params),
            objectives=Objectives(tuple(Identity(metrics=(label,)) for label in labels)),
            metric_names=labels,
        )

    async def _replay(self, job: Job) -> Result:
        key = key_of(job.arguments)
        answer = self.recording.answer(job.arguments, self._turns[key])
        self._turns[key] += 1
        self.estimated += answer.reason.startswith(ESTIMATED)
        return answer

    def close(self) -> None:
        """Delete the ledger of the replay."""
        self.book.ledger.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __exit__(self, *_: object) -> None:
        self.close()


def replay(output: str | Path, run: str | None = None, *, trials: int | None = None, seed: int = 0) -> ReplayEnv:
    """A recorded search as an environment that any search agent can drive, and that runs nothing.

    Points that were measured are answered from the ledger, which may still be written; all others by a model of it,
    and such a trial has the reason "estimated by a model of the recorded trials". `trials` is the budget, by default
    as many as were proposed; `seed` draws the regimes.

        with loopwright.replay("out/") as env:
            feedback = asyncio.run(env.step({"threads": 4}))
    """
    return ReplayEnv(Recording.read(output, run), trials=trials, seed=seed)
