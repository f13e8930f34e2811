"""OpenAI Responses: items in requests and responses, OpenAI's chat format internally.

What a request refers to (`previous_response_id`, `conversation`, `item_reference`) is answered from the session.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

from loopwright.core.task import Message
from loopwright.engines.tokenizer import Tokenizer
from loopwright.gateway.dialects import fields
from loopwright.gateway.dialects.base import Dialect, StreamWriter, TurnRequest
from loopwright.gateway.dialects.fields import BadRequest, StateNotFound
from loopwright.gateway.dialects.known_fields import KnownFields, ignored_options, recordable
from loopwright.gateway.dialects.response_items import Item, ToolOrigin, custom_input, parse_items, parse_tools
from loopwright.gateway.dialects.sampling_fields import sampling
from loopwright.gateway.sessions.turn import Delta, Turn
from loopwright.gateway.sessions.turn_options import TurnOptions, format_instruction
from loopwright.gateway.sessions.turn_parser import END_THINK

_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")
"""What a client may ask to be included; reasoning is always there, in plain text."""
_REASONING, _TEXT = "reasoning", "text"
_ERROR_CODES = {"invalid": "invalid_prompt", "context": "context_length_exceeded", "quota": "rate_limit_exceeded"}
_ECHOED = (
    "max_tool_calls metadata parallel_tool_calls prompt_cache_key reasoning safety_identifier service_tier store text "
    "tool_choice truncation user"
)
"""The settings that a response repeats."""
_RECORDED = ("metadata", "previous_response_id")
"""What a stored response repeats of its request."""
_LIMITS = ("max_output_tokens", "max_completion_tokens", "max_tokens")


class Responses(Dialect):
    """`POST /v1/responses`."""

    name = "responses"
    conversation_fields = ("input", "instructions", "previous_response_id", "conversation")
    known_fields = KnownFields(
        "input instructions tools tool_choice parallel_tool_calls text include top_logprobs max_output_tokens "
        "max_completion_tokens max_tokens stop previous_response_id conversation",
        {
            "background": "a response is sampled while its client waits; stream it",
            "prompt": "prompts are not stored; send it as `instructions` and `input`",
            "n": "a response has one turn",
        },
        "max_tool_calls stream_options",
    )

    def parse(self, body: Mapping[str, Any]) -> TurnRequest:
        request, conversation = super().parse(body), _conversation_id(body)
        has_instructions = body.get("instructions") is not None
        echo = {"instructions": body.get("instructions"), "previous_response_id": body.get("previous_response_id")}
        if conversation:
            echo["conversation"] = {"id": conversation}
        echo |= {name: value for name, value in request.echo.items() if value is not None}
        recorded = {"created_at": fields.now(), **{name: echo[name] for name in _RECORDED if echo.get(name)}}
        if request.model:
            recorded["model"] = request.model
        if request.tool_origins:
            recorded["origins"] = {name: astuple(origin) for name, origin in request.tool_origins.items()}
        return request._replace(
            conversation=conversation, has_instructions=has_instructions, echo=echo, recorded=recorded
        )

    def parse_messages(self, body: Mapping[str, Any]) -> list[Message]:
        """Instructions, the stored conversation that the request refers to, then the items of the input."""
        messages: list[Message] = []
        if (instructions := body.get("instructions")) is not None:
            messages.append({"role": "system", "content": fields.text(instructions, "instructions")})
        messages += self._stored_messages(body)
        items = body.get("input")
        if isinstance(items, str):
            return [*messages, {"role": "user", "content": items}]
        messages += self.parse_input(fields.objects(items, "input"), "input")
        if items is None or not messages:
            raise BadRequest("input: at least one item is required", "input")
        return messages

    def parse_input(self, items: Sequence[Item], where: str) -> list[Message]:
        """The messages of items, of which some may refer to what the session has."""
        return parse_items(items, where, self._finder())

    def _stored_messages(self, body: Mapping[str, Any]) -> Sequence[Message]:
        """The messages of the response or conversation that a request continues, without their instructions."""
        previous, conversation = body.get("previous_response_id"), _conversation_id(body)
        if previous and conversation:
            raise BadRequest("previous_response_id: send this or a conversation", "previous_response_id")
        if previous:
            name = "previous_response_id"
            stored = self.history.turn(fields.text(previous, name).removeprefix("resp_"))
        elif conversation:
            name, stored = "conversation", self.history.conversation(conversation)
        else:
            return ()
        if stored is None:
            raise StateNotFound(f"{name}: {previous or conversation!r:.100} is not in this session", name)
        return stored.messages[stored.has_instructions :]

    def _finder(self) -> Callable[[str, str], Item]:
        """Finds the items that a request refers to, each in the turn that it is part of."""
        texts_of: set[str] = set()

        def find(id: str, where: str) -> Item:
            kind, _, rest = id.partition("_")
            call_id, _, index = rest.partition("_")
            turn = self.history.message(call_id)
            if turn is not None:
                calls = turn.get("tool_calls") or ()
                match kind:
                    case "rs":
                        return {
                            **_reasoning_item(id),
                            "content": [_reasoning_part(turn.get("reasoning_content") or "")],
                        }
                    case "msg":  # streamed text around calls is several items; the first one stands for all of it
                        text = "" if call_id in texts_of else str(turn["content"] or "")
                        texts_of.add(call_id)
                        return {**_message_item(id), "content": text}
                    case "fc" | "ctc" if index.isdecimal() and int(index) < len(calls):
                        call = calls[int(index)]
                        return {**_call_item(id, call["id"], call["function"]["name"]), **call["function"]}
            raise StateNotFound(f"{where}: item {id!r:.100} is not in this session", where)

        return find

    def parse_settings(self, body: Mapping[str, Any], messages: Sequence[Message]) -> TurnRequest:
        sent_tools = fields.objects(body.get("tools"), "tools")
        tools, origins, ignored = parse_tools(sent_tools)
        text, include = body.get("text"), body.get("include") or []
        if not isinstance(text, Mapping | None):
            raise BadRequest("text: expected an object", "text")
        if not isinstance(include, list):
            raise BadRequest("include: expected a list of texts", "include")
        others = [each for each in include if each not in _INCLUDED]
        limit = next((body[name] for name in _LIMITS if body.get(name) is not None), None)
        top = fields.integer(body, "top_logprobs", 0, 20) or 0
        instruction = format_instruction((text or {}).get("format"), "text.format")
        return TurnRequest(
            messages,
            sampling(self.defaults, body, _LIMITS, self.tokenizer.size, top_logprobs=top),
            tools=tools,
            stop=fields.openai_stop(body),
            stream=fields.flag(body, "stream"),
            logprobs=_LOGPROBS in include,
            top_logprobs=top,
            model=fields.model(body),
            seed=fields.integer(body, "seed"),
            options=TurnOptions.from_openai(body, tools, self.grammar, instruction),
            ignored={
                **ignored_options(text, "text", "format"),
                **({"include": recordable(others)} if others else {}),
                **ignored,
            },
            tool_origins=origins,
            echo={
                **{name: body.get(name) for name in _ECHOED.split()},
                "max_output_tokens": limit,
                "tools": [sent_tool(tool) for tool in sent_tools],
            },
        )

    def render(self, request: TurnRequest, call_id: str, turns: Sequence[Turn]) -> dict[str, Any]:
        (turn,) = turns
        output = output_items(turn, call_id, request.tool_origins, _logprobs(self.tokenizer, request, turn))
        more = fields.token_fields(turn) if request.return_token_ids else {}
        return {**_head(request, call_id), **_result(self.tokenizer, turn), "output": output, **more}

    def stream(self, request: TurnRequest, call_id: str) -> StreamWriter:
        return _Stream(self.tokenizer, request, call_id)


# -- responses ------------------------------------------------------------------------------------------------------


def output_items(
    turn: Turn, call_id: str, origins: Mapping[str, ToolOrigin], logprobs: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """The items of a turn: reasoning, text, and calls of the tools as the client described them."""
    items: list[dict[str, Any]] = []
    if turn.reasoning:
        item = _reasoning_item(f"rs_{call_id}")
        items.append({**item, "status": "completed", "content": [_reasoning_part(turn.reasoning)]})
    # An empty turn is an item too; otherwise an agent that sends items back would lose it.
    if turn.text or not turn.calls:
        part = _text_part(turn.text, logprobs)
        items.append({**_message_item(f"msg_{call_id}_0"), "status": _status(turn), "content": [part]})
    for index, call in enumerate(turn.calls):
        item = _open_call(origins, f"{call_id}_{index}", call["id"], call["function"]["name"])
        items.append(_finish_call(item, call["function"]["arguments"]))
    return items


def _conversation_id(body: Mapping[str, Any]) -> str:
    value = body.get("conversation")
    return fields.text((value.get("id") if isinstance(value, dict) else value) or "", "conversation")


def sent_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as the response repeats it."""
    if tool.get("type") != "function":
        return dict(tool)
    return {"description": None, "parameters": None, **tool, "strict": bool(tool.get("strict"))}


