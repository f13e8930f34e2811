"""`loopwright.make`: a run of a scenario as a `gymnasium.Env`, for your own algorithm."""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from loopwright.core.errors import MissingExtra, Problem, ScenarioError
from loopwright.envs.live.server import GymServer
from loopwright.scenario.dispatch import begin, hold
from loopwright.scenario.kinds.base import AnyEnv, BuildContext, LoadedScenario, RunKind
from loopwright.scenario.load import load

_VIEWS = ("flat", "dict", "discrete")


def make(
    scenario: str | Path | Mapping[str, Any],
    run: str | None = None,
    output: str | Path | None = None,
    *,
    view: Any = "flat",
    num_envs: int | None = None,
    server: GymServer | None = None,
    env: Callable[..., Any] | None = None,
) -> Any:
    """The environment of a run; `info["trial"]` is the trial number. The caller's algorithm decides when to stop.

    Without `output`, the ledger is in a temporary directory that is deleted when the environment is closed.
    `view` is "flat" (no nesting, as most algorithms expect), "dict" (named parts) or "discrete" (the index of a grid
    point). A live run has the spaces of its server, plus the drawn regime in its observations.
    With `num_envs`, the result is a `gymnasium.vector.VectorEnv`: `num_envs` trials in flight, or as many servers.
    `server` replaces the server that a live run names in the scenario, `env` the class that `[run] env` names.

        env = loopwright.make("study.toml", run="tcp-policy")
        PPO("MultiInputPolicy", env).learn(2000)
    """
    try:
        from loopwright.envs.gym.adapter import GymnasiumAdapter, LiveAdapter, env_spec
        from loopwright.envs.gym.vector import LiveVectorAdapter, VectorAdapter
    except ImportError as error:
        raise MissingExtra("loopwright.make", "rl") from error
    if view not in _VIEWS:
        raise ValueError(f"unknown view {view!r}; use one of {', '.join(_VIEWS)}")
    if env is not None and not callable(env):
        raise TypeError(f'env must be a class, not {env!r}; a scenario names one as env = "module:Class"')
    loaded = load(scenario, has_server=server is not None)
    config = select_run(loaded, run)
    if config.kind not in ("search", "live"):
        raise ValueError(f"run {config.name!r} collects rollouts, which have no gymnasium spaces; use `loopwright run`")
    if num_envs is not None and config.kind == "live":
        assert config.live is not None  # noqa: S101  the kind says so
        config = config.model_copy(update={"live": config.live.model_copy(update={"envs": num_envs})})
    elif num_envs is not None:
        system = loaded.scenario.system.model_copy(update={"parallel": num_envs})
        loaded = replace(loaded, scenario=loaded.scenario.model_copy(update={"system": system}))
    with ExitStack() as undo:
        inner: Any = environment(loaded, config, output, undo, server, env)
        adapter: Any
        if config.kind == "live":
            adapter = LiveAdapter(inner, view=view) if num_envs is None else LiveVectorAdapter(inner, view=view)
        elif num_envs is None:
            adapter = GymnasiumAdapter(inner, view=view)
        else:
            adapter = VectorAdapter(inner, num_envs, view=view)
        resources = undo.pop_all()
    close_adapter = adapter.close

    def close() -> None:
        close_adapter()
        resources.close()

    adapter.close = close
    if num_envs is None and loaded.path is not None:
        adapter.spec = env_spec(scenario=str(loaded.path), run=config.name, view=view)
    return adapter


def select_run(loaded: LoadedScenario, name: str | None) -> RunKind:
    """The run of this name, or the first that has an agent."""
    runs = [run for run in loaded.runs if run.agent is not None]
    for run in runs:
        if name in (None, run.name):
            return run
    names = ", ".join(run.name for run in runs) or "none"
    raise ScenarioError(loaded.label, [Problem("[[run]]", f"there is no run {name!r} with an agent. Runs: {names}.")])


def environment(
    loaded: LoadedScenario,
    config: RunKind,
    output: str | Path | None,
    undo: ExitStack,
    server: GymServer | None = None,
    env: Callable[..., Any] | None = None,
) -> AnyEnv:
    """The environment of a run whose actions the caller chooses. `undo` releases everything that it holds."""
    assert config.agent is not None  # noqa: S101  guaranteed by select_run
    if output is None:
        directory = Path(tempfile.mkdtemp(prefix="loopwright-"))
        undo.callback(shutil.rmtree, directory, ignore_errors=True)
    else:
        directory = Path(output)
    undo.enter_context(hold(directory))
    if not (directory / "campaign.json").exists():
        begin(loaded, directory)
    free = config.agent.model_copy(update={"trials": None})
    return config.build_env(BuildContext(loaded, directory, free, undo, server=server, env=env))
