"""OpenAI chat completions. Their message format is also the one we use internally."""

import secrets
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from loopwright.core.task import Message
from loopwright.engines.tokenizer import Tokenizer
from loopwright.gateway.dialects import fields
from loopwright.gateway.dialects.base import Dialect, StreamWriter, TurnRequest
from loopwright.gateway.dialects.fields import BadRequest
from loopwright.gateway.dialects.known_fields import KnownFields
from loopwright.gateway.dialects.sampling_fields import sampling
from loopwright.gateway.sessions.tool_calls import Tool
from loopwright.gateway.sessions.turn import Delta, Turn
from loopwright.gateway.sessions.turn_options import TurnOptions, format_instruction

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_LIMITS = ("max_completion_tokens", "max_tokens")
_PLAIN_ROLES = ("user", "assistant", "system")
_TEXT = secrets.token_hex(16)
_TEXT_JSON = orjson.dumps(_TEXT)
"""Stands for the text of a chunk; random, because a request chooses the model's name."""
_FUNCTION_ID = "function_call"
"""The id of a call in the form that has none."""


class ChatCompletions(Dialect):
    """`POST /v1/chat/completions`."""

    name = "chat.completions"
    message_fields = frozenset(
        ["role", "content", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "refusal"]
    )
    known_fields = KnownFields(
        "messages tools tool_choice parallel_tool_calls response_format stop n logprobs top_logprobs max_tokens "
        "max_completion_tokens stream_options continue_final_message add_generation_prompt functions function_call",
        {
            "audio": "only text can be sampled",
            "modalities": "only text can be sampled",
            "echo": "the messages are not part of the response",
        },
        "prediction",
    )

    def parse_messages(self, body: Mapping[str, Any]) -> list[Message]:
        items: Any = body.get("messages")
        messages = list(self.bodies.known[1]) if items is self.bodies.known[0] else []
        start = len(messages)
        new = fields.objects(items, "messages", start)
        if not messages and not new:
            raise BadRequest("messages: at least one message is required", "messages")
        messages += [_message(item, index) for index, item in enumerate(new, start)]
        self.bodies.remember(items, messages)
        return messages

    def parse_settings(self, body: Mapping[str, Any], messages: Sequence[Message]) -> TurnRequest:
        if is_legacy := bool(body.get("functions")):
            body = _without_functions(body)
        tools = [_tool(tool, f"tools.{index}") for index, tool in enumerate(fields.objects(body.get("tools"), "tools"))]
        top = fields.integer(body, "top_logprobs", 0, 20) or 0
        instruction = format_instruction(body.get("response_format"), "response_format")
        logprobs, continues = fields.flag(body, "logprobs"), fields.flag(body, "continue_final_message")
        if body.get("add_generation_prompt") is False and not continues:
            raise BadRequest(
                "add_generation_prompt: false needs continue_final_message: true, which continues the last message",
                "add_generation_prompt",
            )
        return TurnRequest(
            messages,
            sampling(self.defaults, body, _LIMITS, self.tokenizer.size, top_logprobs=top),
            tools=tools,
            stop=fields.openai_stop(body),
            n=fields.integer(body, "n", 1, fields.MAX_CHOICES) or 1,
            stream=fields.flag(body, "stream"),
            logprobs=logprobs,
            top_logprobs=top,
            ignored={"top_logprobs": top} if top and not logprobs else {},
            include_usage=fields.includes_usage(body),
            model=fields.model(body),
            seed=fields.integer(body, "seed"),
            options=TurnOptions.from_openai(body, tools, self.grammar, instruction),
            continues=continues,
            calls_functions=is_legacy,
        )

    def render(self, request: TurnRequest, call_id: str, turns: Sequence[Turn]) -> dict[str, Any]:
        choices = []
        for index, turn in enumerate(turns):
            logprobs = None
            if request.logprobs:
                logprobs = fields.content_logprobs(self.tokenizer, turn, request.top_logprobs, streamed=False)
            message = {**turn.message, "content": turn.text or (None if turn.calls else ""), "refusal": None}
            if request.calls_functions and turn.calls:
                message["function_call"] = message.pop("tool_calls")[0]["function"]
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": logprobs,
                    "finish_reason": _finish_reason(request, turn),
                    **({"token_ids": turn.ids} if request.return_token_ids else {}),
                }
            )
        head = _head(request, call_id, "chat.completion")
        prompt = {"prompt_token_ids": turns[0].prompt_ids} if request.return_token_ids else {}
        return {**head, **prompt, "choices": choices, "usage": fields.usage(turns, request.n)}

    def stream(self, request: TurnRequest, call_id: str) -> StreamWriter:
        return _Stream(request, self.tokenizer, _head(request, call_id, "chat.completion.chunk"))


