"""Terms: what whoever opens a session says about it, and holds its agent to."""

import re
import secrets
from typing import Any

from pydantic import Field, field_validator

from loopwright.core.config import Config
from loopwright.core.task import Task
from loopwright.engines.base import Sampling

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_OURS = re.compile(r"s-[0-9a-f]{16}")
_TAKEN = {"sessions", "healthz", "metrics", "v1", "ws", "openapi.json", "engines", "weights", "pause", "resume"}


def is_id(text: str) -> bool:
    """Whether a session can be called so: it is part of a path, and of nobody else's."""
    return _ID.fullmatch(text) is not None and text not in _TAKEN


def new_id() -> str:
    """An id for a session whose opener says none."""
    return f"s-{secrets.token_hex(8)}"


def is_ours(id: str) -> bool:
    """Whether we chose this id. Agents see it in their URL, and nobody has to open such a session twice."""
    return _OURS.fullmatch(id) is not None


class SessionConfig(Config):
    """The terms of a session."""

    run: str = ""
    """The run that it belongs to."""
    trial: int | str | None = None
    """The trial that it belongs to."""
    sampling: Sampling = Sampling()
    """What is given here is pinned: requests cannot change it; they may ask for fewer tokens."""
    max_tokens: int = Field(default=4096, ge=1)
    """Tokens of a turn where neither the opener nor the request says how many."""
    seed: str | None = None
    """What turns are sampled with; the session's id where it is not given."""
    calls: int | None = Field(default=None, ge=0)
    """How many turns may be sampled."""
    tokens: int | None = Field(default=None, ge=0)
    """How many tokens may be sampled, over all turns."""
    time_s: float | None = Field(default=None, gt=0)
    """Seconds from its opening in which calls are taken."""
    concurrency: int | None = Field(default=None, ge=1)
    """How many calls are answered at once; others wait."""
    ttl_s: float = Field(default=3600.0, gt=0)
    """Seconds without a call after which it expires."""
    task: dict[str, Any] | None = None
    """The task that the agent was given, for the episode: id, messages, label, data_source."""

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
        """What a request is sampled with where it says nothing."""
        given = self.sampling.model_fields_set
        return (
            self.sampling if "max_tokens" in given else self.sampling.model_copy(update={"max_tokens": self.max_tokens})
        )

    def pinned(self, asked: Sampling, stop: tuple[str, ...]) -> Sampling:
        """What a request is sampled with: what it asks for, under what is pinned."""
        pins = {name: getattr(self.sampling, name) for name in self.sampling.model_fields_set}
        if "max_tokens" in pins:
            pins["max_tokens"] = min(pins["max_tokens"], asked.max_tokens)
        return asked.model_copy(update={**pins, "stop": (*pins.get("stop", ()), *stop)})
