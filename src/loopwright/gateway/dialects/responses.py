"""OpenAI Responses: items on the wire, OpenAI's chat format within.

Nothing is kept between requests: `previous_response_id` and its like are refused, so that no agent goes on without
the history that it believes to be there.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loopwright.gateway.dialects import fields, items
from loopwright.gateway.dialects.base import BadRequest, Delta, Dialect, StreamWriter, TurnRequest
from loopwright.gateway.dialects.openai import content_logprobs, error_body, integer, now, sampling_of, with_tops
from loopwright.gateway.sessions.calls import is_object
from loopwright.gateway.sessions.reader import THOUGHT
from loopwright.gateway.sessions.wish import form, openai_wish

if TYPE_CHECKING:
    from loopwright.engines.tokenizer import Tokenizer
    from loopwright.gateway.sessions.session import Turn

_LOGPROBS = "message.output_text.logprobs"
_THOUGHT, _TEXT = "reasoning", "text"
_CODES = {"invalid": "invalid_prompt", "context": "context_length_exceeded", "quota": "rate_limit_exceeded"}


class Responses(Dialect):
    """`POST /v1/responses`."""

    name = "responses"

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> TurnRequest:
        items.check_stateless(body)
        messages = items.messages(body)
        if body.get("input") is None or not messages:
            raise BadRequest("input: at least one item is required", "input")
        given = fields.objects(body.get("tools"), "tools")
        tools = [items.tool(tool, f"tools.{index}") for index, tool in enumerate(given)]
        told, top = body.get("text"), integer(body, "top_logprobs", 0, 20) or 0
        wanted = form(told.get("format") if isinstance(told, Mapping) else None, "text.format")
        return TurnRequest(
            messages,
            with_tops(sampling_of(self.defaults, body, "max_output_tokens"), top),
            tools=tools,
            stream=fields.flag(body, "stream"),
            logprobs=isinstance(include := body.get("include"), list) and _LOGPROBS in include,
            top_logprobs=top,
            model=fields.model(body),
            wish=openai_wish(body, tools, wanted),
        )

    def render(self, ask: TurnRequest, call_id: str, turns: Sequence["Turn"]) -> dict[str, Any]:
        (turn,) = turns
        scores = _scores(self.tokenizer, ask, turn)
        return {**_opened(ask, call_id), **_ended(self.tokenizer, turn), "output": list(_output(turn, call_id, scores))}

    def stream(self, ask: TurnRequest, call_id: str) -> StreamWriter:
        return _Stream(self.tokenizer, ask, call_id)

    def error(self, status: int, message: str, *, kind: str, param: str | None = None) -> dict[str, Any]:
        return error_body(message, kind, param)


def _opened(ask: TurnRequest, call_id: str) -> dict[str, Any]:
    return {
        "id": f"resp_{call_id}",
        "object": "response",
        "created_at": now(),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": ask.sampling.max_tokens,
        "metadata": {},
        "model": ask.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": ask.sampling.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in ask.tools],
        "top_p": ask.sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _ended(tokenizer: "Tokenizer", turn: "Turn") -> dict[str, Any]:
    return {
        "status": _status(turn),
        "incomplete_details": {"reason": "max_output_tokens"} if turn.finish == "length" else None,
        "usage": {
            "input_tokens": turn.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": turn.sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": _thinking(tokenizer, turn)},
            "total_tokens": turn.prompt_tokens + turn.sampled_tokens,
        },
    }


def _thinking(tokenizer: "Tokenizer", turn: "Turn") -> int:
    """How many of the sampled tokens are reasoning, its end included."""
    if not turn.thought:
        return 0
    return bisect_left(range(len(turn.ids)), True, key=lambda count: THOUGHT in tokenizer.decode(turn.ids[:count]))


def _scores(tokenizer: "Tokenizer", ask: TurnRequest, said: "Turn | Delta") -> list[dict[str, Any]]:
    if not ask.logprobs:
        return []
    told = content_logprobs(tokenizer, said.ids, said.logprobs, ask.top_logprobs, said.tops)
    scores: list[dict[str, Any]] = told["content"]
    return scores


def _status(turn: "Turn") -> str:
    return "incomplete" if turn.finish == "length" else "completed"


def _output(turn: "Turn", call_id: str, scores: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    if turn.thought:
        yield {**_reasoning(f"rs_{call_id}"), "status": "completed", "content": [_thought(turn.thought)]}
    # A turn that says nothing is an item too: an agent that sends items back would lose it otherwise.
    if turn.text or not turn.calls:
        part = {**_part(), "text": turn.text, "logprobs": scores}
        yield {**_message(f"msg_{call_id}_0"), "status": _status(turn), "content": [part]}
    for index, call in enumerate(turn.calls):
        made = _call(f"fc_{call_id}_{index}", call["id"], call["function"]["name"])
        arguments = call["function"]["arguments"]
        yield {**made, "status": _called(arguments), "arguments": arguments}


def _message(id: str) -> dict[str, Any]:
    return {"id": id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}


def _reasoning(id: str) -> dict[str, Any]:
    return {"id": id, "type": "reasoning", "status": "in_progress", "summary": [], "content": []}


def _thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _called(arguments: str) -> str:
    """The status of a call, whose arguments may break off."""
    return "completed" if is_object(arguments) else "incomplete"


def _part() -> dict[str, Any]:
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _call(id: str, call_id: str, name: str) -> dict[str, Any]:
    made = {"id": id, "type": "function_call", "call_id": call_id, "name": name, "arguments": ""}
    return {**made, "status": "in_progress"}


class _Stream(StreamWriter):
    """One item after another: each is done before the next one is added."""

    def __init__(self, tokenizer: "Tokenizer", ask: TurnRequest, call_id: str) -> None:
        self._tokenizer, self._ask, self._call_id = tokenizer, ask, call_id
        self._response = _opened(ask, call_id)
        self._done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._place: int | str = ""  # what the open item stands for: a tool call, reasoning or text
        self._said: list[str] = []
        self._scores: list[dict[str, Any]] = []
        self._sequence = 0

    def begin(self, prompt_tokens: int) -> bytes:
        return self._event("response.created", response=self._response) + self._event(
            "response.in_progress", response=self._response
        )

    def piece(self, choice: int, piece: Delta) -> bytes:
        if piece.index is not None:
            events = b""
            if self._open is None or self._place != piece.index:
                events = self._close("completed")
                item = _call(f"fc_{self._call_id}_{piece.index}", piece.id, piece.name)
                events += self._add(item, piece.index)
            return events + self._delta("response.function_call_arguments", piece.arguments)
        if piece.thought:
            events = b""
            if self._open is None or self._place != _THOUGHT:
                events = self._close("completed") + self._add(_reasoning(f"rs_{self._call_id}"), _THOUGHT)
                events += self._item_event("response.content_part.added", content_index=0, part=_thought(""))
            return events + self._delta("response.reasoning_text", piece.thought, content_index=0)
        scores = _scores(self._tokenizer, self._ask, piece)
        if not piece.text:
            self._scores += scores
            return b""
        events = b""
        if self._open is None or self._place != _TEXT:
            events = self._close("completed") + self._speak()
        self._scores += scores
        return events + self._delta("response.output_text", piece.text, content_index=0, logprobs=scores)

    def end(self, turns: Sequence["Turn"]) -> bytes:
        (turn,) = turns
        events = b""
        if not turn.text and not turn.calls and self._place != _TEXT:
            events = self._close("completed") + self._speak()
        events += self._close(_status(turn))
        self._response.update(_ended(self._tokenizer, turn), output=self._done)
        return events + self._event(f"response.{_status(turn)}", response=self._response)

    def fail(self, message: str, *, kind: str) -> bytes:
        code = _CODES.get(kind, "server_error")
        self._response.update(status="failed", error={"code": code, "message": message}, output=self._done)
        failed = self._event("response.failed", response=self._response)
        # A failed response is an event like any other to the SDK; it raises for an `error` alone.
        error = {"type": code, "code": code, "message": message, "param": None}
        return failed + self._event("error", code=code, message=message, param=None, error=error)

    # -- items --------------------------------------------------------------------------------------------------

    def _add(self, item: dict[str, Any], place: int | str) -> bytes:
        self._open, self._place, self._said, self._scores = item, place, [], []
        return self._event("response.output_item.added", output_index=len(self._done), item=item)

    def _speak(self) -> bytes:
        added = self._add(_message(f"msg_{self._call_id}_{len(self._done)}"), _TEXT)
        return added + self._item_event("response.content_part.added", content_index=0, part=_part())

    def _delta(self, kind: str, delta: str, **more: Any) -> bytes:
        if not delta:
            return b""
        self._said.append(delta)
        return self._item_event(f"{kind}.delta", delta=delta, **more)

    def _close(self, status: str) -> bytes:
        """What ends the open item, if there is one."""
        if (item := self._open) is None:
            return b""
        said = "".join(self._said)
        if self._place == _THOUGHT:
            part = _thought(said)
            events = self._item_event("response.reasoning_text.done", content_index=0, text=said)
            events += self._item_event("response.content_part.done", content_index=0, part=part)
            item["content"] = [part]
        elif self._place == _TEXT:
            part = {**_part(), "text": said, "logprobs": self._scores}
            events = self._item_event("response.output_text.done", content_index=0, text=said, logprobs=self._scores)
            events += self._item_event("response.content_part.done", content_index=0, part=part)
            item["content"] = [part]
        else:
            status = _called(said)
            item["arguments"] = said
            events = self._item_event("response.function_call_arguments.done", name=item["name"], arguments=said)
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
