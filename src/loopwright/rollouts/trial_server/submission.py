"""A submission: one trial that somebody elsewhere asks for, and the key by which it is known again."""

from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Self
from uuid import UUID, uuid5

import orjson
from pydantic import Field, field_validator, model_validator

from loopwright.core.config import Config, Explained
from loopwright.core.task import Task
from loopwright.engines.base import Sampling
from loopwright.gateway.client import endpoint
from loopwright.rollouts.loops.worker import RolloutRequest
from loopwright.rollouts.remote.access import GatewayAccess
from loopwright.rollouts.remote.config import RemoteConfig

_NAMES = UUID("6f0b3d0c-7d0a-5b1e-9f6e-3c1f2a4d8e57")
_PASSING = ("gateway", "passed")
"""What a run that is resumed has others of, although it asks for the same trial: an address, and variables."""
_MOST_KEY = 200
OF_THE_RUN = frozenset(
    {"workers", "cpus", "memory", "concurrency", "server", "token_file", "queue_s", "artifacts", "pass_env"}
)
"""Keys of the loop that say nothing of the agent."""
_INSTEAD = {"pass_env": "give the variables in `passed`", "artifacts": "give them beside `loop`"}


def id_of(key: str) -> str:
    """The id of the trial with this key; so whoever submits one can also cancel it before there is an answer."""
    return str(uuid5(_NAMES, key))


def is_id(id: str) -> bool:
    """Whether there can be a trial with this id."""
    try:
        return str(UUID(id)) == id
    except ValueError:
        return False


def digest_of(body: Mapping[str, Any]) -> bytes:
    """What tells whether two submissions ask for the same."""
    asked = {name: value for name, value in body.items() if name not in _PASSING}
    return blake2b(orjson.dumps(asked, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()


def checked_key(key: Any) -> str:
    """An idempotency key. ValueError if it is none."""
    if isinstance(key, str) and 0 < len(key) <= _MOST_KEY and key.isprintable():
        return key
    raise ValueError(f"key: give a text of up to {_MOST_KEY} characters as `key`, or as the Idempotency-Key header")


class At(Config):
    """A gateway that the trial's agent is to talk to."""

    url: str
    """Its address, as the trial server reaches it."""
    token: str | None = Field(default=None, repr=False)
    """What opens sessions there. It is kept until the trial has ended."""

    @field_validator("url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        endpoint(url)
        return url

    def access(self) -> GatewayAccess:
        """As remote workers take it."""
        return GatewayAccess(self.url.rstrip("/"), self.token)


class Submission(Config):
    """One trial: a task, the agent that attempts it, and the policy that the agent talks to."""

    task: Mapping[str, Any]
    """`id`, and `messages` or `prompt`; what an agent or its tests need beside that, such as `local_task_path`, in
    `extra`."""
    loop: RemoteConfig
    """The agent: the keys of `loop = { type = "remote" }`, with a command."""
    gateway: At | None = None
    """Where sessions are opened; without it, at the server's own engine."""
    run: str = ""
    """The run that it belongs to."""
    trial: int | None = None
    """Its number there."""
    seed: str = "0"
    """What its turns are sampled with."""
    sampling: Sampling | None = None
    """How the policy is sampled, where that is not as the loop says."""
    verify: bool = False
    """Whether the task's tests are run."""
    passed: Mapping[str, str] = Field(default_factory=dict, repr=False)
    """Further variables of the agent's environment, kept until the trial has ended."""
    artifacts: tuple[str, ...] = Field(default=(), max_length=100)
    """Patterns of files in the workspace that are kept: `*` stands for anything, `/` as well."""

    @field_validator("task")
    @classmethod
    def _is_task(cls, task: Mapping[str, Any]) -> Mapping[str, Any]:
        _task(task)
        return task

    @field_validator("loop")
    @classmethod
    def _is_agent(cls, loop: RemoteConfig) -> RemoteConfig:
        for name in sorted(OF_THE_RUN & loop.model_fields_set):
            said = "is for the run's own machine, and has no meaning at a trial server"
            raise Explained([(name, f"{said}: {_INSTEAD.get(name, 'leave it out')}")])
        return loop

    @model_validator(mode="after")
    def _is_command(self) -> Self:
        if self.loop.command is None:
            raise ValueError("loop: a trial server runs commands; a function would run in its own process")
        return self

    def request(self) -> RolloutRequest:
        """As remote workers take it."""
        return RolloutRequest(_task(self.task), self.seed, self.sampling, self.trial)


def _task(given: Mapping[str, Any]) -> Task:
    extra = given.get("extra", {})
    if not isinstance(extra, Mapping):
        raise ValueError("`extra` is no table")
    made = Task.of({name: value for name, value in given.items() if name != "extra"}, id="task")
    return replace(made, extra={**made.extra, **extra})
