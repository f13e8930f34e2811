"""Anthropic Messages: content blocks on the wire, OpenAI's chat format within.

A message of tool results becomes one `tool` message each; thinking is kept beside the text. If the last message is the
assistant's (a prefill), its text is given to the policy as the beginning of the turn; the answer is what follows.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from loopwright.gateway.dialects import blocks, fields
from loopwright.gateway.dialects.base import BadRequest, Delta, Dialect, StreamWriter, TurnRequest
from loopwright.gateway.sessions.calls import is_object
from loopwright.gateway.sessions.template import Tool
from loopwright.gateway.sessions.wish import Wish, form, wish

if TYPE_CHECKING:
    from loopwright.gateway.sessions.session import Turn

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


class Messages(Dialect):
    """`POST /v1/messages` and `/v1/messages/count_tokens`."""

    name = "messages"

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> TurnRequest:
        given = fields.objects(body.get("tools"), "tools")
        tools = [blocks.tool(tool, f"tools.{index}") for index, tool in enumerate(given)]
        messages = list(blocks.system(body.get("system"), "system"))
        for index, message in enumerate(fields.objects(body.get("messages"), "messages")):
            messages += blocks.said(message, f"messages.{index}")
        if not messages:
            raise BadRequest("messages: at least one message is required", "messages")
        prefill = blocks.prefill(messages.pop()) if messages[-1]["role"] == "assistant" else ""
        if not messages:
            raise BadRequest("messages: there is nothing to answer before the assistant's message", "messages")
        return TurnRequest(
            messages,
            fields.sampling(self.defaults, body, _SAMPLING),
            tools=tools,
            stop=blocks.stop(body.get("stop_sequences")),
            stream=fields.flag(body, "stream"),
            model=fields.model(body),
            wish=_wish(body, tools, prefill),
        )

    def render(self, ask: TurnRequest, call_id: str, turns: Sequence["Turn"]) -> dict[str, Any]:
        (turn,) = turns
        return {
            **_opened(ask, call_id, turn.prompt_tokens),
            "content": list(_blocks(turn)),
            **_ended(turn),
            "usage": _usage(turn.prompt_tokens, turn.sampled_tokens),
        }

    def stream(self, ask: TurnRequest, call_id: str) -> StreamWriter:
        return _Stream(ask, call_id)

    def error(self, status: int, message: str, *, kind: str, param: str | None = None) -> dict[str, Any]:
        return _error(kind, message)

    def models(self, names: Sequence[str]) -> dict[str, Any]:
        """The answer to `models`, for SDKs that send `anthropic-version`."""
        since = "1970-01-01T00:00:00Z"
        data = [
            {"type": "model", "id": name, "display_name": name, "created_at": since, "lifecycle": "active"}
            for name in names
        ]
        first, last = (names[0], names[-1]) if names else (None, None)
        return {"data": data, "has_more": False, "first_id": first, "last_id": last}


def _wish(body: Mapping[str, Any], tools: Sequence[Tool], prefill: str) -> Wish:
    choice = body.get("tool_choice")
    if choice is not None and not isinstance(choice, dict):
        raise BadRequest("tool_choice: expected an object", "tool_choice")
    choice, output = choice or {}, body.get("output_config")
    wanted = output.get("format") if isinstance(output, Mapping) else body.get("output_format")
    single = choice.get("disable_parallel_tool_use") is True
    more = {"single": single, "prefill": prefill, "form": form(wanted, "output_config.format")}
    made = wish(choice.get("type"), choice.get("name"), tools, "tool_choice", **more)
    if prefill and made.tool is not None:
        raise BadRequest("tool_choice: a turn whose text is prefilled cannot begin with a call", "tool_choice")
    return made


def _opened(ask: TurnRequest, call_id: str, prompt_tokens: int) -> dict[str, Any]:
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
    called = any(is_object(call["function"]["arguments"]) for call in turn.calls)
    reason = "max_tokens" if turn.finish == "length" else "tool_use" if called else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def _blocks(turn: "Turn") -> Iterator[dict[str, Any]]:
    if turn.thought:
        yield {"type": "thinking", "thinking": turn.thought, "signature": _SIGNATURE}
    if turn.text:
        yield {"type": "text", "text": turn.text}
    for made in turn.calls:
        called = made["function"]
        # Of arguments that break off, what the SDK makes of them when they are streamed: an object as far as they go.
        given = from_json(called["arguments"] or "{}", allow_partial=True)
        yield {"type": "tool_use", "id": made["id"], "name": called["name"], "input": given}


def _error(kind: str, message: str) -> dict[str, Any]:
    if kind == "context":
        message = f"prompt is too long: {message}"  # the words that agents look for
    return {"type": "error", "error": {"type": _KINDS.get(kind, "api_error"), "message": message}}


_SIGNATURE = "loopwright"
"""Nobody checks it here, but SDKs and agents expect one at the end of thinking."""


class _Stream(StreamWriter):
    """One block after another: each is closed before the next one opens."""

    def __init__(self, ask: TurnRequest, call_id: str) -> None:
        self._ask, self._call_id = ask, call_id
        self._open: int | str | None = None  # the tool call or the kind of block that is being written
        self._index = -1

    def begin(self, prompt_tokens: int) -> bytes:
        return _sent({"type": "message_start", "message": _opened(self._ask, self._call_id, prompt_tokens)})

    def piece(self, choice: int, piece: Delta) -> bytes:
        if piece.index is not None:
            started = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
            events = self._at(piece.index, started)
            if piece.arguments:
                events += self._delta({"type": "input_json_delta", "partial_json": piece.arguments})
            return events
        if piece.thought:
            opened = self._at("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            return opened + self._delta({"type": "thinking_delta", "thinking": piece.thought})
        if not piece.text:
            return b""
        return self._at("text", {"type": "text", "text": ""}) + self._delta({"type": "text_delta", "text": piece.text})

    def end(self, turns: Sequence["Turn"]) -> bytes:
        (turn,) = turns
        usage = _usage(turn.prompt_tokens, turn.sampled_tokens)
        ended = {"type": "message_delta", "delta": _ended(turn), "usage": usage}
        return self._close() + _sent(ended) + _sent({"type": "message_stop"})

    def fail(self, message: str, *, kind: str) -> bytes:
        return fields.event("error", _error(kind, message))

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
        signed = b""
        if self._open == "thinking":
            signed = self._delta({"type": "signature_delta", "signature": _SIGNATURE})
        self._open = None
        return signed + _sent({"type": "content_block_stop", "index": self._index})


def _sent(data: Mapping[str, Any]) -> bytes:
    return fields.event(data["type"], data)
