"""The base of all judgers: how an episode, or a group of them, becomes a reward."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from loopwright.core.episode import Episode
from loopwright.core.errors import LoopwrightError, Problem
from loopwright.core.registry import Registry
from loopwright.core.reward import Reward
from loopwright.core.task import Task
from loopwright.rollouts.pools.placement import PlacementConfig

FACTS = ("answer", "label", "data_source", "task", "messages", "tokens", "turns", "extra", "evidence", "episode")
"""What a judger can ask for. `task` is the task's prompt, `tokens` how many were sampled, `evidence` what the loop saw,
`episode` everything."""


class JudgeFailed(LoopwrightError, RuntimeError):
    """A judger gave no verdict. The episode has no reward then, which is not a reward of zero."""


Verdict = Reward | JudgeFailed
"""What becomes of one episode of a group: a failure there is a value, so that it costs no other episode its reward."""


@dataclass(frozen=True, slots=True)
class Payload:
    """The little of an episode that a judger asked for; only this crosses to another process."""

    facts: Mapping[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name == "facts":  # Asked for by copy and pickle before it is there.
            raise AttributeError(name)
        try:
            return self.facts[name]
        except KeyError:
            raise AttributeError(f"the judger did not ask for {name!r}; add it to its `needs`") from None

    @classmethod
    def of(cls, episode: Episode, needs: Sequence[str]) -> "Payload":
        """What these needs take from an episode."""
        return cls({name: _fact(episode, name) for name in needs})

    def only(self, needs: Sequence[str]) -> "Payload":
        """The part of it that these needs ask for."""
        return Payload({name: getattr(self, name) for name in needs})

    def as_json(self) -> dict[str, Any]:
        """The facts as plain data."""
        return {
            name: fact.as_json() if isinstance(fact, Episode) else _plain(fact) for name, fact in self.facts.items()
        }


def _plain(fact: Any) -> Any:
    """Read-only mappings and tuples, as episodes are made of, as dicts and lists."""
    if isinstance(fact, Mapping):
        return {str(name): _plain(value) for name, value in fact.items()}
    return [_plain(value) for value in fact] if isinstance(fact, list | tuple) else fact


def _fact(episode: Episode, name: str) -> Any:
    match name:
        case "answer":
            return episode.answer
        case "label" | "data_source" | "extra":
            return getattr(episode.task, name)
        case "task":
            return list(episode.task.messages)
        case "messages":
            return episode.messages()
        case "tokens":
            return episode.sampled
        case "turns":
            return episode.turns
        case "evidence":
            return episode.evidence
        case "episode":
            return episode
    raise ValueError(f"a judger cannot need {name!r}; there are {', '.join(FACTS)}")


LONGEST_PAUSE_S = 30.0


class JudgerConfig(PlacementConfig):
    """What every judger can be told."""

    type: str
    name: str | None = None
    """The name of this judger's part of the reward; without it, its function's name or its type."""
    weight: float = 1.0
    """What its verdict is multiplied with; negative for a penalty."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds for one try at a verdict."""
    retries: int = Field(default=2, ge=0)
    """How often a failed verdict is tried again, each time after twice the pause."""
    pause_s: float = Field(default=0.5, ge=0)
    """Seconds before the first of them, give or take a half, so that many do not come back at once."""
    breaker: int = Field(default=20, ge=0)
    """After so many failures in a row the judger counts as down and verdicts fail at once; 0: never."""
    cooldown_s: float = Field(default=30.0, ge=0)
    """Seconds until a judger that is down is given one verdict to prove itself."""
    concurrency: int = Field(default=64, ge=1)
    """How many verdicts each worker works on at a time."""

    def label(self) -> str:
        """The name of its part of the reward."""
        return self.name or self.type

    def problems(self, home: Path) -> list[Problem]:
        """What is wrong with it; found before anything starts."""
        return []

    def unjudged(self, data_sources: Iterable[str]) -> list[Problem]:
        """Those of the tasks' data sources that it has no way of judging, each as a problem."""
        return []

    def evidence(self) -> set[str]:
        """What a loop must bring home, by name, for it to judge."""
        return set()

    def lacks(self, task: Task) -> str:
        """What a task lacks to be judged; nothing if it can be. Asked where it needs evidence."""
        return ""

    def limit_s(self) -> float:
        """Seconds after which a try is given up from outside."""
        return self.timeout_s

    def patience_s(self) -> float:
        """Seconds within which a verdict is there or has failed, all tries and pauses included."""
        pauses_s = sum(1.5 * min(self.pause_s * 2**number, LONGEST_PAUSE_S) for number in range(self.retries))
        return float((self.retries + 1) * self.limit_s() + pauses_s)

    def room(self) -> int:
        """How many verdicts a worker can be given at a time without any of them waiting for another."""
        return self.concurrency


class Judger(ABC):
    """Turns an episode into a reward.

    class Exact(Judger):
        needs = ("answer", "label")

        async def judge(self, payload: Payload) -> Reward:
            return Reward(float(payload.answer == payload.label))
    """

    Config: ClassVar[type[JudgerConfig]] = JudgerConfig
    needs: tuple[str, ...] = ("answer", "label")
    """Which of an episode's facts it reads."""
    compares: bool = False
    """Whether it needs a whole group, to rank its episodes against one another."""
    batch: int = 1
    """How many payloads it takes at a time; where that is more than one, `judge_batch` is called instead of `judge`."""
    batch_wait_s: float = 0.0
    """Seconds that a payload waits for others to share its batch."""
    delegates: bool = False
    """Whether it only combines other judgers' verdicts; it is not timed and tried again then, since they are."""

    def __init__(self, config: Any, home: Path) -> None:
        self.config, self.home = config, home

    @abstractmethod
    async def judge(self, payload: Payload) -> Reward:
        """The reward of one episode. An exception is a failed verdict, tried again and never a zero."""

    async def judge_batch(self, payloads: Sequence[Payload]) -> Sequence[Verdict]:
        """The verdicts on payloads that have nothing to do with one another, in their order; an exception fails all."""
        raise NotImplementedError(f"{type(self).__name__} takes no batches")

    async def judge_group(self, payloads: Sequence[Payload]) -> Sequence[Verdict]:
        """The verdicts on a group, in its order; only called where `compares` is set."""
        raise NotImplementedError(f"{type(self).__name__} compares nothing")

    async def close(self) -> None:
        """Let go of everything."""


judgers: Registry[type[Judger]] = Registry("judger", "loopwright.judgers", Judger)
for _name, _class in {
    "python": "python:PythonJudger",
    "http": "http:HttpJudger",
    "llm": "llm:LlmJudger",
    "command": "command:CommandJudger",
    "length": "length:LengthJudger",
    "composed": "composed:ComposedJudger",
    "ranking": "ranking:RankingJudger",
    "verifier": "verifier:VerifierJudger",
}.items():
    judgers.add_lazily(_name, f"loopwright.rollouts.judgers.{_class}")
