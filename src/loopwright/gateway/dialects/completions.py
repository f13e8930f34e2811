"""OpenAI completions: raw text, or ids, to continue; no chat template is applied."""

from collections.abc import Mapping, Sequence
from typing import Any

from loopwright.core.task import Message
from loopwright.engines.tokenizer import Tokenizer
from loopwright.gateway.dialects import fields
from loopwright.gateway.dialects.base import Dialect, StreamWriter, TurnRequest
from loopwright.gateway.dialects.chat import CompletionStream
from loopwright.gateway.dialects.fields import MAX_CHOICES, BadRequest
from loopwright.gateway.dialects.known_fields import KnownFields
from loopwright.gateway.dialects.sampling_fields import sampling
from loopwright.gateway.sessions.graph import RAW
from loopwright.gateway.sessions.turn import Delta, Turn


class Completions(Dialect):
    """`POST /v1/completions`."""

    name = "completions"
    conversation_fields = ("prompt",)
    known_fields = KnownFields(
        "prompt echo n best_of stop logprobs max_tokens stream_options",
        {"suffix": "text can only be continued"},
    )

    def parse_messages(self, body: Mapping[str, Any]) -> list[Message]:
        """The prompts: a text or a list of ids, or a list of either; each is a message."""
        prompts = body.get("prompt")
        if not isinstance(prompts, list) or all(type(token) is int for token in prompts):
            prompts = [prompts]
        if len(prompts) > MAX_CHOICES:
            raise BadRequest(f"prompt: at most {MAX_CHOICES} prompts in a request, got {len(prompts)}", "prompt")
        return [{"role": RAW, "content": self._checked(prompt)} for prompt in prompts]

    def _checked(self, prompt: Any) -> Any:
        """A prompt that is text or has known ids."""
        size = self.tokenizer.size
        is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not prompt or not (isinstance(prompt, str) or is_ids):
            raise BadRequest("prompt: expected a text or a list of token ids, or a list of these", "prompt")
        if is_ids and (unknown := [token for token in (min(prompt), max(prompt)) if not 0 <= token < size]):
            raise BadRequest(f"prompt: {unknown[0]} is not a token of this model, which has {size}", "prompt")
        return prompt

    def parse(self, body: Mapping[str, Any]) -> TurnRequest:
        request = super().parse(body)
        if request.n * len(request.messages) > MAX_CHOICES:
            raise BadRequest(f"n: at most {MAX_CHOICES} choices in a request, over all prompts", "n")
        return request

    def parse_settings(self, body: Mapping[str, Any], messages: Sequence[Message]) -> TurnRequest:
        echo = fields.flag(body, "echo")
        if echo and body.get("logprobs") is not None:
            raise BadRequest("echo: not with logprobs: those of the prompt are not recorded", "echo")
        n = fields.integer(body, "n", 1, MAX_CHOICES) or 1
        if (fields.integer(body, "best_of", 0, MAX_CHOICES) or 1) > n:
            raise BadRequest("best_of: not supported; request n choices and select one yourself", "best_of")
        logprobs = fields.integer(body, "logprobs", 0, 20)
        return TurnRequest(
            messages,
            sampling(self.defaults, body, ("max_tokens",), self.tokenizer.size, top_logprobs=logprobs or 0),
            stop=fields.openai_stop(body),
            n=n,
            stream=fields.flag(body, "stream"),
            logprobs=logprobs is not None,
            top_logprobs=logprobs or 0,
            include_usage=fields.includes_usage(body),
            model=fields.model(body),
            seed=fields.integer(body, "seed"),
            echo={"prompt": True} if echo else {},
        )

    def render(self, request: TurnRequest, call_id: str, turns: Sequence[Turn]) -> dict[str, Any]:
        choices = []
        for index, turn in enumerate(turns):
            logprobs = _logprobs(self.tokenizer, turn, request) if request.logprobs else None
            text = self._echoed(request, index) + turn.text
            choice = _choice(index, text, logprobs, _finish_reason(turn))
            if request.return_token_ids:
                choice |= {"prompt_token_ids": turn.prompt_ids, "token_ids": turn.ids}
            choices.append(choice)
        return {**_head(request, call_id), "choices": choices, "usage": fields.usage(turns, request.n)}

    def _echoed(self, request: TurnRequest, index: int) -> str:
        """The prompt of a choice, if it is part of the response."""
        if not request.echo:
            return ""
        prompt = request.messages[index // request.n]["content"]
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)

    def stream(self, request: TurnRequest, call_id: str) -> StreamWriter:
        prompts = [self._echoed(request, index) for index in range(request.n * len(request.messages))]
        return _Stream(request, self.tokenizer, _head(request, call_id), prompts)


class _Stream(CompletionStream):
    """The prompt of each choice if it is echoed, then a chunk of text for each delta."""

    def __init__(
        self, request: TurnRequest, tokenizer: Tokenizer, head: Mapping[str, Any], echoed: Sequence[str]
    ) -> None:
        super().__init__(request, tokenizer, head)
        self._echoed, self._offsets = echoed, [0] * len(echoed)
        self._started: set[int] = set()

    def begin(self, prompt_tokens: int) -> bytes:
        return b"".join(self._event([_choice(index, text)]) for index, text in enumerate(self._echoed) if text)

    def delta(self, choice: int, delta: Delta) -> bytes:
        if not delta.text and not (delta.ids and (self._request.logprobs or self.prompts)):
            return b""
        logprobs = None
        if self._request.logprobs:
            logprobs = _logprobs(self._tokenizer, delta, self._request, self._offsets[choice])
            self._offsets[choice] += len("".join(logprobs["tokens"]))
        event = _choice(choice, delta.text, logprobs)
        if self.prompts:
            event |= {"token_ids": delta.ids}
            if choice not in self._started:
                event |= {"prompt_token_ids": self.prompts[choice]}
            self._started.add(choice)
        return self._event([event])

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
