"""The bases of all judgers, what a judger reads of an episode, and its configuration.

Subclass `Judger` to score one episode at a time, `BatchJudger` to score unrelated episodes together, or `GroupJudger`
to compare the episodes of one group.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny

from loopwright.core.episode import Episode
from loopwright.core.errors import LoopwrightError, Problem, did_you_mean
from loopwright.core.registry import Registry, config_parser
from loopwright.core.task import Task
from loopwright.core.trial import Reward
from loopwright.rollouts.pools.resources import PlacementConfig

FACTS = ("answer", "label", "data_source", "task", "messages", "tokens", "turns", "extra", "evidence", "episode")
"""What a judger can need. `task` is the task's prompt, `tokens` the number of sampled tokens, `evidence` what the loop
recorded for judgers, `episode` everything."""


class JudgeFailed(LoopwrightError, RuntimeError):
    """A judger gave no verdict. The episode then has no reward, which is not a reward of zero."""


Verdict = Reward | JudgeFailed
"""The result for one episode of several. A failure is a value here, so that the other episodes keep their rewards."""


def check_facts(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names, if all of them are facts of an episode; ValueError otherwise."""
    for name in names:
        if name not in FACTS:
            raise ValueError(f"{name!r} is not a fact of an episode. {did_you_mean(name, FACTS)}")
    return names


Needs = Annotated[tuple[str, ...], AfterValidator(check_facts)]
"""A config field that lists facts."""


@dataclass(frozen=True, slots=True)
class Payload:
    """The facts of an episode that a judger needs. Only these are sent to another process.

    Each fact is an attribute: `payload.answer`.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name == "facts":  # copy and pickle look it up before it is set
            raise AttributeError(name)
        try:
            return self.facts[name]
        except KeyError:
            raise AttributeError(f"the judger did not ask for {name!r}; add it to its `needs`") from None

    @classmethod
    def of(cls, episode: Episode, needs: Sequence[str]) -> "Payload":
        """The needed facts of an episode."""
        return cls({name: _fact(episode, name) for name in needs})

    def only(self, needs: Sequence[str]) -> "Payload":
        """A payload with only these facts."""
        return Payload({name: getattr(self, name) for name in needs})

    def copy(self) -> "Payload":
        """A copy that a judger may change: the task and the recorded messages stay as they are."""
        return Payload({name: _copy(fact) for name, fact in self.facts.items()})

    def as_json(self) -> dict[str, Any]:
        """The facts as plain data."""
        return {name: _plain_data(fact) for name, fact in self.facts.items()}


def _fact(episode: Episode, name: str) -> Any:
    match name:
        case "answer" | "turns" | "evidence":
            return getattr(episode, name)
        case "label" | "data_source" | "extra":
            return getattr(episode.task, name)
        case "task":
            return list(episode.task.messages)
        case "messages":
            return episode.messages()
        case "tokens":
            return episode.sampled
        case "episode":
            return episode
    raise ValueError(f"{name!r} is not a fact of an episode; the facts are {', '.join(FACTS)}")


def _copy(fact: Any) -> Any:
    """A copy of plain data and of an episode's task; other objects as they are."""
    if isinstance(fact, dict):
        return {name: _copy(value) for name, value in fact.items()}
    if isinstance(fact, list):
        return [_copy(value) for value in fact]
    return replace(fact, task=deepcopy(fact.task)) if isinstance(fact, Episode) else fact


def _plain_data(fact: Any) -> Any:
    """Episodes, read-only mappings and tuples as dicts and lists."""
    if isinstance(fact, Episode):
        return fact.as_json()
    if isinstance(fact, Mapping):
        return {str(name): _plain_data(value) for name, value in fact.items()}
    return [_plain_data(value) for value in fact] if isinstance(fact, list | tuple) else fact


MAX_PAUSE_S = 30.0


class JudgerConfig(PlacementConfig):
    """The keys that every judger has."""

    type: str
    name: str | None = None
    """The name of this judger's part of the reward; without it, its function's name or its type."""
    weight: float = 1.0
    """Factor applied to its reward; negative for a penalty."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds for one attempt at a verdict."""
    retries: int = Field(default=2, ge=0)
    """How often a failed verdict is attempted again, each time after twice the pause."""
    pause_s: float = Field(default=0.5, ge=0)
    """Seconds before the first retry, plus or minus half of it at random, so that retries spread out."""
    breaker: int = Field(default=20, ge=0)
    """After this many consecutive failures the judger counts as down and verdicts fail at once; 0: never."""
    cooldown_s: float = Field(default=30.0, ge=0)
    """Seconds until a judger that is down gets one verdict to prove itself."""
    concurrency: int = Field(default=64, ge=1)
    """How many verdicts each worker works on at a time."""

    def label(self) -> str:
        """The name of its part of the reward."""
        return self.name or self.type

    def problems(self, scenario_dir: Path) -> list[Problem]:
        """What is wrong with this config; checked before anything starts."""
        return []

    def routing_problems(self, data_sources: Iterable[str]) -> list[Problem]:
        """A problem for each data source of the tasks that it cannot judge."""
        return []

    def members(self) -> "dict[str, JudgerConfig]":
        """The judgers that it consists of, by their keys."""
        return {}

    def placements(self, name: str) -> "dict[str, JudgerConfig]":
        """What has its own workers, by its name in messages: the judger, or some that it consists of."""
        members = self.members().items()
        return {name: self} | {
            path: part for key, member in members for path, part in member.placements(f"{name} {key}").items()
        }

    def required_evidence(self) -> set[str]:
        """The names of the evidence that a loop must record for it."""
        return set()

    def task_problem(self, task: Task) -> str:
        """Why it cannot judge this task; empty if it can. Only used if it requires evidence."""
        return ""

    def attempt_timeout_s(self) -> float:
        """Seconds after which an attempt is cancelled from outside."""
        return self.timeout_s

    def total_timeout_s(self) -> float:
        """Seconds within which a verdict exists or has failed, including all retries and pauses."""
        pauses_s = sum(1.5 * min(self.pause_s * 2**number, MAX_PAUSE_S) for number in range(self.retries))
        return float((self.retries + 1) * self.attempt_timeout_s() + pauses_s)

    def capacity(self) -> int:
        """How many verdicts a worker can work on at a time without queueing."""
        return self.concurrency


