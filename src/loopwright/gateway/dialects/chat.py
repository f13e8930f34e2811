"""OpenAI chat completions, which is also how messages are written within."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loopwright.core.task import Message
from loopwright.gateway.dialects.base import BadRequest, Delta, Dialect, StreamWriter, TurnRequest
from loopwright.gateway.dialects.fields import flag, function, model, objects, refusal, text
from loopwright.gateway.dialects.openai import (
    DONE,
    MOST_CHOICES,
    content_logprobs,
    error_body,
    event,
    includes_usage,
    integer,
    now,
    sampling_of,
    stop_of,
    usage,
    with_tops,
)
from loopwright.gateway.sessions.template import Tool
from loopwright.gateway.sessions.wish import form, openai_wish

if TYPE_CHECKING:
    from loopwright.engines.tokenizer import Tokenizer
    from loopwright.gateway.sessions.session import Turn

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_PLAIN = ("user", "assistant", "system")


class ChatCompletions(Dialect):
    """`POST /v1/chat/completions`."""

    name = "chat.completions"

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> TurnRequest:
        messages = [_message(each, index) for index, each in enumerate(objects(body.get("messages"), "messages"))]
        if not messages:
            raise BadRequest("messages: at least one message is required", "messages")
        if body.get("audio") or body.get("modalities") not in (None, [], ["text"]):
            raise BadRequest("modalities: only text can be sampled", "modalities")
        tools = [_tool(tool, f"tools.{index}") for index, tool in enumerate(objects(body.get("tools"), "tools"))]
        top = integer(body, "top_logprobs", 0, 20) or 0
        return TurnRequest(
            messages,
            with_tops(sampling_of(self.defaults, body, "max_completion_tokens", "max_tokens"), top),
            tools=tools,
            stop=stop_of(body),
            n=integer(body, "n", 1, MOST_CHOICES) or 1,
            stream=flag(body, "stream"),
            logprobs=flag(body, "logprobs"),
            top_logprobs=top,
            include_usage=includes_usage(body),
            model=model(body),
            seed=integer(body, "seed"),
            wish=openai_wish(body, tools, form(body.get("response_format"), "response_format")),
        )

    def render(self, ask: TurnRequest, call_id: str, turns: Sequence["Turn"]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {**turn.message, "content": turn.text or (None if turn.calls else ""), "refusal": None},
                "logprobs": content_logprobs(self.tokenizer, turn.ids, turn.logprobs, ask.top_logprobs, turn.tops)
                if ask.logprobs
                else None,
                "finish_reason": _finish(turn),
            }
            for index, turn in enumerate(turns)
        ]
        return {**_head(ask, call_id, "chat.completion"), "choices": choices, "usage": usage(turns)}

    def stream(self, ask: TurnRequest, call_id: str) -> StreamWriter:
        return _Stream(ask, call_id, self.tokenizer)

    def error(self, status: int, message: str, *, kind: str, param: str | None = None) -> dict[str, Any]:
        return error_body(message, kind, param)


class _Stream(StreamWriter):
    """A role chunk for each choice, deltas, why each choice ended, and the usage if it was asked for."""

    def __init__(self, ask: TurnRequest, call_id: str, tokenizer: "Tokenizer") -> None:
        self._ask, self._tokenizer = ask, tokenizer
        self._head = _head(ask, call_id, "chat.completion.chunk")

    def begin(self, prompt_tokens: int) -> bytes:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._chunk(choice, delta) for choice in range(self._ask.n))

    def piece(self, choice: int, piece: Delta) -> bytes:
        delta: dict[str, Any] = {}
        if piece.index is not None:
            called: dict[str, Any] = {"index": piece.index, "function": {"arguments": piece.arguments}}
            if piece.id:
                called = {
                    **called,
                    "id": piece.id,
                    "type": "function",
                    "function": {"name": piece.name, "arguments": ""},
                }
            delta = {"tool_calls": [called]}
        elif piece.text:
            delta = {"content": piece.text}
        elif piece.thought:
            delta = {"reasoning_content": piece.thought}
        if not delta and not (self._ask.logprobs and piece.ids):
            return b""
        return self._chunk(choice, delta, piece)

    def _chunk(
        self, choice: int, delta: Mapping[str, Any], piece: Delta | None = None, finish: str | None = None
    ) -> bytes:
        logprobs = None
        if self._ask.logprobs and piece is not None and piece.ids:
            logprobs = content_logprobs(self._tokenizer, piece.ids, piece.logprobs, self._ask.top_logprobs, piece.tops)
        made = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return event({**self._head, "choices": [made], **self._no_usage})

    @property
    def _no_usage(self) -> dict[str, Any]:
        return {"usage": None} if self._ask.include_usage else {}

    def end(self, turns: Sequence["Turn"]) -> bytes:
        events = [self._chunk(index, {}, finish=_finish(turn)) for index, turn in enumerate(turns)]
        if self._ask.include_usage:
            events.append(event({**self._head, "choices": [], "usage": usage(turns)}))
        return b"".join([*events, DONE])

    def fail(self, message: str, *, kind: str) -> bytes:
        return event(error_body(message, kind))


def _head(ask: TurnRequest, call_id: str, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{call_id}",
        "object": kind,
        "created": now(),
        "model": ask.model,
        "system_fingerprint": None,
    }


def _finish(turn: "Turn") -> str:
    return "length" if turn.finish == "length" else "tool_calls" if turn.calls else "stop"


def _message(message: Mapping[str, Any], index: int) -> Message:
    """A message with what we show of it; text parts may be a list."""
    role, content = message.get("role"), message.get("content")
    plain = role in _PLAIN and type(content) is str
    if plain and len(message) == 2:
        return message  # as nearly all are; a long history passes here in every turn
    thought = message.get("reasoning_content") or message.get("reasoning")
    if plain and not thought and not message.get("tool_calls"):
        return {"role": role, "content": content}
    where, role = f"messages.{index}", _ROLES.get(str(role))
    if role is None:
        raise BadRequest(f"{where}.role: expected one of {', '.join(_ROLES)}", f"{where}.role")
    made: dict[str, Any] = {"role": role, "content": _content(content, f"{where}.content")}
    if calls := objects(message.get("tool_calls"), f"{where}.tool_calls"):
        made["tool_calls"] = calls
    if message.get("tool_call_id") is not None:
        made["tool_call_id"] = text(message["tool_call_id"], f"{where}.tool_call_id")
    if thought and role == "assistant":
        made["reasoning_content"] = text(thought, f"{where}.reasoning_content")
    return made


def _content(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    said = []
    for index, part in enumerate(objects(content, where)):
        kind = str(part.get("type"))
        if kind not in ("text", "refusal"):
            raise refusal(kind, f"{where}.{index}")
        said.append(text(part.get(kind), f"{where}.{index}.{kind}"))
    return "".join(said)


def _tool(tool: Mapping[str, Any], where: str) -> Tool:
    described = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(described, dict):
        raise BadRequest(f"{where}: only functions can be called", where)
    return function(
        described.get("name"), described.get("description"), described.get("parameters"), f"{where}.function"
    )
