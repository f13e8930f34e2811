"""OpenAI Responses: items in requests and responses, OpenAI's chat format internally.

Nothing is stored between requests: `previous_response_id` and similar fields are refused, so that no agent continues
without the history that it relies on.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from loopwright.core.task import Message
from loopwright.engines.tokenizer import Tokenizer
from loopwright.gateway.dialects import fields
from loopwright.gateway.dialects.base import Dialect, StreamWriter, TurnRequest
from loopwright.gateway.dialects.fields import BadRequest
from loopwright.gateway.sessions.tool_calls import Tool
from loopwright.gateway.sessions.turn import Delta, Turn
from loopwright.gateway.sessions.turn_options import TurnOptions, format_instruction
from loopwright.gateway.sessions.turn_parser import END_THINK

_LOGPROBS = "message.output_text.logprobs"
_REASONING, _TEXT = "reasoning", "text"
_ERROR_CODES = {"invalid": "invalid_prompt", "context": "context_length_exceeded", "quota": "rate_limit_exceeded"}
_TEXT_TYPES = ("input_text", "output_text", "text")
_STATEFUL_FIELDS = {
    "previous_response_id": "responses are not stored; send the whole conversation as `input`",
    "conversation": "conversations are not stored; send the whole conversation as `input`",
    "prompt": "prompts are not stored; send it as `instructions` and `input`",
    "background": "a response is sampled while its client waits; stream it",
}


class Responses(Dialect):
    """`POST /v1/responses`."""

    name = "responses"
    conversation_fields = ("input", "instructions")

    def parse_messages(self, body: Mapping[str, Any]) -> list[Message]:
        """Instructions, then the items of the input. The items of one turn become one message."""
        for field, reason in _STATEFUL_FIELDS.items():
            if body.get(field):
                raise BadRequest(f"{field}: not supported: {reason}", field)
        messages: list[Message] = []
        if (instructions := body.get("instructions")) is not None:
            messages.append({"role": "system", "content": fields.text(instructions, "instructions")})
        items = body.get("input")
        if isinstance(items, str):
            return [*messages, {"role": "user", "content": items}]
        turn = _TurnItems()
        for index, item in enumerate(fields.objects(items, "input")):
            where = f"input.{index}"
            if not turn.add(item, where):
                messages += turn.take()
                messages.append(_message_of(item, where))
        messages += turn.take()
        if items is None or not messages:
            raise BadRequest("input: at least one item is required", "input")
        return messages

    def parse_settings(self, body: Mapping[str, Any], messages: Sequence[Message]) -> TurnRequest:
        tools = [_tool(tool, f"tools.{index}") for index, tool in enumerate(fields.objects(body.get("tools"), "tools"))]
        text, include = body.get("text"), body.get("include")
        top = fields.integer(body, "top_logprobs", 0, 20) or 0
        instruction = format_instruction(text.get("format") if isinstance(text, Mapping) else None, "text.format")
        return TurnRequest(
            messages,
            fields.openai_sampling(self.defaults, body, "max_output_tokens", top_logprobs=top),
            tools=tools,
            stream=fields.flag(body, "stream"),
            logprobs=isinstance(include, list) and _LOGPROBS in include,
            top_logprobs=top,
            model=fields.model(body),
            options=TurnOptions.from_openai(body, tools, self.grammar, instruction),
        )

    def render(self, request: TurnRequest, call_id: str, turns: Sequence[Turn]) -> dict[str, Any]:
        (turn,) = turns
        output: list[dict[str, Any]] = []
        if turn.reasoning:
            item = _reasoning_item(f"rs_{call_id}")
            output.append({**item, "status": "completed", "content": [_reasoning_part(turn.reasoning)]})
        # An empty turn is an item too; otherwise an agent that sends items back would lose it.
        if turn.text or not turn.calls:
            part = _text_part(turn.text, _logprobs(self.tokenizer, request, turn))
            output.append({**_message_item(f"msg_{call_id}_0"), "status": _status(turn), "content": [part]})
        for index, call in enumerate(turn.calls):
            arguments = call["function"]["arguments"]
            item = _call_item(f"fc_{call_id}_{index}", call["id"], call["function"]["name"])
            output.append({**item, "status": "completed", "arguments": arguments})
        return {**_head(request, call_id), **_result(self.tokenizer, turn), "output": output}

    def stream(self, request: TurnRequest, call_id: str) -> StreamWriter:
        return _Stream(self.tokenizer, request, call_id)


# -- requests -------------------------------------------------------------------------------------------------------


class _TurnItems:
    """Consecutive items of the policy, combined into messages: one for each turn."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._last = ""

    def add(self, item: Mapping[str, Any], where: str) -> bool:
        """Add an item; False if it is not the policy's."""
        kind = _kind(item)
        if kind == "message" and item.get("role") == "assistant":
            # Two texts in a row are two turns: a turn has its text in one piece, or around its calls.
            message = self._message(new=self._last == "message")
            message["content"] += "".join(_texts(item.get("content"), f"{where}.content"))
        elif kind == "function_call":
            arguments = fields.text(item.get("arguments") or "{}", f"{where}.arguments")
            call = fields.tool_call(item.get("call_id"), item.get("name"), arguments, where)
            self._message().setdefault("tool_calls", []).append(call)
        elif kind == "reasoning":
            message = self._message(new=self._last in ("message", "function_call"))
            parts = fields.objects(item.get("content"), f"{where}.content")
            texts = [fields.text(part.get("text"), f"{where}.content.{index}") for index, part in enumerate(parts)]
            if any(texts):
                message["reasoning_content"] = message.get("reasoning_content", "") + "".join(texts)
        else:
            return False
        self._last = kind
        return True

    def take(self) -> list[Message]:
        """The messages so far; what follows is another turn."""
        messages, self._messages, self._last = self._messages, [], ""
        return list(messages)

    def _message(self, *, new: bool = False) -> dict[str, Any]:
        if new or not self._messages:
            self._messages.append({"role": "assistant", "content": ""})
        return self._messages[-1]


