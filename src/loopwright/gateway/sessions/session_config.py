"""The configuration of a session: what its owner says about it, and the limits its agent has to observe."""

import re
import secrets
import time
from typing import Any

from pydantic import Field, field_validator

from loopwright.core.config import Config
from loopwright.core.task import Task
from loopwright.engines.base import Sampling

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_GENERATED_ID = re.compile(r"s-[0-9a-f]{24}")
_RESERVED = {"sessions", "healthz", "metrics", "v1", "ws", "openapi.json", "engines", "weights", "pause", "resume"}


_WITH_QUOTA, _UNLIMITED = 4096, 2**31 - 1
"""Tokens of a turn for which nobody sets a limit, with and without a quota; engines end it where their context does."""


def is_id(text: str) -> bool:
    """Whether this can be a session's id: it is the first part of a path, and must not clash with other routes."""
    return _ID.fullmatch(text) is not None and text not in _RESERVED


def new_id() -> str:
    """An id for a session that is opened without one.

    It starts with the time, so that sessions of the same time are neighbours in the store's indexes: a commit writes
    fewer pages.
    """
    return f"s-{int(time.time()):08x}{secrets.token_hex(8)}"


def is_generated(id: str) -> bool:
    """Whether the gateway generated this id. Agents see it in their URL; its owner has no reason to open it again."""
    return _GENERATED_ID.fullmatch(id) is not None


class SessionConfig(Config):
    """The configuration of a session."""

    run: str = ""
    """The run that it belongs to."""
    trial: int | str | None = None
    """The trial that it belongs to."""
    owner_key: str | None = Field(default=None, min_length=16, max_length=256, repr=False)
    """The secret of the run that opens it. With one, only this key reads, ends and deletes the session, and the
    session's own key, which its agent has, only calls models."""
    sampling: Sampling = Sampling()
    """What is set here is pinned: requests cannot change it, except that they may ask for fewer tokens."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens of a turn if neither `sampling` nor the request says how many."""
    seed: str | None = None
    """The seed of its turns; the session's id by default."""
    calls: int | None = Field(default=None, ge=0)
    """How many turns may be sampled."""
    tokens: int | None = Field(default=None, ge=0)
    """How many tokens may be sampled, over all turns."""
    time_s: float | None = Field(default=None, gt=0)
    """Seconds after opening in which calls are accepted."""
    concurrency: int | None = Field(default=None, ge=1)
    """How many calls run at the same time; others wait."""
    ttl_s: float = Field(default=3600.0, gt=0)
    """Seconds without a call after which it expires."""
    task: dict[str, Any] | None = None
    """The agent's task, for the episode: id, messages, label, data_source."""

    @field_validator("task")
    @classmethod
    def _is_task(cls, task: dict[str, Any] | None) -> dict[str, Any] | None:
        if task is not None:
            Task.of({"messages": [{"role": "user", "content": ""}], **task}, id="")
        return task

    def task_of(self, id: str) -> Task:
        """The task of the episode."""
        if self.task is None:
            return Task(id, ())
        if "messages" in self.task or "prompt" in self.task:
            return Task.of(self.task, id=id)
        return Task.from_json({"id": id, "messages": (), "data_source": "", **self.task})

    @property
    def defaults(self) -> Sampling:
        """The sampling of a request that sets nothing itself."""
        if "max_tokens" in self.sampling.model_fields_set:
            return self.sampling
        # A call reserves what it may use of the quota: without a limit, one call would take all of it.
        limit = self.max_tokens or (_WITH_QUOTA if self.tokens is not None else _UNLIMITED)
        return self.sampling.model_copy(update={"max_tokens": limit})

    def pin(self, requested: Sampling, stop: tuple[str, ...]) -> Sampling:
        """The sampling of a request: what it asks for, except what is pinned."""
        pins = {name: getattr(self.sampling, name) for name in self.sampling.model_fields_set}
        if "max_tokens" in pins:
            pins["max_tokens"] = min(pins["max_tokens"], requested.max_tokens)
        return requested.model_copy(update={**pins, "stop": (*pins.get("stop", ()), *stop)})

    def overridden(self, requested: Sampling) -> list[str]:
        """The parameters of a request that are pinned to other values; it may always ask for fewer tokens."""
        pins = self.sampling.model_fields_set - {"max_tokens", "stop", "top_logprobs"}
        names = [name for name in pins if getattr(requested, name) != getattr(self.sampling, name)]
        guide = requested.guide
        return sorted(guide.source if name == "guide" and guide is not None else name for name in names)