class CompletionStream(StreamWriter):
    """What the streams of both OpenAI completion APIs have in common; `head` is part of every chunk."""

    def __init__(self, request: TurnRequest, tokenizer: Tokenizer, head: Mapping[str, Any]) -> None:
        self._request, self._tokenizer = request, tokenizer
        self._head = {**head, "usage": None} if request.include_usage else head

    def _event(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> bytes:
        return b"data: %b\n\n" % orjson.dumps({**self._head, "choices": choices, **more})

    @abstractmethod
    def last_choice(self, index: int, turn: Turn) -> Mapping[str, Any]:
        """The choice of the chunk with its finish reason."""

    def end(self, turns: Sequence[Turn]) -> bytes:
        events = [self._event([self.last_choice(index, turn)]) for index, turn in enumerate(turns)]
        if self._request.include_usage:
            events.append(self._event([], usage=fields.usage(turns, self._request.n)))
        return b"".join([*events, b"data: [DONE]\n\n"])

    def fail(self, message: str, *, kind: str) -> bytes:
        return b"data: %b\n\n" % orjson.dumps(fields.openai_error(message, kind))


class _Stream(CompletionStream):
    """A role chunk for each choice, deltas, each choice's finish reason, and the usage if requested."""

    def __init__(self, request: TurnRequest, tokenizer: Tokenizer, head: Mapping[str, Any]) -> None:
        super().__init__(request, tokenizer, head)
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        """What every chunk of a choice has before and after its text, if that is all it has."""

    def begin(self, prompt_tokens: int) -> bytes:
        delta = {"role": "assistant", "content": "", "refusal": None}
        prompt = {"prompt_token_ids": self.prompts[0]} if self.prompts else {}
        return b"".join(self._event([_choice(index, delta)], **prompt) for index in range(self._request.n))

    def delta(self, choice: int, delta: Delta) -> bytes:
        content: dict[str, Any] = {}
        if delta.text and not self._request.logprobs and not self.prompts:
            if (frame := self._frames.get(choice)) is None:
                start, _, end = self._event([_choice(choice, {"content": _TEXT})]).rpartition(_TEXT_JSON)
                frame = self._frames[choice] = start, end
            return frame[0] + orjson.dumps(delta.text) + frame[1]
        if delta.index is not None:
            call: dict[str, Any] = {"index": delta.index, "function": {"arguments": delta.arguments}}
            if delta.id:
                call |= {"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}}
            content = {"function_call": call["function"]} if self._request.calls_functions else {"tool_calls": [call]}
        elif delta.text:
            content = {"content": delta.text}
        elif delta.reasoning:
            content = {"reasoning_content": delta.reasoning}
        logprobs = None
        if self._request.logprobs and delta.text:
            logprobs = fields.content_logprobs(self._tokenizer, delta, self._request.top_logprobs, streamed=True)
        elif not content and not (self.prompts and delta.ids):
            return b""
        more = {"token_ids": delta.ids} if self.prompts else {}
        return self._event([{**_choice(choice, content, logprobs=logprobs), **more}])

    def last_choice(self, index: int, turn: Turn) -> Mapping[str, Any]:
        return _choice(index, {}, finish_reason=_finish_reason(self._request, turn))


def _choice(
    index: int, delta: Mapping[str, Any], *, logprobs: Any = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _head(request: TurnRequest, call_id: str, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{call_id}",
        "object": kind,
        "created": int(time.time()),
        "model": request.model,
        "system_fingerprint": None,
    }


def _finish_reason(request: TurnRequest, turn: Turn) -> str:
    if turn.finish == "length" or not turn.calls:
        return "length" if turn.finish == "length" else "stop"
    return "function_call" if request.calls_functions else "tool_calls"


def _without_functions(body: Mapping[str, Any]) -> dict[str, Any]:
    """A request with `functions`, as one with `tools` that calls at most one of them."""
    if body.get("tools"):
        raise BadRequest("functions: send either `functions` or `tools`", "functions")
    functions, choice = fields.objects(body["functions"], "functions"), body.get("function_call")
    tools = [{"type": "function", "function": function} for function in functions]
    choice = {"type": "function", "function": choice} if isinstance(choice, dict) else choice
    return {**body, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}


def _message(message: Mapping[str, Any], index: int) -> Message:
    """A message with the fields that we use; text parts may be a list."""
    role, content = message.get("role"), message.get("content")
    is_plain = role in _PLAIN_ROLES and type(content) is str
    if is_plain and len(message) == 2:
        return message  # as almost all are; a long history passes here in every turn
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if is_plain and not reasoning and not message.get("tool_calls") and not message.get("function_call"):
        return {"role": role, "content": content}
    if role == "function":  # as one with a tool call, of which there is one at a time
        role, message = "tool", {"tool_call_id": _FUNCTION_ID}
    elif message.get("function_call"):
        call = {"id": _FUNCTION_ID, "type": "function", "function": message["function_call"]}
        message = {**message, "tool_calls": [call]}
    where, role = f"messages.{index}", _ROLES.get(str(role))
    if role is None:
        raise BadRequest(f"{where}.role: expected one of {', '.join(_ROLES)}", f"{where}.role")
    result: dict[str, Any] = {"role": role, "content": _content(content, f"{where}.content")}
    if calls := fields.objects(message.get("tool_calls"), f"{where}.tool_calls"):
        result["tool_calls"] = calls
    if message.get("tool_call_id") is not None:
        result["tool_call_id"] = fields.text(message["tool_call_id"], f"{where}.tool_call_id")
    if reasoning and role == "assistant":
        result["reasoning_content"] = fields.text(reasoning, f"{where}.reasoning_content")
    return result


def _content(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(fields.objects(content, where)):
        kind = str(part.get("type"))
        if kind not in ("text", "refusal"):
            raise fields.unsupported_content(kind, f"{where}.{index}")
        texts.append(fields.text(part.get(kind), f"{where}.{index}.{kind}"))
    return "".join(texts)


def _tool(tool: Mapping[str, Any], where: str) -> Tool:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise BadRequest(f"{where}: only functions are supported", where)
    where = f"{where}.function"
    return fields.function(function.get("name"), function.get("description"), function.get("parameters"), where)