def _kind(item: Mapping[str, Any]) -> str:
    return str(item.get("type") or ("message" if "role" in item else "item_reference"))


def _message_of(item: Mapping[str, Any], where: str) -> Message:
    """The message of an item that is not the policy's."""
    match _kind(item), item.get("role"):
        case "message", ("user" | "system" | "developer") as role:
            content = fields.join_blocks(_texts(item.get("content"), f"{where}.content"))
            return {"role": "user" if role == "user" else "system", "content": content}
        case "message", role:
            expected = "'user', 'assistant', 'system' or 'developer'"
            raise BadRequest(f"{where}.role: expected {expected}, got {role!r:.60}", f"{where}.role")
        case "function_call_output", _:
            output = fields.join_blocks(_texts(item.get("output"), f"{where}.output"))
            call_id = fields.text(item.get("call_id"), f"{where}.call_id")
            return {"role": "tool", "tool_call_id": call_id, "content": output}
        case "item_reference", _:
            raise BadRequest(f"{where}: items are not stored; send the item itself", where)
        case kind, _:
            raise fields.unsupported_content(kind, where)


def _texts(content: Any, where: str) -> list[str]:
    if content is None:
        raise BadRequest(f"{where}: required", where)
    if isinstance(content, str):
        return [content]
    texts = []
    for index, part in enumerate(fields.objects(content, where)):
        kind = part.get("type")
        if kind != "refusal" and kind not in _TEXT_TYPES:
            raise fields.unsupported_content(str(kind), f"{where}.{index}")
        name = "refusal" if kind == "refusal" else "text"
        texts.append(fields.text(part.get(name), f"{where}.{index}.{name}"))
    return texts


def _tool(tool: Mapping[str, Any], where: str) -> Tool:
    if tool.get("type") != "function":
        kind = str(tool.get("type"))
        raise BadRequest(f"{where}: {kind!r} is not supported: only functions are", f"{where}.type")
    return fields.function(tool.get("name"), tool.get("description"), tool.get("parameters"), where)


# -- responses ------------------------------------------------------------------------------------------------------


