"""OpenAI completions: raw text, or ids, to go on from; no chat template touches it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loopwright.gateway.dialects.base import BadRequest, Delta, Dialect, StreamWriter, TurnRequest
from loopwright.gateway.dialects.fields import flag, model
from loopwright.gateway.dialects.openai import (
    DONE,
    MOST_CHOICES,
    alternatives,
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
from loopwright.gateway.sessions.graph import RAW

if TYPE_CHECKING:
    from loopwright.engines.tokenizer import Tokenizer
    from loopwright.gateway.sessions.session import Turn


class Completions(Dialect):
    """`POST /v1/completions`."""

    name = "completions"

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> TurnRequest:
        for name in ("echo", "suffix"):
            if body.get(name):
                raise BadRequest(f"{name}: not supported", name)
        if (integer(body, "best_of", 1, MOST_CHOICES) or 1) > (integer(body, "n", 1, MOST_CHOICES) or 1):
            raise BadRequest("best_of: not supported; ask for n and choose", "best_of")
        logprobs = integer(body, "logprobs", 0, 20)
        return TurnRequest(
            [{"role": RAW, "content": _prompt(body.get("prompt"), self.tokenizer)}],
            with_tops(sampling_of(self.defaults, body, "max_tokens"), logprobs or 0),
            stop=stop_of(body),
            n=integer(body, "n", 1, MOST_CHOICES) or 1,
            stream=flag(body, "stream"),
            logprobs=logprobs is not None,
            top_logprobs=logprobs or 0,
            include_usage=includes_usage(body),
            model=model(body),
            seed=integer(body, "seed"),
        )

    def render(self, ask: TurnRequest, call_id: str, turns: Sequence["Turn"]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "text": turn.text,
                "logprobs": _logprobs(self.tokenizer, turn, ask) if ask.logprobs else None,
                "finish_reason": "length" if turn.finish == "length" else "stop",
            }
            for index, turn in enumerate(turns)
        ]
        return {**_head(ask, call_id), "choices": choices, "usage": usage(turns)}

    def stream(self, ask: TurnRequest, call_id: str) -> StreamWriter:
        return _Stream(ask, call_id, self.tokenizer)

    def error(self, status: int, message: str, *, kind: str, param: str | None = None) -> dict[str, Any]:
        return error_body(message, kind, param)


class _Stream(StreamWriter):
    """A chunk of text for each piece."""

    def __init__(self, ask: TurnRequest, call_id: str, tokenizer: "Tokenizer") -> None:
        self._ask, self._tokenizer, self._head = ask, tokenizer, _head(ask, call_id)
        self._said = [0] * ask.n

    def begin(self, prompt_tokens: int) -> bytes:
        return b""

    def piece(self, choice: int, piece: Delta) -> bytes:
        if not piece.text and not (self._ask.logprobs and piece.ids):
            return b""
        logprobs = None
        if self._ask.logprobs:
            logprobs = _logprobs(self._tokenizer, piece, self._ask, self._said[choice])
            self._said[choice] += len("".join(logprobs["tokens"]))
        return self._chunk(choice, piece.text, logprobs)

    def _chunk(self, choice: int, text: str, logprobs: Any = None, finish: str | None = None) -> bytes:
        made = {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return event({**self._head, "choices": [made], **({"usage": None} if self._ask.include_usage else {})})

    def end(self, turns: Sequence["Turn"]) -> bytes:
        ends = ["length" if turn.finish == "length" else "stop" for turn in turns]
        events = [self._chunk(index, "", finish=finish) for index, finish in enumerate(ends)]
        if self._ask.include_usage:
            events.append(event({**self._head, "choices": [], "usage": usage(turns)}))
        return b"".join([*events, DONE])

    def fail(self, message: str, *, kind: str) -> bytes:
        return event(error_body(message, kind))


def _head(ask: TurnRequest, call_id: str) -> dict[str, Any]:
    return {"id": f"cmpl-{call_id}", "object": "text_completion", "created": now(), "model": ask.model}


def _prompt(prompt: Any, tokenizer: "Tokenizer") -> str | list[int]:
    """A text or a list of ids; a list that holds one of them is that one."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        if strange := [token for token in (min(prompt), max(prompt)) if not 0 <= token < tokenizer.size]:
            raise BadRequest(f"prompt: {strange[0]} is no token of this model, which has {tokenizer.size}", "prompt")
        return prompt
    raise BadRequest("prompt: expected a text or a list of token ids, and one of them only", "prompt")


def _logprobs(tokenizer: "Tokenizer", said: "Turn | Delta", ask: TurnRequest, start: int = 0) -> dict[str, Any]:
    texts, top = tokenizer.pieces(said.ids), None
    offsets = []
    for text in texts:
        offsets.append(start)
        start += len(text)
    if ask.top_logprobs:
        # The token that was sampled is always among them, as OpenAI has it.
        top = [
            {**dict(alternatives(tokenizer, said.tops, index, ask.top_logprobs)), text: logprob}
            for index, (text, logprob) in enumerate(zip(texts, said.logprobs, strict=True))
        ]
    return {"tokens": texts, "token_logprobs": list(said.logprobs), "top_logprobs": top, "text_offset": offsets}
