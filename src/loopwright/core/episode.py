"""An episode of a rollout: the message graph, in which each node holds only the tokens that it added.

A branch is a path from the root to a leaf; its ids, joined, are exactly the engine's input and output. Agents that
retry, compact their history or start sub-agents make several branches; shared nodes are stored once, and every sampled
token is exported once.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Self, TypeVar

import orjson

from loopwright.core.outcome import OUT_OF_TIME, Fault, Outcome
from loopwright.core.task import Message, Task
from loopwright.core.trial import Reward

T = TypeVar("T")
_STEERING = frozenset({"frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "guide"})
"""Settings of `Node.sampling` that make a turn untrainable."""


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of a node from `start` up to `stop` that one version of the policy sampled."""

    start: int
    stop: int
    version: int


@dataclass(frozen=True, slots=True)
class Node:
    """One message and its own tokens: the delta to its parent.

    `logprobs` has a number for every token, 0 for those that were not sampled; `spans` lists the sampled ones.
    """

    parent: int | None
    message: Message
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    spans: tuple[Span, ...] = ()
    finish: str | None = None
    """Why the sampling of this message ended: `stop`, `length`, or `cut` if it was given up before its end; None for an
    input message."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The settings that reshaped the sampling distribution, such as `temperature`; empty if none did."""
    is_delivered: bool = True
    """False if the client's connection was lost before the end of the response; of input messages always True."""

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.logprobs):
            raise ValueError(f"a node has {len(self.ids)} ids but {len(self.logprobs)} logprobs")
        # A sum is finite only if all of it is, and takes a fraction of the time.
        if not math.isfinite(sum(self.logprobs)) and not all(map(math.isfinite, self.logprobs)):
            raise ValueError("a node has a logprob that is not finite")
        end = 0
        for span in self.spans:
            if not end <= span.start < span.stop <= len(self.ids):
                raise ValueError(f"{span} does not follow on {end} within {len(self.ids)} tokens")
            end = span.stop

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """A node from plain data."""
        spans = tuple(Span(*span) for span in data["spans"])
        ids, logprobs = tuple(data["ids"]), tuple(data["logprobs"])
        finish, sampling, is_delivered = data.get("finish"), data.get("sampling", {}), data.get("is_delivered", True)
        return cls(data["parent"], data["message"], ids, logprobs, spans, finish, sampling, is_delivered)

    def as_json(self) -> dict[str, Any]:
        """The inverse of `from_json`."""
        return {
            "parent": self.parent,
            "message": self.message,
            "ids": self.ids,
            "logprobs": self.logprobs,
            "spans": [(span.start, span.stop, span.version) for span in self.spans],
            **({"finish": self.finish} if self.finish else {}),
            **({"sampling": self.sampling} if self.sampling else {}),
            **({} if self.is_delivered else {"is_delivered": False}),
        }

    @property
    def mask(self) -> tuple[int, ...]:
        """1 for each token that the policy sampled."""
        return self._marked(0, lambda _: 1)

    @property
    def versions(self) -> tuple[int, ...]:
        """The policy version of each token; -1 for those that were not sampled."""
        return self._marked(-1, lambda span: span.version)

    def _marked(self, default: int, mark: Callable[[Span], int]) -> tuple[int, ...]:
        marks = [default] * len(self.ids)
        for span in self.spans:
            marks[span.start : span.stop] = [mark(span)] * (span.stop - span.start)
        return tuple(marks)

    @property
    def is_steered(self) -> bool:
        """Whether a penalty, a bias or guided decoding shaped it: no trainer computes the logprobs of that."""
        return not _STEERING.isdisjoint(self.sampling)

    @property
    def sampled(self) -> int:
        """How many of its tokens were sampled."""
        return sum(span.stop - span.start for span in self.spans)


@dataclass(frozen=True, slots=True)
class Row:
    """One branch, flat, for training: the response begins with the first sampled token that no earlier row has."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    reward: float | None
    nodes: tuple[int, ...] = ()
    """The nodes that it consists of, from the first message on."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at a rollout, with the seconds that each phase took: queue, generate, tools, judge."""

    started_at: float
    phases_s: Mapping[str, float] = field(default_factory=dict)
    outcome: Outcome | None = None
    reason: str = ""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """An attempt from plain data."""
        outcome = data["outcome"]
        return cls(data["started_at"], data["phases_s"], None if outcome is None else Outcome(outcome), data["reason"])


