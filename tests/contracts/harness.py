"""Shared by the contract tests: tiny in-process environments and agents, and whole campaigns from TOML."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from loopwright.agents.search.base import Env, SearchAgent
from loopwright.core.agent import AgentConfig
from loopwright.core.outcome import Outcome
from loopwright.core.trial import (
    Action,
    Feedback,
    Identity,
    Objectives,
    Observation,
    Penalties,
    Regime,
    Result,
    RewardFunction,
    Trial,
)
from loopwright.envs.search import SearchEnv, TrialRules
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.trial_book import Observer, TrialBook
from loopwright.scenario.dispatch import dispatch, reopen
from loopwright.scenario.load import load
from loopwright.spaces.space import Draws
from loopwright.workloads.base import Job, Workload


class AnySpace:
    """A space that contains every action."""

    size = None
    constraints = ()

    def validate(self, action: Action) -> Action:
        return action

    def arguments(self, action: Action, regime: Regime) -> Mapping[str, Any]:
        return {**action, **regime}


class Function(Workload):
    """Calls a function of the arguments, which returns the metric `y` or a Result."""

    def __init__(self, function: Callable[[Action], Any]) -> None:
        self.function, self.measured = function, list[int]()

    async def run(self, job: Job) -> Result:
        self.measured.append(job.trial)
        value = self.function(job.arguments)
        return value if isinstance(value, Result) else Result(Outcome.OK, {"y": value})


class FunctionEnv(SearchEnv):
    """A search environment over a function."""

    workload: Function

    def __init__(
        self,
        directory: Path,
        function: Callable[[Action], Any],
        *observers: Observer,
        space: Any = None,
        draws: Any = None,
        rewards: tuple[RewardFunction, ...] = (Identity(metrics=("y",)),),
        budget: int | None = None,
        count_cached: bool = True,
        **rules: Any,
    ) -> None:
        directory = directory / "run"
        directory.mkdir(parents=True, exist_ok=True)
        ledger = Ledger.create(directory / "ledger.db")
        super().__init__(
            TrialBook("run", directory, ledger, budget=budget, count_cached=count_cached, observers=observers),
            space=space or AnySpace(),
            workload=Function(function),
            draws=draws or Draws(0, {}, {}),
            objectives=Objectives(rewards),
            metric_names=("y",),
            rules=TrialRules(**rules),
        )


class ListedAgent(SearchAgent):
    """Proposes the actions of a list and records the feedback."""

    def __init__(self, env: Env, actions: list[Action], *, parallel: int = 1) -> None:
        super().__init__(env, AgentConfig(type="listed"), parallel=parallel)
        self.actions, self.seen, self.feedback = list(actions), list[Observation](), list[Feedback]()

    def select_action(self, observation: Observation) -> Action | None:
        self.seen.append(observation)
        return self.actions.pop(0) if self.actions else None

    def update_policy(self, feedback: Feedback) -> None:
        self.feedback.append(feedback)


def penalties(metric: float | None = None, constraint: float | None = None) -> Penalties:
    return Penalties(metric_failure=metric, constraint_failure=constraint)


def campaign(directory: Path, text: str, output: str = "out") -> int:
    """Run a scenario given as text, the way the command line does."""
    (directory / "scenario.toml").write_text(text)
    return dispatch(load(directory / "scenario.toml"), directory / output)


def resumed(directory: Path, output: str = "out") -> int:
    return dispatch(reopen(directory / output), directory / output, resume=True)


def trials(directory: Path, run: str = "r", output: str = "out") -> list[Trial]:
    with Ledger.read(directory / output / run / "ledger.db") as ledger:
        return list(ledger.trials())


def scenario(agent: str, command: str, args: Mapping[str, str], *more: str, parallel: int = 1) -> str:
    """A one-run scenario over a shell-free command that prints `y=NUMBER`."""
    written = "\n".join(f"{name} = {value}" for name, value in args.items())
    return f"""
name = "test"
[system]
parallel = {parallel}
[[run]]
name = "r"
agent = {agent}
reward = {{ type = "identity", metrics = ["y"] }}
{chr(10).join(line for line in more if not line.startswith(("[", "workload.")))}
[run.workload]
type = "command"
command = '''{command}'''
metrics = {{ y = {{ regex = 'y=([-0-9.]+)' }} }}
{chr(10).join(line.removeprefix("workload.") for line in more if line.startswith("workload."))}
[run.workload.args]
{written}
{chr(10).join(line for line in more if line.startswith("["))}
"""
