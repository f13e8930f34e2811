"""`loopwright.make`: a run of a scenario as a `gymnasium.Env`, for an algorithm of one's own."""

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopwright.core.errors import MissingExtra, Problem, ScenarioError
from loopwright.envs.live import LiveEnv
from loopwright.scenario.build import AnyEnv, build_env
from loopwright.scenario.load import load
from loopwright.scenario.output import begin

if TYPE_CHECKING:
    import gymnasium


def make(file: str | Path, run: str | None = None, output: str | Path | None = None, *, view: str = "flat") -> Any:
    """The environment of a run; `info["trial"]` is the trial number. The caller's algorithm decides when to stop.

    Without `output` the record is kept in a temporary directory until the environment is closed. `view` is "flat" (no
    nesting: what most algorithms take), "dict" (named parts) or "discrete" (one number per point); a live run has the
    spaces of its server.

        env = loopwright.make("study.toml", run="tcp-policy")
        PPO("MultiInputPolicy", env).learn(2000)
    """
    try:
        import gymnasium  # noqa: F401
    except ImportError as error:
        raise MissingExtra("loopwright.make", "rl") from error
    loaded = load(Path(file))
    config = next((one for one in loaded.scenario.run if run in (None, one.name)), None)
    if config is None or config.agent is None:
        names = ", ".join(one.name for one in loaded.scenario.run if one.agent is not None)
        raise ScenarioError(
            file, [Problem("[[run]]", f"there is no run {run!r} with an agent. Runs: {names or 'none'}.")]
        )
    directory = Path(output) if output is not None else Path(tempfile.mkdtemp(prefix="loopwright-"))
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / "campaign.json").exists():
        begin(loaded, directory)
    free = config.agent.model_copy(update={"trials": None})
    env = build_env(loaded, config, directory, free)
    adapter = _adapted(env, view)
    return _with_cleanup(adapter, env, directory if output is None else None)


def _adapted(env: AnyEnv, view: str) -> "gymnasium.Env[Any, Any]":
    from loopwright.envs.adapter import GymnasiumAdapter, LiveAdapter

    return LiveAdapter(env) if isinstance(env, LiveEnv) else GymnasiumAdapter(env, view=view)  # type: ignore[arg-type]


def _with_cleanup(adapter: Any, env: AnyEnv, temporary: Path | None) -> Any:
    close = adapter.close

    def closing() -> None:
        close()
        env.run.ledger.close()
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)

    adapter.close = closing
    return adapter
