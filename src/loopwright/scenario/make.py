"""`loopwright.make`: a run of a scenario as a `gymnasium.Env`, for an algorithm of one's own."""

import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from loopwright.agents import agents
from loopwright.core.errors import MissingExtra, Problem, ScenarioError
from loopwright.envs.live.env import LiveEnv
from loopwright.envs.live.server import GymServer
from loopwright.envs.search import TrialEnv
from loopwright.scenario.build import AnyEnv, build_env, describe, shared_cache
from loopwright.scenario.load import Loaded, load
from loopwright.scenario.output import begin, hold
from loopwright.scenario.schema import RunConfig

_VIEWS = ("flat", "dict", "discrete")


def make(
    file: str | Path,
    run: str | None = None,
    output: str | Path | None = None,
    *,
    view: str = "flat",
    num_envs: int | None = None,
    server: GymServer | None = None,
) -> Any:
    """The environment of a run; `info["trial"]` is the trial number. The caller's algorithm decides when to stop.

    Without `output` the record is kept in a temporary directory until the environment is closed. `view` is "flat" (no
    nesting: what most algorithms take), "dict" (named parts) or "discrete" (one number per point); a live run has the
    spaces of its server, and the drawn regime beside its observations. With `num_envs` it is a
    `gymnasium.vector.VectorEnv` with that many trials in flight.
    `server` is stepped by a live run instead of the one that the scenario names: an object of your own.

        env = loopwright.make("study.toml", run="tcp-policy")
        PPO("MultiInputPolicy", env).learn(2000)
    """
    try:
        import gymnasium  # noqa: F401
    except ImportError as error:
        raise MissingExtra("loopwright.make", "rl") from error
    if view not in _VIEWS:
        raise ValueError(f"there is no view {view!r}; known: {', '.join(_VIEWS)}")
    loaded = load(Path(file))
    config = chosen_run(loaded, run)
    if config.rollout is not None:
        raise ValueError(f"run {config.name!r} makes rollouts, which have no gymnasium spaces; `loopwright run` it")
    if num_envs is not None:
        if config.live is not None:
            raise ValueError("a live run has one server: make one environment per server, without num_envs")
        system = loaded.scenario.system.model_copy(update={"parallel": num_envs})
        loaded = replace(loaded, scenario=loaded.scenario.model_copy(update={"system": system}))
    with ExitStack() as undo:
        adapter = _adapted(environment(loaded, config, output, undo, server), view, num_envs)
        kept = undo.pop_all()
    close = adapter.close

    def closing() -> None:
        # What was taken last is let go of first, once, however often this is called.
        close()
        kept.close()

    adapter.close = closing
    if num_envs is None:
        from loopwright.envs.gym.adapter import spec_of

        adapter.spec = spec_of(file=str(loaded.path), run=config.name, view=view)
    return adapter


def chosen_run(loaded: Loaded, run: str | None) -> RunConfig:
    """The run of this name, or the first that has an agent."""
    able = [one for one in loaded.scenario.run if one.agent is not None]
    found = next((one for one in able if run in (None, one.name)), None)
    if found is None:
        names = ", ".join(one.name for one in able)
        raise ScenarioError(
            loaded.path, [Problem("[[run]]", f"there is no run {run!r} with an agent. Runs: {names or 'none'}.")]
        )
    return found


def environment(
    loaded: Loaded, config: RunConfig, output: str | Path | None, undo: ExitStack, server: GymServer | None = None
) -> AnyEnv:
    """The environment of a run whose agent is somebody else's; `undo` lets go of all that it holds."""
    assert config.agent is not None  # noqa: S101  chosen_run sees to it
    if output is None:
        directory = Path(tempfile.mkdtemp(prefix="loopwright-"))
        undo.callback(shutil.rmtree, directory, ignore_errors=True)
    else:
        directory = Path(output)
    undo.enter_context(hold(directory))
    if not (directory / "campaign.json").exists():
        begin(loaded, directory)
    free = config.agent.model_copy(update={"trials": None})
    shared = shared_cache(loaded, config, directory)
    if shared is not None:
        undo.callback(shared.close)
    env = build_env(loaded, config, directory, free, shared, server=server)
    undo.callback(env.run.ledger.close)
    describe(loaded, config, env, agents.get(free.type), free)
    return env


def _adapted(env: AnyEnv, view: Any, num_envs: int | None) -> Any:
    from loopwright.envs.gym.adapter import GymnasiumAdapter, LiveAdapter, VectorAdapter

    if isinstance(env, LiveEnv):
        return LiveAdapter(env, view=view)
    if not isinstance(env, TrialEnv):
        raise TypeError(f"a {type(env).__name__} is no environment for gymnasium")
    return GymnasiumAdapter(env, view=view) if num_envs is None else VectorAdapter(env, num_envs, view=view)
