"""The HTTP judger: a server of yours is posted what it needs and answers with the reward."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import orjson
from pydantic import Field

from loopwright.core.errors import Problem
from loopwright.core.reward import Reward
from loopwright.rollouts.judgers.base import JudgeFailed, Judger, JudgerConfig, Payload, Verdict
from loopwright.rollouts.judgers.batch import BatchedConfig, one_each, or_failed
from loopwright.rollouts.judgers.client import Client, encoded, problems_with
from loopwright.rollouts.judgers.needs import Needs
from loopwright.rollouts.judgers.verdict_parsing import BadVerdict, as_reward


class HttpJudgerConfig(BatchedConfig):
    """A server that answers `{"reward": 0.5}` or `{"rewards": {"style": 0.2, "truth": 1}}`, which add up.

    With `batch` it is posted an array and answers an array of the same length; `{"error": "why"}` fails one entry.
    """

    type: Literal["http"] = "http"
    url: str
    """Where a JSON object with the needed facts is posted to; with `batch`, an array of such objects."""
    needs: Needs = ("answer", "label")
    """What the server is sent."""
    headers: Mapping[str, str] = Field(default_factory=dict)
    """Sent with each request."""

    def problems(self, home: Path) -> list[Problem]:
        return problems_with(self.url, "url")


class HttpJudger(Judger):
    """Posts and reads."""

    Config: ClassVar[type[JudgerConfig]] = HttpJudgerConfig
    config: HttpJudgerConfig

    def __init__(self, config: HttpJudgerConfig, home: Path) -> None:
        super().__init__(config, home)
        self.needs, self.batch, self.batch_wait_s = config.needs, config.batch, config.batch_wait_s
        self._client = Client(config.concurrency, config.headers)

    async def judge(self, payload: Payload) -> Reward:
        return self._read(await self._client.post(self.config.url, payload.only(self.needs).as_json()))

    async def judge_batch(self, payloads: Sequence[Payload]) -> list[Verdict]:
        # Each by itself, so that an answer that is no JSON, such as half a surrogate pair, harms no other.
        entries = [or_failed(self._entry, payload) for payload in payloads]
        body = [entry for entry in entries if not isinstance(entry, JudgeFailed)]
        found = await self._client.post(self.config.url, body) if body else []
        answers = iter(one_each(found, self.config.label(), len(body)))
        return [e if isinstance(e, JudgeFailed) else or_failed(self._read, next(answers)) for e in entries]

    def _entry(self, payload: Payload) -> orjson.Fragment:
        return orjson.Fragment(encoded(payload.only(self.needs).as_json()))

    def _read(self, answer: Any) -> Reward:
        if isinstance(answer, Mapping) and set(answer) == {"error"}:
            raise BadVerdict(f"judger {self.config.label()!r} gave no verdict: {answer['error']}")
        given = [key for key in ("reward", "rewards") if isinstance(answer, Mapping) and key in answer]
        if len(given) != 1:
            raise BadVerdict(f'{self.config.url} must answer {{"reward": number}} or {{"rewards": {{...}}}}')
        value = answer[given[0]]
        if isinstance(value, Mapping) != (given[0] == "rewards"):
            raise BadVerdict(f"{self.config.url}: `reward` is a number, `rewards` an object of named numbers")
        return as_reward(value, self.config.label())

    async def close(self) -> None:
        await self._client.close()
