"""Anthropic Messages: content blocks in requests and responses, OpenAI's chat format internally.

A message with tool results becomes one `tool` message for each; thinking is kept beside the text. If the last message
is the assistant's (a prefill), the turn starts with its text, and the response is what follows.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from loopwright.core.task import Message
from loopwright.gateway.dialects import fields
from loopwright.gateway.dialects.base import Dialect, StoredConversation, StreamWriter, TurnRequest, continue_message
from loopwright.gateway.dialects.fields import BadRequest, StateNotFound
from loopwright.gateway.dialects.known_fields import KnownFields, ignored_options, recordable
from loopwright.gateway.dialects.sampling_fields import sampling
from loopwright.gateway.sessions.tool_calls import Tool
from loopwright.gateway.sessions.turn import Delta, Turn
from loopwright.gateway.sessions.turn_options import TurnOptions, format_instruction

_ERROR_TYPES = {
    "invalid": "invalid_request_error",
    "authentication": "authentication_error",
    "permission": "permission_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "closed": "permission_error",
    "quota": "rate_limit_error",
    "context": "invalid_request_error",
    "state": "not_found_error",
    "engine": "overloaded_error",
    "internal": "api_error",
}
_NO_CACHE = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
_SIGNATURE = "loopwright"
"""SDKs and agents expect a signature after thinking; the gateway does not check it."""
# Some agents put a number into it that changes with each request, so that no prefix would ever match.
_NONCE = re.compile(r"^x-anthropic-billing-header:[^\n]*\n?", re.MULTILINE | re.IGNORECASE)


class Messages(Dialect):
    """`POST /v1/messages` and `/v1/messages/count_tokens`."""

    name = "messages"
    conversation_fields = ("messages", "system", "thread")
    known_fields = KnownFields(
        "messages system max_tokens tools tool_choice stop_sequences output_config output_format thread "
        "context_management thinking",
        {
            "mcp_servers": "tools run on the client's side; describe them in `tools`",
            "container": "tools run on the client's side; describe them in `tools`",
            "compaction": "conversations are not summarized here; summarize it with a turn of your own",
            "stop": "send `stop_sequences`",
            "n": "a message is one turn",
        },
        "inference_geo speed betas anthropic_beta diagnostics fallbacks fallback_credit_token user_profile_id "
        "workspace_id",
    )

    def parse(self, body: Mapping[str, Any]) -> TurnRequest:
        request = super().parse(self._continued(body))
        last = request.messages[-1]
        if last["role"] != "assistant":
            return request
        if str(last["content"]) != str(last["content"]).rstrip():
            raise BadRequest("messages: a prefill cannot end with white space", "messages")
        return continue_message(request)

    def _continued(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The body of a request that continues a thread, with the tools that the thread was created with."""
        if (stored := self._thread(body)) is None:
            return body
        for name in ("system", "tools"):
            if body.get(name):
                raise BadRequest(f"{name}: a thread keeps what it was created with; leave it out", name)
        if not body.get("messages"):
            raise BadRequest("messages: at least one new message is required", "messages")
        functions = [tool["function"] for tool in stored.tools]
        return {**body, "tools": [{**each, "input_schema": each["parameters"]} for each in functions]}

    def _thread(self, body: Mapping[str, Any]) -> StoredConversation | None:
        """The conversation that a request continues; None if it sends its own."""
        thread = body.get("thread") or {"type": "create"}
        match thread.get("type") if isinstance(thread, dict) else None:
            case "create":
                return None
            case "continue":
                previous = fields.text(thread.get("previous_message_id"), "thread.previous_message_id")
                if (stored := self.history.turn(previous.removeprefix("msg_"))) is None:
                    raise StateNotFound(f"thread: {previous!r:.100} is not in this session", "thread")
                return stored
            case _:
                raise BadRequest("thread: expected an object of type create or continue", "thread")

    def parse_messages(self, body: Mapping[str, Any]) -> list[Message]:
        messages = list(_system(body.get("system"), "system"))
        if (stored := self._thread(body)) is not None:
            messages += stored.messages
        for index, message in enumerate(fields.objects(body.get("messages"), "messages")):
            messages += _messages(message, f"messages.{index}")
        if not messages:
            raise BadRequest("messages: at least one message is required", "messages")
        return messages

    def parse_settings(self, body: Mapping[str, Any], messages: Sequence[Message]) -> TurnRequest:
        tools = [_tool(tool, f"tools.{index}") for index, tool in enumerate(fields.objects(body.get("tools"), "tools"))]
        stops = body.get("stop_sequences")
        if not isinstance(stops, list | None):
            raise BadRequest("stop_sequences: expected a list of texts", "stop_sequences")
        choice = body.get("tool_choice")
        if not isinstance(choice, dict | None):
            raise BadRequest("tool_choice: expected an object", "tool_choice")
        choice, output = choice or {}, body.get("output_config")
        response_format = output.get("format") if isinstance(output, Mapping) else body.get("output_format")
        # Thinking that is asked for is ignored: whether a policy reasons is up to the policy.
        thinking = body["thinking"].get("type") if isinstance(body.get("thinking"), dict) else None
        return TurnRequest(
            messages,
            sampling(self.defaults, body, ("max_tokens",), self.tokenizer.size),
            tools=tools,
            stop=fields.checked_stops(
                fields.non_empty_text(stop, f"stop_sequences.{index}") for index, stop in enumerate(stops or ())
            ),
            stream=fields.flag(body, "stream"),
            model=fields.model(body),
            seed=fields.integer(body, "seed"),
            ignored={
                **ignored_options(output, "output_config", "format"),
                **({} if thinking in (None, "disabled") else {"thinking": body["thinking"]}),
                **_ignored_edits(body.get("context_management")),
            },
            options=TurnOptions.from_tool_choice(
                choice.get("type"),
                choice.get("name"),
                tools,
                self.grammar,
                single=choice.get("disable_parallel_tool_use") is True,
                instruction=format_instruction(response_format, "output_config.format"),
            ),
        )

    def render(self, request: TurnRequest, call_id: str, turns: Sequence[Turn]) -> dict[str, Any]:
        (turn,) = turns
        content: list[dict[str, Any]] = []
        if turn.reasoning:
            content.append({"type": "thinking", "thinking": turn.reasoning, "signature": _SIGNATURE})
        if turn.text:
            content.append({"type": "text", "text": turn.text})
        for call in turn.calls:
            function = call["function"]
            arguments = json.loads(function["arguments"])  # not with orjson, which rounds long integers
            content.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
        more = {"usage": _usage(turn), **(fields.token_fields(turn) if request.return_token_ids else {})}
        return {**_head(request, call_id), "content": content, **_stop_reason(turn), **more}

    def stream(self, request: TurnRequest, call_id: str) -> StreamWriter:
        return _Stream(request, call_id)

    def error(self, message: str, *, kind: str, param: str | None = None) -> dict[str, Any]:
        return _error(message, kind)


