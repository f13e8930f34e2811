"""The configuration of a live environment, `[run.live]`, and what can be checked before the run starts."""

from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from loopwright.core.config import Config
from loopwright.core.errors import Problem
from loopwright.envs.live.address import Address, AddressError
from loopwright.envs.live.probe import ServerSpaces, probe_spaces
from loopwright.envs.live.server import GymServer, check_server_class, make_server
from loopwright.spaces.parameter import Fixed, Parameter, parameter


class LiveConfig(Config):
    """A live environment: an object in this process, or a server at an address."""

    env_class: str | None = None
    """`module:Class` or `gymnasium:CartPole-v1`, created in this process with those of `args` that it accepts."""
    address: str | None = None
    """Where a server listens: `unix:///run/sim.sock` or `tcp://host:port`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments: fixed ones for the constructor of `env_class` (a server at an address exists already), lists for
    [run.env_params] to draw per episode."""
    record: Literal["steps", "episodes"] = "steps"
    """Whether the ledger has a row per step or per episode. Steps are counted either way."""
    timeout_s: float = Field(default=30.0, gt=0)
    """How long a step or a reset may take before the server counts as lost. In this process, native code that does not
    return cannot be interrupted: run such a server at an address."""

    @field_validator("args")
    @classmethod
    def _parameters(cls, values: dict[str, Any]) -> dict[str, Parameter]:
        return {name: parameter(value) for name, value in values.items()}

    @model_validator(mode="after")
    def _check_target(self) -> "LiveConfig":
        if (self.env_class is None) == (self.address is None):
            raise ValueError("give either env_class (in process) or address (a server)")
        return self

    def fixed(self) -> dict[str, Any]:
        """The arguments for the constructor."""
        return {name: p.value for name, p in self.args.items() if isinstance(p, Fixed)}

    def problems(self, scenario_dir: Path, env_params: Collection[str]) -> list[Problem]:
        """What is wrong with this configuration, as far as that shows without starting the server."""
        if self.env_class is None:
            problems = self._address_problems()
        else:
            reason = check_server_class(self.env_class, scenario_dir) or self.spaces(scenario_dir).problem
            problems = [Problem("env_class", reason)] if reason else []
        problems += [
            Problem(f"args.{name}", "has several values; let the environment draw it: [run.env_params." + name + "].")
            for name, p in self.args.items()
            if not isinstance(p, Fixed) and name not in env_params
        ]
        if env_params and (reason := context_conflict(self.spaces(scenario_dir).observation_space)):
            problems.append(Problem("env_class", f"{reason}."))
        return problems

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

    def spaces(self, scenario_dir: Path) -> ServerSpaces:
        """The server's spaces, as far as they are known before the run starts."""
        return ServerSpaces() if self.env_class is None else probe_spaces(self.env_class, self.fixed(), scenario_dir)

    def connect(self, scenario_dir: Path) -> GymServer:
        """The server: created in this process, or connected to."""
        if self.env_class is not None:
            return make_server(self.env_class, self.fixed(), scenario_dir)
        from loopwright.envs.live.remote import RemoteServer  # requires msgpack and gymnasium

        return RemoteServer(self.address or "", timeout_s=self.timeout_s)


def context_conflict(observation_space: Any) -> str | None:
    """Why the regime cannot be added to a server's observations as `context`."""
    parts = getattr(observation_space, "spaces", None)
    if not isinstance(parts, dict) or "context" not in parts:
        return None
    return "the server's observations have a part 'context', where the drawn env_params go; give it another name"