class BatchJudgerConfig(JudgerConfig):
    """A judger that can judge several payloads at a time. A batch is timed, retried and counted as one attempt."""

    batch: int = Field(default=1, ge=1)
    """How many payloads it is given at a time at most; 1: one by one."""
    batch_wait_s: float = Field(default=0.01, ge=0)
    """Seconds that the first payload of a batch waits for others, unless the batch is full before."""

    def total_timeout_s(self) -> float:
        return super().total_timeout_s() + (self.batch_wait_s if self.batch > 1 else 0.0)

    def capacity(self) -> int:
        return self.concurrency * self.batch


class BaseJudger:
    """What all judgers share. Subclass `Judger`, `BatchJudger` or `GroupJudger`."""

    Config: ClassVar[type[JudgerConfig]] = JudgerConfig
    needs: tuple[str, ...] = ("answer", "label")
    """The facts of an episode that it reads."""
    combines: bool = False
    """Whether it only combines other judgers' verdicts. Those have their own timeouts and retries, so it has none."""

    def __init__(self, config: Any = None, scenario_dir: Path = Path()) -> None:
        if config is None:
            has_type = not self.Config.model_fields["type"].is_required()
            config = self.Config() if has_type else self.Config(type=type(self).__name__)  # type: ignore[call-arg]
        self.config, self.scenario_dir = config, scenario_dir

    @classmethod
    def build(cls, config: Any, scenario_dir: Path) -> "BaseJudger":
        """The judger for a config; the place to choose between classes by configuration."""
        return cls(config, scenario_dir)

    async def close(self) -> None:
        """Release all resources."""


class Judger(BaseJudger, ABC):
    """Turns an episode into a reward.

    class Exact(Judger):
        async def judge(self, payload: Payload) -> Reward:
            return Reward(float(payload.answer == payload.label))
    """

    @abstractmethod
    async def judge(self, payload: Payload) -> Reward:
        """The reward of one episode. An exception means no verdict, which is retried and never counts as zero."""


class BatchJudger(BaseJudger, ABC):
    """Judges several unrelated episodes in one call.

    class Lengths(BatchJudger):
        needs = ("tokens",)

        async def judge_batch(self, payloads: Sequence[Payload]) -> Sequence[Verdict]:
            return [Reward(float(payload.tokens)) for payload in payloads]

    Its config is a `BatchJudgerConfig`, which limits the size of a batch.
    """

    Config: ClassVar[type[JudgerConfig]] = BatchJudgerConfig
    config: BatchJudgerConfig

    @abstractmethod
    async def judge_batch(self, payloads: Sequence[Payload]) -> Sequence[Verdict]:
        """The verdicts in the order of the payloads; an exception fails all of them."""


class GroupJudger(BaseJudger, ABC):
    """Compares the episodes of a group.

    class Shortest(GroupJudger):
        needs = ("tokens",)

        async def judge_group(self, payloads: Sequence[Payload]) -> Sequence[Verdict]:
            fewest = min(payload.tokens for payload in payloads)
            return [Reward(float(payload.tokens == fewest)) for payload in payloads]
    """

    compares: bool = True
    """Whether its verdicts depend on the whole group; otherwise it may be given the episodes one by one."""

    @abstractmethod
    async def judge_group(self, payloads: Sequence[Payload]) -> Sequence[Verdict]:
        """The verdicts in the order of the payloads; an exception fails all of them."""


judgers: Registry[type[BaseJudger]] = Registry("judger", "loopwright.judgers", BaseJudger, "Judger")
for _name, _class in {
    "python": "python:PythonJudger",
    "http": "http:HttpJudger",
    "llm": "http:LlmJudger",
    "command": "command:CommandJudger",
    "length": "facts:LengthJudger",
    "composed": "composed:ComposedJudger",
    "ranking": "ranking:RankingJudger",
    "verifier": "facts:VerifierJudger",
    "environment": "facts:EnvironmentJudger",
}.items():
    judgers.add_lazily(_name, f"loopwright.rollouts.judgers.{_class}")

_parse = config_parser(judgers)


def parse_judger(raw: Any) -> JudgerConfig:
    """The config of the judger that `type` names; a ValueError lists everything that is wrong with it."""
    if isinstance(raw, list | tuple):
        raise ValueError(
            f"{len(raw)} judgers without a rule for combining them. Write "
            '{ type = "composed", parts = [...] }, which adds them up by weight, or give it a `merge` or `routes`'
        )
    config = _parse(raw)
    if not isinstance(config, JudgerConfig):
        raise ValueError(f"{type(config).__name__} is not the config of a judger")
    return config


AnyJudger = Annotated[SerializeAsAny[JudgerConfig], BeforeValidator(parse_judger)]
"""A config field for a judger of any type."""
