"""The configuration of a live environment, `[run.live]`, and what can be checked before the run starts.

The server is probed for its spaces and for whether it applies a regime. If its class declares its spaces, they are read
from there. Otherwise a server is created and closed in a separate process: most environments set their spaces in
`__init__`, and one created in this process would hold resources (a device, a port, GPU memory) that the run's own
server needs. It must therefore be possible to create a server twice.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from loopwright.core.config import Config
from loopwright.core.errors import LoopwrightError, Problem
from loopwright.core.outcome import Outcome
from loopwright.envs.live.address import Address, AddressError
from loopwright.envs.live.regime_server import (
    RegimeServer,
    ServerTarget,
    constructor_args,
    misspelled,
    refusal,
    unacknowledged,
)
from loopwright.envs.live.server import (
    GYMNASIUM,
    GymServer,
    ServerError,
    ServerLost,
    check_server_class,
    load_factory,
    resolve,
)
from loopwright.spaces.parameter import Choice, Fixed, Parameter, parameter

_PROBE_TIMEOUT_S = 60.0
_cache: dict[str, "ServerSpaces"] = {}
"""What probing found, by target and regime: one load asks several times."""


@dataclass(frozen=True)
class ServerSpaces:
    """A server's spaces, None where unknown, or why it cannot be created."""

    observation_space: Any = None
    action_space: Any = None
    problem: str | None = None
    unacknowledged: tuple[str, ...] = ()
    """The arguments of the regime that its reset did not acknowledge."""