def _head(request: TurnRequest, call_id: str) -> dict[str, Any]:
    return {
        "id": f"resp_{call_id}",
        "object": "response",
        "created_at": fields.now(),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": request.sampling.max_tokens,
        "metadata": {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": request.sampling.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in request.tools],
        "top_p": request.sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _result(tokenizer: Tokenizer, turn: Turn) -> dict[str, Any]:
    reasoning_tokens = 0
    if turn.reasoning:  # up to the end mark, included
        counts = range(len(turn.ids))
        reasoning_tokens = bisect_left(counts, True, key=lambda count: END_THINK in tokenizer.decode(turn.ids[:count]))
    return {
        "status": _status(turn),
        "incomplete_details": {"reason": "max_output_tokens"} if turn.finish == "length" else None,
        "usage": {
            "input_tokens": turn.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": turn.sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
            "total_tokens": turn.prompt_tokens + turn.sampled_tokens,
        },
    }


def _logprobs(tokenizer: Tokenizer, request: TurnRequest, sampled: Turn | Delta) -> list[dict[str, Any]]:
    if not request.logprobs:
        return []
    top = request.top_logprobs
    entries: list[dict[str, Any]] = fields.content_logprobs(
        tokenizer, sampled.ids, sampled.logprobs, top, sampled.tops
    )["content"]
    return entries


def _status(turn: Turn) -> str:
    return "incomplete" if turn.finish == "length" else "completed"


def _message_item(id: str) -> dict[str, Any]:
    return {"id": id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}


def _reasoning_item(id: str) -> dict[str, Any]:
    return {"id": id, "type": "reasoning", "status": "in_progress", "summary": [], "content": []}


def _call_item(id: str, call_id: str, name: str) -> dict[str, Any]:
    item = {"id": id, "type": "function_call", "call_id": call_id, "name": name, "arguments": ""}
    return {**item, "status": "in_progress"}


def _reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _text_part(text: str = "", logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


class _Stream(StreamWriter):
    """One item after another: each is done before the next one is added."""

    def __init__(self, tokenizer: Tokenizer, request: TurnRequest, call_id: str) -> None:
        self._tokenizer, self._request, self._call_id = tokenizer, request, call_id
        self._response = _head(request, call_id)
        self._done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._place: int | str = ""  # the kind of the open item, or the index of its tool call
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._sequence = 0

    def begin(self, prompt_tokens: int) -> bytes:
        return self._event("response.created", response=self._response) + self._event(
            "response.in_progress", response=self._response
        )

    def delta(self, choice: int, delta: Delta) -> bytes:
        events = b""
        if delta.index is not None:
            if self._open is None or self._place != delta.index:
                item = _call_item(f"fc_{self._call_id}_{delta.index}", delta.id, delta.name)
                events = self._close("completed") + self._add(item, delta.index)
            return events + self._text_delta("response.function_call_arguments", delta.arguments)
        if delta.reasoning:
            if self._open is None or self._place != _REASONING:
                events = self._close("completed") + self._add(_reasoning_item(f"rs_{self._call_id}"), _REASONING)
                part = _reasoning_part("")
                events += self._item_event("response.content_part.added", content_index=0, part=part)
            return events + self._text_delta("response.reasoning_text", delta.reasoning, content_index=0)
        logprobs = _logprobs(self._tokenizer, self._request, delta)
        if delta.text and (self._open is None or self._place != _TEXT):
            events = self._close("completed") + self._add_message()
        self._logprobs += logprobs
        return events + self._text_delta("response.output_text", delta.text, content_index=0, logprobs=logprobs)

    def end(self, turns: Sequence[Turn]) -> bytes:
        (turn,) = turns
        events = b""
        if not turn.text and not turn.calls and self._place != _TEXT:
            events = self._close("completed") + self._add_message()
        events += self._close(_status(turn))
        self._response.update(_result(self._tokenizer, turn), output=self._done)
        return events + self._event(f"response.{_status(turn)}", response=self._response)

    def fail(self, message: str, *, kind: str) -> bytes:
        code = _ERROR_CODES.get(kind, "server_error")
        self._response.update(status="failed", error={"code": code, "message": message}, output=self._done)
        events = self._event("response.failed", response=self._response)
        # The SDK treats a failed response like any other event; it raises only for `error`.
        error = {"type": code, "code": code, "message": message, "param": None}
        return events + self._event("error", code=code, message=message, param=None, error=error)

    def _add(self, item: dict[str, Any], place: int | str) -> bytes:
        self._open, self._place, self._texts, self._logprobs = item, place, [], []
        return self._event("response.output_item.added", output_index=len(self._done), item=item)

    def _add_message(self) -> bytes:
        events = self._add(_message_item(f"msg_{self._call_id}_{len(self._done)}"), _TEXT)
        return events + self._item_event("response.content_part.added", content_index=0, part=_text_part())

    def _text_delta(self, kind: str, delta: str, **more: Any) -> bytes:
        if not delta:
            return b""
        self._texts.append(delta)
        return self._item_event(f"{kind}.delta", delta=delta, **more)

    def _close(self, status: str) -> bytes:
        """The events that end the open item, if there is one."""
        if (item := self._open) is None:
            return b""
        text = "".join(self._texts)
        if self._place == _REASONING:
            part = _reasoning_part(text)
            events = self._item_event("response.reasoning_text.done", content_index=0, text=text)
        elif self._place == _TEXT:
            part = _text_part(text, self._logprobs)
            events = self._item_event("response.output_text.done", content_index=0, text=text, logprobs=self._logprobs)
        else:
            status = "completed"  # only complete calls are shown
            item["arguments"] = text
            events = self._item_event("response.function_call_arguments.done", name=item["name"], arguments=text)
        if self._place in (_REASONING, _TEXT):
            events += self._item_event("response.content_part.done", content_index=0, part=part)
            item["content"] = [part]
        item["status"] = status
        events += self._event("response.output_item.done", output_index=len(self._done), item=item)
        self._done.append(item)
        self._open = None
        return events

    def _item_event(self, kind: str, **data: Any) -> bytes:
        item_id = None if self._open is None else self._open["id"]
        return self._event(kind, item_id=item_id, output_index=len(self._done), **data)

    def _event(self, kind: str, **data: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return fields.event(kind, {"type": kind, "sequence_number": number, **data})