def _head(request: TurnRequest, call_id: str) -> dict[str, Any]:
    """A response that is in progress; it repeats what was requested."""
    sampling = request.sampling
    return {
        "id": f"resp_{call_id}",
        "object": "response",
        "created_at": fields.now(),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": True,
        "prompt_cache_key": None,
        "reasoning": None,
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "top_logprobs": request.top_logprobs,
        "truncation": "disabled",
        "usage": None,
        **request.echo,
    }


def _result(tokenizer: Tokenizer, turn: Turn) -> dict[str, Any]:
    reasoning_tokens = 0
    if turn.reasoning:  # up to the end mark, included
        counts = range(len(turn.ids))
        reasoning_tokens = bisect_left(counts, True, key=lambda count: END_THINK in tokenizer.decode(turn.ids[:count]))
    return {
        "status": _status(turn),
        "completed_at": None if turn.finish == "length" else fields.now(),
        "incomplete_details": {"reason": "max_output_tokens"} if turn.finish == "length" else None,
        "usage": {
            "input_tokens": turn.prompt_tokens,
            "input_tokens_details": {"cached_tokens": turn.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": turn.sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
            "total_tokens": turn.prompt_tokens + turn.sampled_tokens,
        },
    }


def _logprobs(tokenizer: Tokenizer, request: TurnRequest, sampled: Turn | Delta) -> list[dict[str, Any]]:
    if not request.logprobs:
        return []
    result = fields.content_logprobs(tokenizer, sampled, request.top_logprobs, streamed=isinstance(sampled, Delta))
    entries: list[dict[str, Any]] = result["content"]
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


def _open_call(origins: Mapping[str, ToolOrigin], id: str, call_id: str, name: str) -> dict[str, Any]:
    """The item of a call, of the kind that the client described the tool as."""
    origin = origins.get(name)
    if origin is None:
        return _call_item(f"fc_{id}", call_id, name)
    item = {**_call_item(f"fc_{id}", call_id, origin.name)}
    if origin.is_custom:
        del item["arguments"]
        item |= {"id": f"ctc_{id}", "type": "custom_tool_call", "input": ""}
    return item if origin.namespace is None else {**item, "namespace": origin.namespace}


def _finish_call(item: dict[str, Any], arguments: str) -> dict[str, Any]:
    """The item with its arguments."""
    if "input" in item:
        text, is_complete = custom_input(arguments)
        return {**item, "input": text, "status": "completed" if is_complete else "incomplete"}
    return {**item, "arguments": arguments, "status": "completed"}  # only complete calls are shown


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
                item = _open_call(self._request.tool_origins, f"{self._call_id}_{delta.index}", delta.id, delta.name)
                events = self._close("completed") + self._add(item, delta.index)
            if "input" in (self._open or {}):  # written at its end: its JSON is not what the client expects
                self._texts.append(delta.arguments)
                return events
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
        if self.prompts:
            self._response.update(fields.token_fields(turn._replace(prompt_ids=self.prompts[0])))
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
        elif "input" in item:
            item = _finish_call(item, text)
            status, text = item["status"], item["input"]
            events = self._item_event("response.custom_tool_call_input.delta", delta=text)
            events += self._item_event("response.custom_tool_call_input.done", input=text)
        else:
            item = _finish_call(item, text)
            status = item["status"]
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
