"""The schema of a scenario: a system and its runs. The parts of a run have their configs beside their code."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from loopwright.core.agent import AgentConfig
from loopwright.core.config import NAME, Config, Explained, explain
from loopwright.core.trial import Penalties, RewardFunction, key_of
from loopwright.engines.base import EngineConfig
from loopwright.envs.failures import FailConfig
from loopwright.envs.live.config import LiveConfig
from loopwright.envs.stopping import FidelityConfig, StopConfig
from loopwright.execution.local.system import LocalSystem
from loopwright.execution.system import SystemConfig
from loopwright.rollouts.config import RolloutConfig
from loopwright.rollouts.evaluation import EvalConfig
from loopwright.rollouts.remote.gateway_config import GatewayHostConfig
from loopwright.selection.plan import ConfirmConfig
from loopwright.spaces.space import EnvParamConfig
from loopwright.workloads.base import WorkloadConfig
from loopwright.workloads.steps import StepConfig

Condition = Literal["after_start", "after_ok", "after_any"]
"""What a run waits for: that another has started, has succeeded, or has ended."""
_RESERVED_NAMES = {"report.html", "scenario.toml", "campaign.json", "cache.db", "dse_failure.txt"}
"""Files of the output directory, in which each run has a folder."""


class RunBasics(Config):
    """The plain keys of a run."""

    name: str = Field(pattern=NAME, max_length=100)
    """The run's name, which is also the name of its folder."""
    repeats: int = Field(default=1, ge=1)
    """How often each proposal is measured; the agent learns the mean."""
    cache: Literal["run", "shared", "off"] = "run"
    """Whether an equal trial is answered from this run, also from other runs, or measured again."""
    env: str | None = None
    """An environment of your own, `module:Class`: a subclass of `SearchEnv`, or of `LiveEnv` in a live run, or anything
    that is called like one and returns an object with the same methods."""
    observers: tuple[str, ...] = ()
    """Your own observers, each `module:Class`, called before and after each trial."""
    confirm: ConfirmConfig | bool | None = None
    """Whether and how the best configurations are measured again at the end; by default where a sampler has enough
    trials for that."""
    noise: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    """Arguments that are averaged over and never shown to the agent, such as a seed, each with its values."""
    fail: FailConfig = FailConfig()
    """When failures that are all alike end the run."""
    depends_on: dict[str, Condition] = Field(default_factory=dict)
    """Which runs a run without an agent waits for: `{ server = "after_start", build = "after_ok" }`, also `after_any`;
    a list of names means `after_ok`."""
    pre: tuple[StepConfig, ...] = ()
    """Commands that run before each trial, in their order. If one fails, so does the trial."""
    post: tuple[StepConfig, ...] = ()
    """Commands that run after each trial, whatever its outcome."""
    iterations: int = Field(default=1, ge=1)
    """How often a run without an agent is executed, one after another, until one fails."""

    @field_validator("confirm", mode="before")
    @classmethod
    def _read_table(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            if isinstance(value, ConfirmConfig | bool | None):
                return value
            raise ValueError(f"must be true, false or a table, not {value!r}")
        try:
            return ConfirmConfig.model_validate(value)
        except ValidationError as error:
            raise Explained(explain(error, ConfirmConfig)) from error

    @field_validator("depends_on", mode="before")
    @classmethod
    def _after_ok(cls, names: Any) -> Any:
        if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
            return dict.fromkeys(names, "after_ok")
        if not isinstance(names, dict):
            raise ValueError('give a list of names, or a table such as { server = "after_start" }')
        return names

    @field_validator("noise")
    @classmethod
    def _can_be_drawn(cls, noise: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        for name, values in noise.items():
            if len({key_of(value) for value in values}) < max(2, len(values)):
                raise ValueError(f"{name}: give at least two different values")
            if any(isinstance(value, (dict, list, tuple)) for value in values):
                raise ValueError(f"{name}: only plain values can be drawn")
        return noise

    @field_validator("name")
    @classmethod
    def _is_free(cls, name: str) -> str:
        if name.lower() in _RESERVED_NAMES or name.lower().startswith("cache.db-"):
            raise ValueError(
                f"{name!r} is a file that Loopwright writes into the output directory; choose another name"
            )
        return name


class EpisodeConfig(Config):
    """An episode of a policy over a workload."""

    steps: int = Field(default=1, ge=1)
    """Trials per episode. They share one draw of the environment, and before each the policy observes the metrics of
    the one before it."""


class RunConfig(RunBasics):
    """One entry of a scenario: an agent over a workload, a live environment or rollouts.

    Without an agent it is a plain run: the workload runs once.
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
    stop: StopConfig | None = None
    """When a trial is stopped early."""
    fidelity: Mapping[str, FidelityConfig] = Field(default_factory=dict)
    """An argument of the workload that makes trials cheaper, such as the number of epochs: `stop` decides which trials
    continue to the next value. It is not among the `args`."""
    episode: EpisodeConfig = EpisodeConfig()
    """How often a policy acts per episode; by default each trial is an episode."""
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
    system: SystemConfig = LocalSystem()
    """Where and how trials run, by `type`; by default `local`."""
    run: tuple[RunConfig, ...] = Field(min_length=1)
    """The runs, one after another."""
