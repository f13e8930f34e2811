"""The schema of a scenario: a system and its runs. The parts of a run have their configs beside their code."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from loopwright.core.agent import AgentConfig
from loopwright.core.config import Config, size_bytes
from loopwright.core.reward import Penalties, RewardFunction
from loopwright.engines.base import EngineConfig
from loopwright.envs.live.config import LiveConfig
from loopwright.execution.devices import visible_devices
from loopwright.rollouts.config import RolloutConfig
from loopwright.rollouts.evaluation import EvalConfig
from loopwright.rollouts.remote.gateway_config import GatewayHostConfig
from loopwright.spaces.space import EnvParamConfig
from loopwright.workloads.base import WorkloadConfig


class SystemConfig(Config):
    """Where and how trials run."""

    type: Literal["local"] = "local"
    """`local`: processes on this machine."""
    parallel: int = Field(default=1, ge=1, le=4096)
    """How many trials are in flight at a time."""
    pin_cpus: bool = False
    """Whether each trial in flight gets its own cores, so that parallel trials do not disturb one another."""
    gpus: Literal["auto"] | int | tuple[int | str, ...] = Field(default=(), union_mode="left_to_right")
    """The GPUs that trials share: how many, a list of their ids, or "auto" for all of this machine. Each trial in
    flight has `[run.workload] gpus` of them to itself, in `CUDA_VISIBLE_DEVICES` and `ROCR_VISIBLE_DEVICES`."""
    memory: int | None = Field(default=None, gt=0)
    """How much memory each process of a trial may use, for example "2GiB"."""
    output: int = Field(default=64 * 2**20, ge=4096)
    """How much of each output stream of a trial is kept, for example "64MiB"; the end is always kept."""
    grace_s: float = Field(default=2.0, ge=0)
    """Seconds between SIGTERM and SIGKILL when a process has to end."""
    durability: Literal["normal", "full"] = "normal"
    """`normal` survives a crash of the process; `full` also of the machine, at the cost of a disk flush per step."""
    shared_cache: str | None = None
    """The file of `cache = "shared"`, relative to the scenario; by default one in the output directory."""

    @field_validator("memory", "output", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        return size_bytes(value)

    @field_validator("gpus")
    @classmethod
    def _different(cls, gpus: str | int | tuple[int | str, ...]) -> str | int | tuple[int | str, ...]:
        if isinstance(gpus, int) and not 0 <= gpus <= 1024:
            raise ValueError(f"{gpus} is not a number of GPUs")
        if isinstance(gpus, tuple) and len({str(gpu) for gpu in gpus}) < len(gpus):
            raise ValueError(f"{list(gpus)} names a GPU twice")
        return gpus

    def devices(self) -> tuple[str, ...]:
        """The ids of the GPUs."""
        if self.gpus == "auto":
            return visible_devices()
        return tuple(map(str, range(self.gpus) if isinstance(self.gpus, int) else self.gpus))


_RESERVED_NAMES = {"report.html", "scenario.toml", "campaign.json", "cache.db", "dse_failure.txt"}
"""Files of the output directory, in which each run has a folder."""


class RunBasics(Config):
    """The plain keys of a run."""

    name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=100)
    """The run's name, which is also the name of its folder."""
    repeats: int = Field(default=1, ge=1)
    """How often each proposal is measured; the agent learns the mean."""
    cache: Literal["run", "shared", "off"] = "run"
    """Whether an equal trial is answered from this run, also from other runs, or measured again."""
    observers: tuple[str, ...] = ()
    """Your own observers, each `module:Class`, called before and after each trial."""

    @field_validator("name")
    @classmethod
    def _is_free(cls, name: str) -> str:
        if name.lower() in _RESERVED_NAMES or name.lower().startswith("cache.db-"):
            raise ValueError(
                f"{name!r} is a file that Loopwright writes into the output directory; choose another name"
            )
        return name


class RunConfig(RunBasics):
    """One entry of a scenario: an agent over a workload, a live environment or rollouts.

    Without an agent, the workload runs once.
    """

    agent: AgentConfig | None = None
    """The agent, by `type`."""
    reward: tuple[RewardFunction, ...] = ()
    """What makes a trial good, by `type`; a list means several objectives. More is always better."""
    workload: WorkloadConfig | None = None
    """What a trial runs, by `type`; either this, `live` or `rollout`."""
    live: LiveConfig | None = None
    """A live environment, stepped by a server."""
    rollout: RolloutConfig | None = None
    """Rollouts: tasks, an agent loop, a judger."""
    engine: EngineConfig | None = None
    """What the policy of a rollout runs on, by `type`."""
    eval: EvalConfig | None = None
    """Tasks that the policy is evaluated on while it is trained, and never trained on."""
    gateway: GatewayHostConfig | None = None
    """Where remote agents reach the policy, by `type`; by default a gateway in the process of the run."""
    rewards: Penalties = Penalties()
    """What the agent learns for failed trials."""
    env_params: Mapping[str, EnvParamConfig] = Field(default_factory=dict)
    """Arguments that the environment draws for each trial instead of the agent choosing them."""


class Scenario(Config):
    """A checked scenario."""

    name: str = Field(min_length=1)
    """The scenario's name, for people."""
    home: str | None = None
    """The directory that paths are relative to; by default the scenario's own."""
    system: SystemConfig = SystemConfig()
    """Where and how trials run."""
    run: tuple[RunConfig, ...] = Field(min_length=1)
    """The runs, one after another."""