# -- requests -------------------------------------------------------------------------------------------------------


def _system(value: Any, where: str) -> Iterator[Message]:
    """The system message, if anything is left of it without the nonce."""
    texts = [_NONCE.sub("", text) for text in _texts(value, where)]
    if content := fields.join_blocks([text for text in texts if text]):
        yield {"role": "system", "content": content}


def _messages(message: Mapping[str, Any], where: str) -> Iterator[Message]:
    """A message of a request; tool results in it become separate messages."""
    role, content = message.get("role"), message.get("content")
    if content is None:
        raise BadRequest(f"{where}.content: required", f"{where}.content")
    match role:
        case "user":
            yield from _user(content, f"{where}.content")
        case "assistant":
            yield _assistant(content, f"{where}.content")
        case "system":
            yield from _system(content, f"{where}.content")
        case _:
            raise BadRequest(f"{where}.role: expected 'user' or 'assistant', got {role!r:.60}", f"{where}.role")


def _user(content: Any, where: str) -> Iterator[Message]:
    """Each tool result is a separate message, and so is the text before, between and after them."""
    if isinstance(content, str):
        yield {"role": "user", "content": content}
        return
    texts: list[str] = []
    has_results = False
    for index, block in enumerate(fields.objects(content, where)):
        at = f"{where}.{index}"
        if block.get("type") != "tool_result":
            texts.append(_text(block, at))
            continue
        if texts:
            yield {"role": "user", "content": fields.join_blocks(texts)}
        texts, has_results = [], True
        call_id = fields.text(block.get("tool_use_id"), f"{at}.tool_use_id")
        result = fields.join_blocks(_texts(block.get("content"), f"{at}.content"))
        yield {"role": "tool", "tool_call_id": call_id, "content": result}
    if texts or not has_results:
        yield {"role": "user", "content": fields.join_blocks(texts)}


