"""A task: one prompt for an agent loop, with what a judger needs to score the answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

Message = Mapping[str, Any]
"""One message of a conversation, in OpenAI's chat format: role, content, tool_calls, tool_call_id."""


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt with a label. `data_source` tells judgers what kind of task it is; `extra` is passed on unread."""

    id: str
    messages: tuple[Message, ...]
    label: Any = None
    data_source: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Mapping[str, Any], *, id: str, data_source: str = "") -> Self:
        """A task from a row of a dataset: `prompt` (a text or messages) or `messages`; other columns go to `extra`."""
        # A table has a null where a row has no value.
        values = {name: value for name, value in row.items() if value is not None}
        prompt = values.get("messages", values.get("prompt"))
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if (
            not isinstance(prompt, Sequence)
            or not prompt
            or not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) and "content" in m for m in prompt)
        ):
            raise ValueError("a task needs `prompt`, a text or a list of messages with role and content")
        fields = {"id", "messages", "prompt", "label", "data_source"}
        return cls(
            id=str(values.get("id", id)),
            messages=tuple(dict(message) for message in prompt),
            label=row.get("label"),
            data_source=str(values.get("data_source", data_source)),
            extra={name: value for name, value in row.items() if name not in fields},
        )

    def as_json(self) -> dict[str, Any]:
        """The task as plain data."""
        return {
            "id": self.id,
            "messages": list(self.messages),
            "label": self.label,
            "data_source": self.data_source,
            **({"extra": self.extra} if self.extra else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `as_json`."""
        return cls(data["id"], tuple(data["messages"]), data.get("label"), data["data_source"], data.get("extra", {}))