ROOT = Node(None, {})
"""The first node of every episode: no message, no tokens."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One attempt at a task, from start to end.

    `trainable` (may it enter the gradient?) and `in_baseline` (does it count in its group's mean?) are independent: a
    stale sample loses the first, an outage both, and neither is possible without a reward.
    """

    task: Task
    nodes: tuple[Node, ...] = (ROOT,)
    outcome: Outcome = Outcome.OK
    fault: Fault | None = None
    reason: str = ""
    reward: Reward | None = None
    trainable: bool = False
    in_baseline: bool = False
    group: int = 0
    attempts: tuple[Attempt, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """Plain data from the loop that a judger may need, such as an agent's exit code or the output of its tests."""

    def __post_init__(self) -> None:
        roots = [index for index, node in enumerate(self.nodes) if node.parent is None]
        if roots != [0]:
            raise ValueError(f"an episode has one root, node 0; here {roots or 'none'}")
        if self.nodes[0].ids:
            raise ValueError("the root of an episode has no tokens")
        for index, node in enumerate(self.nodes):
            if node.parent is not None and not 0 <= node.parent < index:
                raise ValueError(f"node {index} comes before its parent {node.parent}")
        if self.reward is None and (self.trainable or self.in_baseline):
            raise ValueError("an episode without a reward can neither be trained on nor count in a baseline")

    # -- reward and failure --------------------------------------------------------------------------------------

    def judged(self, reward: Reward) -> Self:
        """With its reward. It is trained on and counts in the baseline unless something else than the policy failed."""
        counts = self.fault in (None, Fault.POLICY)
        return replace(self, reward=reward, trainable=counts and self.sampled > 0, in_baseline=counts)

    def failed(self, outcome: Outcome, fault: Fault, reason: str) -> Self:
        """Without a reward, and out of gradient and baseline."""
        return replace(
            self, outcome=outcome, fault=fault, reason=reason, reward=None, trainable=False, in_baseline=False
        )

    @property
    def is_cut(self) -> bool:
        """Whether its deadline ended it."""
        return self.outcome is Outcome.TIMEOUT or self.reason.startswith(OUT_OF_TIME)

    @property
    def rewards(self) -> Mapping[str, float]:
        """The parts of the reward by name."""
        return {} if self.reward is None else self.reward.parts

    # -- the graph ----------------------------------------------------------------------------------------------

    @property
    def sampled(self) -> int:
        """How many tokens the policy sampled, over all branches."""
        return sum(node.sampled for node in self.nodes)

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version that sampled any of it."""
        return min((span.version for node in self.nodes for span in node.spans), default=None)

    @property
    def turns(self) -> int:
        """How many messages were sampled."""
        return sum(bool(node.spans) for node in self.nodes)

    def branches(self) -> Iterator[tuple[int, ...]]:
        """The paths from the root, without it, to each leaf."""
        parents = {node.parent for node in self.nodes}
        for leaf in range(1, len(self.nodes)):
            if leaf not in parents:
                yield self.path(leaf)

    def path(self, index: int) -> tuple[int, ...]:
        """The nodes from below the root to this one."""
        path = []
        parent: int | None = index
        while parent:
            path.append(parent)
            parent = self.nodes[parent].parent
        return tuple(reversed(path))

    def messages(self) -> list[Message]:
        """The conversation of the last sampled message."""
        last = max((i for i, node in enumerate(self.nodes) if node.spans), default=len(self.nodes) - 1)
        return [self.nodes[index].message for index in self.path(last)]

    @property
    def answer(self) -> str:
        """The text of the last message that was sampled."""
        for node in reversed(self.nodes):
            if node.spans:
                return str(node.message.get("content") or "")
        return ""

    # -- for training -------------------------------------------------------------------------------------------

    @property
    def abandoned(self) -> frozenset[int]:
        """The turns that their client never had completely, and repeated: a later turn answers the same prompt.

        A turn that was cut off at the end of its episode, such as by a deadline, is not one of them.
        """
        parents = {node.parent for node in self.nodes}
        last_answer = {node.parent: index for index, node in enumerate(self.nodes) if node.spans}
        return frozenset(
            index
            for index, node in enumerate(self.nodes)
            if (node.finish == "cut" or not node.is_delivered)
            and index not in parents
            and last_answer.get(node.parent, 0) > index
        )

    def rows(self, oldest: int | None = None, *, with_abandoned: bool = False) -> list[Row]:
        """All rows of `iter_rows`."""
        return list(self.iter_rows(oldest, with_abandoned=with_abandoned))

    def iter_rows(self, oldest: int | None = None, *, with_abandoned: bool = False) -> Iterator[Row]:
        """A row per branch. A sampled token that several branches share is trained on in the first one only.

        Tokens sampled by a version before `oldest`, those of a steered turn and, unless asked for, those of an
        abandoned one are part of the response, but are not trained on; a row without any token to train on is omitted.
        """
        exported: set[int] = set() if with_abandoned else set(self.abandoned)
        for path in self.branches():
            nodes = [self.nodes[index] for index in path]
            fresh = _joined(
                node.mask if index not in exported and not node.is_steered else (0,) * len(node.ids)
                for index, node in zip(path, nodes, strict=True)
            )
            exported.update(path)
            if 1 not in fresh:
                continue
            first = fresh.index(1)
            versions = _joined(node.versions for node in nodes)
            mask = tuple(
                int(new and (oldest is None or version >= oldest)) for new, version in zip(fresh, versions, strict=True)
            )
            if 1 not in mask:
                continue
            ids = _joined(node.ids for node in nodes)
            yield Row(
                prompt_ids=ids[:first],
                response_ids=ids[first:],
                response_mask=mask[first:],
                logprobs=_joined(node.logprobs for node in nodes)[first:],
                versions=versions[first:],
                reward=None if self.reward is None else self.reward.value,
                nodes=path,
            )

    def as_verl(self, oldest: int | None = None) -> list[dict[str, Any]]:
        """The rows under the names of verl's AgentLoopOutput."""
        phases = self.attempts[-1].phases_s if self.attempts else {}
        return [
            {
                "prompt_ids": list(row.prompt_ids),
                "response_ids": list(row.response_ids),
                "response_mask": list(row.response_mask),
                "response_logprobs": list(row.logprobs),
                "multi_modal_data": {},
                "reward_score": row.reward,
                "num_turns": len(self.messages()),
                "metrics": {
                    "generate_sequences": phases.get("generate", 0.0),
                    "tool_calls": phases.get("tools", 0.0),
                },
                "extra_fields": {
                    "versions": list(row.versions),
                    "reward_extra_info": dict(self.rewards),
                    "trainable": self.trainable,
                    "in_baseline": self.in_baseline,
                },
            }
            for row in self.rows(oldest)
        ]

    # -- as plain data ------------------------------------------------------------------------------------------

    def as_json(self, *, with_nodes: bool = True) -> dict[str, Any]:
        """The whole episode as plain data: a line of JSONL, a payload in the ledger. The nodes are at its end."""
        reward = self.reward
        return {
            "task": self.task.as_json(),
            "group": self.group,
            "outcome": str(self.outcome),
            "fault": None if self.fault is None else str(self.fault),
            "reason": self.reason,
            "reward": None if reward is None else {"value": reward.value, "parts": reward.parts, "more": reward.more},
            "trainable": self.trainable,
            "in_baseline": self.in_baseline,
            "attempts": [
                {"started_at": a.started_at, "phases_s": a.phases_s, "outcome": a.outcome, "reason": a.reason}
                for a in self.attempts
            ],
            **({"evidence": self.evidence} if self.evidence else {}),
            "nodes": [node.as_json() for node in self.nodes[1:]] if with_nodes else [],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `as_json`."""
        reward = data["reward"]
        return cls(
            task=Task.from_json(data["task"]),
            nodes=(ROOT, *map(Node.from_json, data["nodes"])),
            outcome=Outcome(data["outcome"]),
            fault=None if data["fault"] is None else Fault(data["fault"]),
            reason=data["reason"],
            reward=None if reward is None else Reward(reward["value"], reward["parts"], tuple(reward.get("more", ()))),
            trainable=data["trainable"],
            in_baseline=data["in_baseline"],
            group=data["group"],
            attempts=tuple(map(Attempt.from_json, data["attempts"])),
            evidence=data.get("evidence", {}),
        )

    def to_bytes(self) -> bytes:
        """As JSON."""
        return orjson.dumps(self.as_json())

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The inverse of `to_bytes`."""
        return cls.from_json(orjson.loads(data))


def _joined(parts: Iterable[Iterable[T]]) -> tuple[T, ...]:
    return tuple(chain.from_iterable(parts))
