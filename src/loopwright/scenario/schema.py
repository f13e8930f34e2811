"""The skeleton of a scenario: a system and its runs. What they consist of is configured beside what it configures."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from loopwright.core.agent import AgentConfig
from loopwright.core.config import Config
from loopwright.core.reward import RewardFunction
from loopwright.envs.live import LiveConfig
from loopwright.spaces.draws import EnvParamConfig
from loopwright.workloads.base import WorkloadConfig

_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def size_bytes(text: Any) -> Any:
    """`"2GiB"` as a number of bytes; anything else is left to the type's own check."""
    if not isinstance(text, str):
        return text
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is no size; write for example '512MiB' or '2GiB'")
    return int(float(match[1]) * _UNITS[match[2].upper()])


class SystemConfig(Config):
    """Where and how trials run."""

    type: Literal["local"] = "local"
    """`local`: processes of this machine."""
    parallel: int = Field(default=1, ge=1, le=4096)
    """How many trials are in flight at a time."""
    pin_cpus: bool = False
    """Whether each trial in flight gets cores of its own, so that parallel trials do not disturb one another."""
    memory: int | None = Field(default=None, gt=0)
    """The memory that each process of a trial may use, for example "2GiB"."""
    output: int = Field(default=64 * 2**20, ge=4096)
    """How much of each output stream of a trial is kept, for example "64MiB"; the end is always kept."""
    grace_s: float = Field(default=2.0, ge=0)
    """Seconds between asking a process to end and ending it."""
    durability: Literal["normal", "full"] = "normal"
    """`normal` survives the death of the process; `full` also that of the machine, for a disk flush per step."""
    shared_cache: str | None = None
    """The file behind `cache = "shared"`, relative to the scenario; without it, one in the output directory."""

    @field_validator("memory", "output", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        return size_bytes(value)


class PenaltiesConfig(Config):
    """What an agent is told for a failed trial. These numbers are never rewards and never recorded as such."""

    metric_failure: float | None = None
    """For a trial that crashed, timed out, gave no metric or was invalid; without it the agent is told *failed*."""
    constraint_failure: float | None = None
    """For a trial that broke a constraint."""


class RunBasics(Config):
    """The plain keys of a run."""

    name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=100)
    """The run's name, which is also the name of its folder."""
    repeats: int = Field(default=1, ge=1)
    """How often each proposal is measured; the agent is told the mean."""
    cache: Literal["run", "shared", "off"] = "run"
    """Whether an equal trial is answered from this run, also from other runs, or measured again."""
    observers: tuple[str, ...] = ()
    """Your own observers, each `module:Class`, told before and after each trial."""


class RunConfig(RunBasics):
    """One entry of a scenario: an agent over a workload or a live environment. Without an agent it runs once."""

    agent: AgentConfig | None = None
    """What searches, chosen by `type`."""
    reward: tuple[RewardFunction, ...] = ()
    """What makes a trial good, chosen by `type`; a list means several objectives. More is always better."""
    workload: WorkloadConfig | None = None
    """What a trial runs, chosen by `type`; either this or `live`."""
    live: LiveConfig | None = None
    """A live environment, stepped by a server."""
    rewards: PenaltiesConfig = PenaltiesConfig()
    """What the agent is told for failed trials."""
    env_params: Mapping[str, EnvParamConfig] = Field(default_factory=dict)
    """Arguments that the environment draws for each trial instead of the agent choosing them."""


class Scenario(Config):
    """A scenario as it was read, with every problem already out of the way."""

    name: str = Field(min_length=1)
    """The scenario's name, for people."""
    home: str | None = None
    """The directory that paths are relative to; without it, the one in which the scenario stands."""
    system: SystemConfig = SystemConfig()
    """Where and how trials run."""
    run: tuple[RunConfig, ...] = Field(min_length=1)
    """The runs, one after another."""
