"""The Python judger: a function of yours, told what its parameters name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from loopwright.core.config import FUNCTION
from loopwright.core.errors import Problem, did_you_mean, sentence
from loopwright.core.reward import Reward
from loopwright.rollouts.judgers.base import FACTS, JudgeFailed, Judger, JudgerConfig, Payload, Verdict
from loopwright.rollouts.judgers.batch import BatchedConfig, one_each, or_failed
from loopwright.rollouts.judgers.handler import Handler
from loopwright.rollouts.judgers.verdict_parsing import as_reward

PATH = FUNCTION


class PythonJudgerConfig(BatchedConfig):
    """A Python function, synchronous or not. With `batch` it is given a list of each fact and returns a list."""

    type: Literal["python"] = "python"
    function: str = Field(pattern=PATH)
    """`module:function`, imported from the scenario's directory first. Its parameters are named after what it needs:
    answer, label, data_source, task, messages, tokens, turns, extra, episode. It returns a finite number, a bool, a
    Reward or a dict of named parts, which add up."""

    def label(self) -> str:
        return self.name or self.function.rpartition(":")[2].rpartition(".")[2]

    def problems(self, home: Path) -> list[Problem]:
        try:
            needs_of(Handler(self.function, home))
        except (ImportError, TypeError, ValueError) as error:
            return [Problem("function", f"{self.function!r}: {sentence(error)}")]
        return []


class PythonJudger(Judger):
    """Calls the function, in a thread if it is synchronous."""

    Config: ClassVar[type[JudgerConfig]] = PythonJudgerConfig
    config: PythonJudgerConfig

    def __init__(self, config: PythonJudgerConfig, home: Path) -> None:
        super().__init__(config, home)
        self._handler = Handler(config.function, home, threads=config.concurrency)
        self.needs = needs_of(self._handler)
        self.batch, self.batch_wait_s = config.batch, config.batch_wait_s

    async def judge(self, payload: Payload) -> Reward:
        value = await self._handler(**payload.only(self.needs).facts)
        return as_reward(value, self.config.label())

    async def judge_batch(self, payloads: Sequence[Payload]) -> list[Verdict]:
        facts = {name: [getattr(payload, name) for payload in payloads] for name in self.needs}
        values = one_each(await self._handler(**facts), self.config.label(), len(payloads))
        return [or_failed(self._read, value) for value in values]

    def _read(self, value: Any) -> Reward:
        name = self.config.label()
        if isinstance(value, Exception):
            raise JudgeFailed(f"judger {name!r} gave no verdict: {type(value).__name__}: {value}".rstrip(": "))
        return as_reward(value, name)

    async def close(self) -> None:
        self._handler.close()


def needs_of(handler: Handler) -> tuple[str, ...]:
    """What a handler's parameters ask for; ValueError if there is no such fact."""
    names = handler.parameters
    for name in names:
        if name not in FACTS:
            raise ValueError(f"a judger cannot be told {name!r}. {did_you_mean(name, FACTS)}")
    return names
