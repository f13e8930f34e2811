"""OpenAI completions: raw text, or ids, to continue; no chat template is applied."""

from collections.abc import Mapping, Sequence
from typing import Any

from loopwright.core.task import Message
from loopwright.engines.tokenizer import Tokenizer
from loopwright.gateway.dialects import fields
from loopwright.gateway.dialects.base import Dialect, StreamWriter, TurnRequest
from loopwright.gateway.dialects.chat import CompletionStream
from loopwright.gateway.dialects.fields import MAX_CHOICES, BadRequest
from loopwright.gateway.sessions.graph import RAW
from loopwright.gateway.sessions.turn import Delta, Turn


class Completions(Dialect):
    """`POST /v1/completions`."""

    name = "completions"
    conversation_fields = ("prompt",)

    def parse_messages(self, body: Mapping[str, Any]) -> list[Message]:
        """The prompt: a text or a list of ids; a list with only one of them is that one."""
        prompt, size = body.get("prompt"), self.tokenizer.size
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not prompt or not (isinstance(prompt, str) or is_ids):
            raise BadRequest("prompt: expected one text, or one list of token ids", "prompt")
        if is_ids and (unknown := [token for token in (min(prompt), max(prompt)) if not 0 <= token < size]):
            raise BadRequest(f"prompt: {unknown[0]} is not a token of this model, which has {size}", "prompt")
        return [{"role": RAW, "content": prompt}]

    def parse_settings(self, body: Mapping[str, Any], messages: Sequence[Message]) -> TurnRequest:
        for name in ("echo", "suffix"):
            if body.get(name):
                raise BadRequest(f"{name}: not supported", name)
        n = fields.integer(body, "n", 1, MAX_CHOICES) or 1
        if (fields.integer(body, "best_of", 1, MAX_CHOICES) or 1) > n:
            raise BadRequest("best_of: not supported; request n choices and select one yourself", "best_of")
        logprobs = fields.integer(body, "logprobs", 0, 20)
        return TurnRequest(
            messages,
            fields.openai_sampling(self.defaults, body, "max_tokens", top_logprobs=logprobs or 0),
            stop=fields.openai_stop(body),
            n=n,
            stream=fields.flag(body, "stream"),
            logprobs=logprobs is not None,
            top_logprobs=logprobs or 0,
            include_usage=fields.includes_usage(body),
            model=fields.model(body),
            seed=fields.integer(body, "seed"),
        )

    def render(self, request: TurnRequest, call_id: str, turns: Sequence[Turn]) -> dict[str, Any]:
        choices = []
        for index, turn in enumerate(turns):
            logprobs = _logprobs(self.tokenizer, turn, request) if request.logprobs else None
            choices.append(_choice(index, turn.text, logprobs, _finish_reason(turn)))
        return {**_head(request, call_id), "choices": choices, "usage": fields.usage(turns)}

    def stream(self, request: TurnRequest, call_id: str) -> StreamWriter:
        return _Stream(request, self.tokenizer, _head(request, call_id))


class _Stream(CompletionStream):
    """A chunk of text for each delta."""

    def begin(self, prompt_tokens: int) -> bytes:
        self._offsets = [0] * self._request.n
        return b""

    def delta(self, choice: int, delta: Delta) -> bytes:
        if not delta.text and not (self._request.logprobs and delta.ids):
            return b""
        logprobs = None
        if self._request.logprobs:
            logprobs = _logprobs(self._tokenizer, delta, self._request, self._offsets[choice])
            self._offsets[choice] += len("".join(logprobs["tokens"]))
        return self._event([_choice(choice, delta.text, logprobs)])

    def last_choice(self, index: int, turn: Turn) -> Mapping[str, Any]:
        return _choice(index, "", finish_reason=_finish_reason(turn))


def _choice(index: int, text: str, logprobs: Any = None, finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _finish_reason(turn: Turn) -> str:
    return "length" if turn.finish == "length" else "stop"


def _head(request: TurnRequest, call_id: str) -> dict[str, Any]:
    return {"id": f"cmpl-{call_id}", "object": "text_completion", "created": fields.now(), "model": request.model}


def _logprobs(tokenizer: Tokenizer, sampled: Turn | Delta, request: TurnRequest, start: int = 0) -> dict[str, Any]:
    texts, top = tokenizer.pieces(sampled.ids), None
    offsets = []
    for text in texts:
        offsets.append(start)
        start += len(text)
    if request.top_logprobs:
        # The sampled token is always among them, as with OpenAI.
        top = [
            {**dict(fields.alternatives(tokenizer, sampled.tops, index, request.top_logprobs)), text: logprob}
            for index, (text, logprob) in enumerate(zip(texts, sampled.logprobs, strict=True))
        ]
    return {"tokens": texts, "token_logprobs": list(sampled.logprobs), "top_logprobs": top, "text_offset": offsets}
