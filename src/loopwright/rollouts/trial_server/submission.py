"""A submission: one trial that a client requests, and the key that identifies it."""

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
from loopwright.rollouts.remote.config import RemoteConfig
from loopwright.rollouts.remote.gateway_host import GatewayAccess

_NAMESPACE = UUID("6f0b3d0c-7d0a-5b1e-9f6e-3c1f2a4d8e57")
_VOLATILE = ("gateway", "passed")
"""Fields that may change when a run is resumed and requests the same trial again."""
_MAX_KEY_CHARS = 200
RUN_KEYS = frozenset(
    {"workers", "cpus", "memory", "concurrency", "server", "token_file", "queue_s", "artifacts", "pass_env"}
)
"""Keys of the loop that configure the run and not the agent."""
_FIXES = {"pass_env": "give the variables in `passed`", "artifacts": "give them beside `loop`"}


def trial_id(key: str) -> str:
    """The id of the trial with this key; a client can compute it to cancel a trial before it got an answer."""
    return str(uuid5(_NAMESPACE, key))


def is_id(id: str) -> bool:
    """Whether this can be the id of a trial."""
    try:
        return str(UUID(id)) == id
    except ValueError:
        return False


def submission_digest(body: Mapping[str, Any]) -> bytes:
    """Equal for submissions that request the same trial."""
    stable = {name: value for name, value in body.items() if name not in _VOLATILE}
    return blake2b(orjson.dumps(stable, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()


def check_key(key: Any) -> str:
    """An idempotency key. ValueError if it is not valid."""
    if isinstance(key, str) and 0 < len(key) <= _MAX_KEY_CHARS and key.isprintable():
        return key
    raise ValueError(
        f"key: give a text of up to {_MAX_KEY_CHARS} characters as `key`, or as the Idempotency-Key header"
    )


class SubmittedGateway(Config):
    """The gateway that the trial's agent uses."""

    url: str
    """Its address, as seen from the trial server."""
    token: str | None = Field(default=None, repr=False)
    """Its token. Stored until the trial has ended."""

    @field_validator("url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        endpoint(url)
        return url


class Submission(Config):
    """One trial: a task, the agent that attempts it, and the policy that the agent uses."""

    task: Mapping[str, Any]
    """`id`, and `messages` or `prompt`; anything else that an agent or its tests need, such as `local_task_path`, in
    `extra`."""
    loop: RemoteConfig
    """The agent: the keys of `loop = { type = "remote" }`, with a command."""
    gateway: SubmittedGateway | None = None
    """Where sessions are opened; by default at the server's own engine."""
    run: str = ""
    """The run that the trial belongs to."""
    trial: int | None = None
    """Its number in the run."""
    seed: str = "0"
    """The sampling seed."""
    sampling: Sampling | None = None
    """Overrides the loop's sampling."""
    verify: bool = False
    """Whether the task's tests are run."""
    passed: Mapping[str, str] = Field(default_factory=dict, repr=False)
    """Further variables of the agent's environment, stored until the trial has ended."""
    artifacts: tuple[str, ...] = Field(default=(), max_length=100)
    """Patterns of workspace files that are kept; `*` matches anything, including `/`."""

    @field_validator("task")
    @classmethod
    def _is_task(cls, task: Mapping[str, Any]) -> Mapping[str, Any]:
        _parse_task(task)
        return task

    @field_validator("loop")
    @classmethod
    def _check_keys(cls, loop: RemoteConfig) -> RemoteConfig:
        for name in sorted(RUN_KEYS & loop.model_fields_set):
            fix = _FIXES.get(name, "remove it")
            raise Explained([(name, f"concerns the run's own machine and has no meaning at a trial server: {fix}")])
        return loop

    @model_validator(mode="after")
    def _is_command(self) -> Self:
        if self.loop.function is not None:
            raise ValueError("loop: a trial server runs commands; a function would run in the server's process")
        return self

    def rollout_request(self) -> RolloutRequest:
        """The request for a remote worker."""
        return RolloutRequest(_parse_task(self.task), self.seed, self.sampling, self.trial)

    def gateway_access(self) -> GatewayAccess | None:
        """How to reach the submitted gateway; None if the trial uses the server's own engine."""
        return None if self.gateway is None else GatewayAccess(self.gateway.url.rstrip("/"), self.gateway.token)


def _parse_task(fields: Mapping[str, Any]) -> Task:
    extra = fields.get("extra", {})
    if not isinstance(extra, Mapping):
        raise ValueError("`extra` is not a table")
    task = Task.of({name: value for name, value in fields.items() if name != "extra"}, id="task")
    return replace(task, extra={**task.extra, **extra})
