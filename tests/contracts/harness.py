"""What the contract tests share: tiny environments and agents in process, and whole campaigns from TOML."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from loopwright.core.agent import Agent, AgentConfig
from loopwright.core.outcome import Outcome
from loopwright.core.reward import Identity, Objectives, RewardFunction
from loopwright.core.trial import Action, Feedback, Observation, Result, Trial
from loopwright.ledger.env import Env, Penalties, Terms
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.observer import Observer, Observers
from loopwright.ledger.run import Run
from loopwright.scenario.dispatch import dispatch
from loopwright.scenario.load import load
from loopwright.scenario.output import reopen


class FunctionEnv(Env):
    """Measures by calling a function of the action; a result, metrics or an exception to be raised comes back."""

    metric_names = ("y",)

    def __init__(self, run: Run, function: Callable[[Action], Any], *observers: Observer, **terms: Any) -> None:
        rewards: tuple[RewardFunction, ...] = terms.pop("rewards", (Identity(metrics=("y",)),))
        super().__init__(run, Terms(Objectives(rewards), **terms), Observers(observers))
        self.function = function
        self.measured: list[int] = []

    async def measure(self, trial: Trial) -> Result:
        self.measured.append(trial.number)
        value = self.function(trial.action)
        return value if isinstance(value, Result) else Result(Outcome.OK, {"y": value})


class ListedAgent(Agent):
    """Proposes the actions of a list and keeps the feedback."""

    def __init__(self, env: Env, actions: list[Action], *, parallel: int = 1) -> None:
        super().__init__(env, AgentConfig(type="listed"), parallel=parallel)
        self.actions, self.seen, self.told = list(actions), list[Observation](), list[Feedback]()

    def select_action(self, observation: Observation) -> Action | None:
        self.seen.append(observation)
        return self.actions.pop(0) if self.actions else None

    def update_policy(self, feedback: Feedback) -> None:
        self.told.append(feedback)


def new_run(directory: Path, name: str = "run") -> Run:
    (directory / name).mkdir(parents=True, exist_ok=True)
    return Run(name, directory / name, Ledger.create(directory / name / "ledger.db"))


def penalties(metric: float | None = None, constraint: float | None = None) -> Penalties:
    return Penalties(metric, constraint)


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