class LiveConfig(Config):
    """A live environment: an object in this process, or a server at an address."""

    env_class: str | None = None
    """`module:Class` or `gymnasium:CartPole-v1`, created with those of `args` that it accepts."""
    address: str | None = None
    """Where a server listens: `unix:///run/sim.sock` or `tcp://host:port`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments: fixed ones for the constructor of `env_class` (a server at an address exists already), lists for
    [run.env_params] to draw per episode. The environment is built again if a drawn one is an argument of its
    constructor; otherwise `reset` must return it in info["env_params"]."""
    isolate: bool | None = None
    """Whether `env_class` runs in a separate process (the default), so that its crash costs the episode and not the
    run. In this process a step is faster."""
    envs: int = Field(default=1, ge=1)
    """How many environments an RL agent of Stable-Baselines3 steps together. Each of their steps is a trial."""
    wrappers: tuple[str | dict[str, Any], ...] = ()
    """Gymnasium wrappers around each environment, the first one innermost: `module:Class`, or a table with that as its
    `type` and the wrapper's arguments."""
    max_episode_steps: int | None = Field(default=None, ge=1)
    """Truncate episodes after this many steps."""
    render_mode: Literal["rgb_array"] | None = None
    """Show videos of evaluation episodes in the report: the environment that evaluates is created with this
    `render_mode`, and its `render()` returns an image. Needs `evaluate = { … }` in [run.agent]."""
    record: Literal["steps", "episodes"] = "steps"
    """Whether the ledger has a row per step or per episode. Steps are counted either way."""
    timeout_s: float = Field(default=30.0, gt=0)
    """How long a step or a reset may take before the server counts as lost. With isolate = false, native code that does
    not return cannot be interrupted."""

    @field_validator("args")
    @classmethod
    def _parameters(cls, values: dict[str, Any]) -> dict[str, Parameter]:
        return {name: parameter(value) for name, value in values.items()}

    @model_validator(mode="after")
    def _check_target(self) -> "LiveConfig":
        if self.env_class is not None and self.address is not None:
            raise ValueError("give either env_class (a class) or address (a server)")
        if any(isinstance(one, dict) and not isinstance(one.get("type"), str) for one in self.wrappers):
            raise ValueError('a wrapper is "module:Class", or a table with type = "module:Class" and its arguments')
        if self.address is not None and (self.wrappers or self.max_episode_steps is not None or self.render_mode):
            raise ValueError(
                "wrappers, max_episode_steps and render_mode are for env_class; wrap a server where it is created"
            )
        if self.address is not None and self.isolate is not None:
            raise ValueError("isolate is for env_class; a server at an address has its own process already")
        return self

    def fixed(self) -> dict[str, Any]:
        """The arguments for the constructor."""
        return {name: p.value for name, p in self.args.items() if isinstance(p, Fixed)}

    def changes(self) -> list[Any]:
        """What else changes the environment, for its fingerprint; nothing by default."""
        limit = [] if self.max_episode_steps is None else [self.max_episode_steps]
        return [*([list(self.wrappers)] if self.wrappers else []), *limit]

    def target(self, scenario_dir: Path, env_params: Collection[str], *, renders: bool = False) -> ServerTarget:
        """What the server is created from. The first one is built with the first candidate of what is drawn."""
        path = self.env_class or ""
        accepted = constructor_args(path, scenario_dir)
        regime = {name: p.values[0] for name, p in self.args.items() if name in env_params and isinstance(p, Choice)}
        regime = {name: value for name, value in regime.items() if accepted is None or name in accepted}
        wrappers = tuple({"type": one} if isinstance(one, str) else one for one in self.wrappers)
        fixed = {**self.fixed(), **({"render_mode": self.render_mode} if renders and self.render_mode else {})}
        return ServerTarget(path, fixed, regime, scenario_dir, wrappers, self.max_episode_steps)

    def problems(self, scenario_dir: Path, env_params: Collection[str]) -> list[Problem]:
        """What is wrong with this configuration, as far as that shows without starting the server."""
        problems: list[Problem] = []
        if self.address is not None:
            problems = self._address_problems()
        elif self.env_class is None:
            pass  # the server is passed in Python
        elif reason := check_server_class(self.env_class, scenario_dir):
            problems = [Problem("env_class", reason)]
        else:
            problems = self._constructor_problems(self.target(scenario_dir, env_params), env_params)
        problems += [
            Problem(f"args.{name}", "has several values; let the environment draw it: [run.env_params." + name + "].")
            for name, p in self.args.items()
            if not isinstance(p, Fixed) and name not in env_params
        ]
        if env_params and (reason := context_conflict(self.spaces(scenario_dir, env_params).observation_space)):
            problems.append(Problem("env_class", f"{reason}."))
        return problems

    def _constructor_problems(self, target: ServerTarget, env_params: Collection[str]) -> list[Problem]:
        signature = constructor_args(target.path, target.directory)
        accepted = signature or []
        problems = [
            Problem(f"args.{name}", reason)
            for name in target.args
            if accepted and name not in accepted and (reason := misspelled(name, accepted))
        ]
        if self.render_mode and signature is not None and "render_mode" not in signature:
            reason = (
                f"the constructor of {target.path} takes no such argument; accept it, and return images in render()."
            )
            problems.append(Problem("render_mode", reason))
        # A regime that only `reset` can apply is tried out, if it can be drawn at all.
        regime = {name: p.values[0] for name, p in self.args.items() if name in env_params and isinstance(p, Choice)}
        probed = probe_spaces(target, {} if regime.keys() <= target.regime.keys() else regime)
        if probed.problem and not problems:
            problems.append(Problem("env_class", probed.problem))
        return problems + [Problem(f"args.{name}", refusal([name])) for name in probed.unacknowledged]

    def _address_problems(self) -> list[Problem]:
        problems = []
        try:
            address = Address.parse(self.address or "")
            if address.path is None and address.port == 0:
                problems.append(Problem("address", f"port 0 cannot be connected to ({self.address})."))
        except AddressError as error:
            problems.append(Problem("address", str(error)))
        advice = "is fixed, but a server at an address is created where it runs: pass it there with"
        problems += [
            Problem(f"args.{name}", f"{advice} serve-env --arg {name}=…, and remove it here.") for name in self.fixed()
        ]
        return problems

    def spaces(self, scenario_dir: Path, env_params: Collection[str]) -> ServerSpaces:
        """The server's spaces, as far as they are known before the run starts."""
        return ServerSpaces() if self.env_class is None else probe_spaces(self.target(scenario_dir, env_params))

    def connect(self, scenario_dir: Path, env_params: Collection[str], *, renders: bool = False) -> list[GymServer]:
        """As many servers as `envs` says: together in a separate process, in this one, or as connections.

        With `renders` they are created with `render_mode`.
        """
        if self.env_class is None:
            if self.address is None:
                raise ServerError("the run names no environment: pass it in Python, as server=…")
            from loopwright.envs.live.remote import RemoteServer  # requires msgpack and gymnasium

            return [RemoteServer(self.address, timeout_s=self.timeout_s) for _ in range(self.envs)]
        target = self.target(scenario_dir, env_params, renders=renders)
        if self.isolate is False:
            is_plain = not target.regime and not renders
            return [target.make() if is_plain else RegimeServer(target) for _ in range(self.envs)]
        from loopwright.envs.live.isolated import IsolatedServer  # requires msgpack and gymnasium

        return list(IsolatedServer.several(target, self.envs, timeout_s=self.timeout_s))

    @property
    def has_deadlines(self) -> bool:
        """Whether the server itself limits how long a response may take."""
        return self.address is not None or self.isolate is not False