def _assistant(content: Any, where: str) -> Message:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts, reasoning, calls = [], [], []
    for index, block in enumerate(fields.objects(content, where)):
        at = f"{where}.{index}"
        match block.get("type"):
            case "tool_use":
                arguments = fields.to_json(block.get("input") or {}, f"{at}.input")
                calls.append(fields.tool_call(block.get("id"), block.get("name"), arguments, at))
            case "thinking":
                reasoning.append(fields.text(block.get("thinking"), f"{at}.thinking"))
            case "redacted_thinking":
                pass  # encrypted, and not from this gateway
            case _:
                texts.append(_text(block, at))
    # As it was sampled: the policy's blocks follow each other without a gap.
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _texts(content: Any, where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [_text(block, f"{where}.{index}") for index, block in enumerate(fields.objects(content, where))]


def _text(block: Mapping[str, Any], where: str) -> str:
    if block.get("type") != "text":
        raise fields.unsupported_content(str(block.get("type")), where)
    return fields.text(block.get("text"), f"{where}.text")


def _tool(tool: Mapping[str, Any], where: str) -> Tool:
    if tool.get("type") not in (None, "custom"):
        kind = str(tool["type"])
        raise BadRequest(f"{where}: {kind!r} runs on Anthropic's servers; describe it with an input_schema", where)
    return fields.function(tool.get("name"), tool.get("description"), tool.get("input_schema"), where)


def _ignored_edits(value: Any) -> dict[str, Any]:
    """The edits of `context_management` that would change the conversation: they are skipped."""
    if not isinstance(value, dict | None):
        raise BadRequest("context_management: expected an object", "context_management")
    edits = fields.objects((value or {}).get("edits"), "context_management.edits")
    return {
        f"context_management.{edit.get('type')}": recordable(edit)
        for edit in edits
        if edit.get("type") != "clear_thinking_20251015" or edit.get("keep") not in ("all", {"type": "all"})
    }


# -- responses ------------------------------------------------------------------------------------------------------


def _head(request: TurnRequest, call_id: str, prompt_tokens: int = 0) -> dict[str, Any]:
    return {
        "id": f"msg_{call_id}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**_NO_CACHE, "input_tokens": prompt_tokens, "output_tokens": 0},
    }


def _usage(turn: Turn) -> dict[str, Any]:
    """Anthropic counts cached tokens beside the other ones of the prompt."""
    cached, rest = turn.cached_tokens, turn.prompt_tokens - turn.cached_tokens
    cache = {**_NO_CACHE, "cache_read_input_tokens": cached}
    return {**cache, "input_tokens": rest, "output_tokens": turn.sampled_tokens}


def _stop_reason(turn: Turn) -> dict[str, Any]:
    if turn.stopped_by is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": turn.stopped_by}
    reason = "max_tokens" if turn.finish == "length" else "tool_use" if turn.calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def _error(message: str, kind: str) -> dict[str, Any]:
    if kind == "context":
        message = f"prompt is too long: {message}"  # the words that agents look for
    error: dict[str, Any] = {"type": _ERROR_TYPES.get(kind, "api_error"), "message": message}
    if kind == "state":
        error["details"] = {"error_code": "thread_not_found"}  # for which the SDK sends everything again
    return {"type": "error", "error": error}


def models_response(names: Sequence[str]) -> dict[str, Any]:
    """The response of `models`, for SDKs that send `anthropic-version`."""
    since = "1970-01-01T00:00:00Z"
    data = [
        {"type": "model", "id": name, "display_name": name, "created_at": since, "lifecycle": "active"}
        for name in names
    ]
    first, last = (names[0], names[-1]) if names else (None, None)
    return {"data": data, "has_more": False, "first_id": first, "last_id": last}


class _Stream(StreamWriter):
    """One block after another: each is closed before the next one opens."""

    def __init__(self, request: TurnRequest, call_id: str) -> None:
        self._request, self._call_id = request, call_id
        self._open: int | str | None = None  # the open block: a tool call's index, or a kind
        self._index = -1

    def begin(self, prompt_tokens: int) -> bytes:
        return _event({"type": "message_start", "message": _head(self._request, self._call_id, prompt_tokens)})

    def delta(self, choice: int, delta: Delta) -> bytes:
        if delta.index is not None:
            events = self._at(delta.index, {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}})
            if delta.arguments:
                events += self._delta({"type": "input_json_delta", "partial_json": delta.arguments})
            return events
        if delta.reasoning:
            events = self._at("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            return events + self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        if not delta.text:
            return b""
        return self._at("text", {"type": "text", "text": ""}) + self._delta({"type": "text_delta", "text": delta.text})

    def end(self, turns: Sequence[Turn]) -> bytes:
        (turn,) = turns
        last = {"type": "message_delta", "delta": _stop_reason(turn), "usage": _usage(turn)}
        if self.prompts:
            last |= fields.token_fields(turn._replace(prompt_ids=self.prompts[0]))
        return self._close() + _event(last) + _event({"type": "message_stop"})

    def fail(self, message: str, *, kind: str) -> bytes:
        return _event(_error(message, kind))

    def _at(self, place: int | str, block: Mapping[str, Any]) -> bytes:
        """Open a block, unless it is the one that is open."""
        if self._open == place:
            return b""
        events = self._close()
        self._open = place
        self._index += 1
        return events + _event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signature = b""
        if self._open == "thinking":
            signature = self._delta({"type": "signature_delta", "signature": _SIGNATURE})
        self._open = None
        return signature + _event({"type": "content_block_stop", "index": self._index})


def _event(data: Mapping[str, Any]) -> bytes:
    return fields.event(data["type"], data)
