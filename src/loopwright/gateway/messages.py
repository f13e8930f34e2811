"""Anthropic Messages: content blocks on the wire, OpenAI's chat format within.

A message of tool results becomes one `tool` message each; thinking is kept beside the text. The last message cannot be
the assistant's (a prefill): to go on in mid-message is nothing that a chat template can write.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from loopwright.core.task import Message
from loopwright.gateway import blocks, fields
from loopwright.gateway.dialect import Ask, BadRequest, Dialect, Piece, StreamWriter

if TYPE_CHECKING:
    from loopwright.gateway.session import Turn

_SAMPLING = {"max_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k"}
_KINDS = {
    "invalid": "invalid_request_error",
    "authentication": "authentication_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "closed": "permission_error",
    "quota": "rate_limit_error",
    "context": "invalid_request_error",
    "engine": "overloaded_error",
    "internal": "api_error",
}
_STATUSES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "permission_error",
    413: "request_too_large",
    429: "rate_limit_error",
    502: "overloaded_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class Messages(Dialect):
    """`POST /v1/messages` and `/v1/messages/count_tokens`."""

    name = "messages"

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Ask:
        given, choice = fields.objects(body.get("tools"), "tools"), body.get("tool_choice")
        tools = [blocks.tool(tool, f"tools.{index}") for index, tool in enumerate(given)]
        messages = list(blocks.system(body.get("system"), "system"))
        for index, message in enumerate(fields.objects(body.get("messages"), "messages")):
            messages += blocks.said(message, f"messages.{index}")
        if not messages:
            raise BadRequest("messages: at least one message is required", "messages")
        # Only what is to be answered says how long the answer may be; what is to be counted may end anywhere.
        if messages[-1]["role"] == "assistant" and body.get("max_tokens") is not None:
            raise BadRequest("messages: the assistant's message cannot be prefilled; end with a user's", "messages")
        return Ask(
            messages,
            fields.sampling(self.defaults, body, _SAMPLING),
            tools=() if isinstance(choice, dict) and choice.get("type") == "none" else tools,
            stop=blocks.stop(body.get("stop_sequences")),
            stream=fields.flag(body, "stream"),
            model=fields.model(body),
        )

    def render(self, ask: Ask, call_id: str, turns: Sequence["Turn"]) -> dict[str, Any]:
        (turn,) = turns
        return {
            **_opened(ask, call_id, turn.prompt_tokens),
            "content": list(_blocks(turn.message)),
            **_ended(turn),
            "usage": _usage(turn.prompt_tokens, turn.sampled_tokens),
        }

    def stream(self, ask: Ask, call_id: str) -> StreamWriter:
        return _Stream(ask, call_id)

    def error(self, status: int, message: str, *, kind: str, param: str | None = None) -> dict[str, Any]:
        if kind == "context":
            message = f"prompt is too long: {message}"  # the words that agents look for
        return _error(_KINDS.get(kind, "api_error"), message)

    def models(self, names: Sequence[str]) -> dict[str, Any]:
        """The answer to `models`, for SDKs that send `anthropic-version`."""
        since = "1970-01-01T00:00:00Z"
        data = [
            {"type": "model", "id": name, "display_name": name, "created_at": since, "lifecycle": "active"}
            for name in names
        ]
        first, last = (names[0], names[-1]) if names else (None, None)
        return {"data": data, "has_more": False, "first_id": first, "last_id": last}


def _opened(ask: Ask, call_id: str, prompt_tokens: int) -> dict[str, Any]:
    return {
        "id": f"msg_{call_id}",
        "type": "message",
        "role": "assistant",
        "model": ask.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(prompt_tokens, 0),
    }


def _usage(prompt_tokens: int, sampled_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt_tokens,
        "output_tokens": sampled_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _ended(turn: "Turn") -> dict[str, Any]:
    if turn.stopped_by is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": turn.stopped_by}
    reason = "max_tokens" if turn.finish == "length" else "tool_use" if turn.calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def _blocks(message: Message) -> Iterator[dict[str, Any]]:
    if thinking := fields.thought(message):
        yield {"type": "thinking", "thinking": thinking, "signature": _SIGNATURE}
    if said := message["content"]:
        yield {"type": "text", "text": said}
    for made in message.get("tool_calls") or ():
        called = made["function"]
        yield {"type": "tool_use", "id": made["id"], "name": called["name"], "input": orjson.loads(called["arguments"])}


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}}


_SIGNATURE = "loopwright"
"""Nobody checks it here, but SDKs and agents expect one at the end of thinking."""


class _Stream(StreamWriter):
    """One block after another: each is closed before the next one opens."""

    def __init__(self, ask: Ask, call_id: str) -> None:
        self._ask, self._call_id = ask, call_id
        self._open: int | str | None = None  # the tool call or the kind of block that is being written
        self._index = -1

    def begin(self, prompt_tokens: int) -> bytes:
        return _sent({"type": "message_start", "message": _opened(self._ask, self._call_id, prompt_tokens)})

    def piece(self, choice: int, piece: Piece) -> bytes:
        if piece.index is not None:
            started = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
            events = self._at(piece.index, started)
            if piece.arguments:
                events += self._delta({"type": "input_json_delta", "partial_json": piece.arguments})
            return events
        if not piece.text:
            return b""
        return self._at("text", {"type": "text", "text": ""}) + self._delta({"type": "text_delta", "text": piece.text})

    def end(self, turns: Sequence["Turn"]) -> bytes:
        (turn,) = turns
        usage = _usage(turn.prompt_tokens, turn.sampled_tokens)
        ended = {"type": "message_delta", "delta": _ended(turn), "usage": usage}
        return self._close() + self._thought(turn) + _sent(ended) + _sent({"type": "message_stop"})

    def fail(self, status: int, message: str) -> bytes:
        return fields.event("error", _error(_STATUSES.get(status, "api_error"), message))

    def _thought(self, turn: "Turn") -> bytes:
        """A block of reasoning, which is known only now: no piece tells of it."""
        if not (thinking := fields.thought(turn.message)):
            return b""
        opened = self._at("thinking", {"type": "thinking", "thinking": "", "signature": ""})
        said = self._delta({"type": "thinking_delta", "thinking": thinking})
        return opened + said + self._delta({"type": "signature_delta", "signature": _SIGNATURE}) + self._close()

    def _at(self, place: int | str, block: Mapping[str, Any]) -> bytes:
        """Open a block, unless it is the one that is open."""
        if self._open == place:
            return b""
        events = self._close()
        self._open = place
        self._index += 1
        return events + _sent({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return _sent({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _sent({"type": "content_block_stop", "index": self._index})


def _sent(data: Mapping[str, Any]) -> bytes:
    return fields.event(data["type"], data)