def context_conflict(observation_space: Any) -> str | None:
    """Why the regime cannot be added to a server's observations as `context`."""
    parts = getattr(observation_space, "spaces", None)
    if not isinstance(parts, dict) or "context" not in parts:
        return None
    return "the server's observations have a part 'context', where the drawn env_params go; give it another name"


def probe_spaces(target: ServerTarget, regime: Mapping[str, Any] | None = None) -> ServerSpaces:
    """The spaces of a server. If it takes too long, they stay unknown.

    With a regime, an episode is begun under it, to see what the server acknowledges.
    """
    key = repr((target, regime or {}))
    if key not in _cache:
        _cache[key] = _probe(target, regime or {})
    return _cache[key]


def _probe(target: ServerTarget, regime: Mapping[str, Any]) -> ServerSpaces:
    try:
        is_registered = target.path.startswith(GYMNASIUM)
        # Gymnasium's own are known to be harmless here, and a process takes a second.
        factory = load_factory(target.path, target.directory) if is_registered else None
        if not regime and getattr(factory, "__module__", "").startswith("gymnasium.envs."):
            env = target.make()
            env.close()
            return ServerSpaces(env.observation_space, env.action_space)
        if not regime and not target.wrappers and not is_registered:
            kind = resolve(target.path, target.directory)
            declared = [_class_space(kind, name) for name in ("observation_space", "action_space")]
            if None not in declared:
                return ServerSpaces(*declared)
        return _probe_in_process(target, regime)
    except ServerLost as error:
        return ServerSpaces() if error.outcome is Outcome.TIMEOUT else ServerSpaces(problem=str(error))
    except LoopwrightError as error:
        return ServerSpaces(problem=str(error))
    except Exception:  # noqa: BLE001  reported when the run starts it
        return ServerSpaces()


def _class_space(target: Any, name: str) -> Any:
    """A space that a class declares, or None if the constructor of a subclass may replace it."""
    space = getattr(target, name, None)
    if not isinstance(target, type) or not hasattr(space, "contains"):
        return None  # a property needs an object
    first = next(kind for kind in target.__mro__ if {name, "__init__", "__new__"} & vars(kind).keys())
    return space if name in vars(first) else None


def _probe_in_process(target: ServerTarget, regime: Mapping[str, Any]) -> ServerSpaces:
    from loopwright.envs.live.isolated import IsolatedServer  # requires msgpack and gymnasium

    server = IsolatedServer(target, timeout_s=_PROBE_TIMEOUT_S)
    try:
        missing: list[str] = []
        if regime:
            _, info = server.reset(seed=None, options={"env_params": dict(regime)})
            missing = unacknowledged(regime, info)
        return ServerSpaces(server.observation_space, server.action_space, unacknowledged=tuple(missing))
    finally:
        server.close()
