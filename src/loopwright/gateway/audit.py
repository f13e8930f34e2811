"""The audit: a forward pass over stored episodes, which shows whether what was captured is what was sampled.

It detects a changed id or logprob, wrongly spliced tokens and wrong versions: the model's logprob would be different.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopwright.core.episode import ROOT, Episode
from loopwright.core.task import Task
from loopwright.engines.base import Sampling
from loopwright.gateway.sessions.store import check_version, load_nodes
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.rollouts import rollouts
from loopwright.ledger.sqlite import Transaction, connect_to_read, explained

if TYPE_CHECKING:
    from loopwright.engines.inprocess.forward import Forward, Passage

STORE = "gateway.db"
CHECKPOINTS = "checkpoints"
"""The state of a ledger that says where another trainer has its checkpoints."""
_BATCH_TOKENS = 32_768
"""Tokens of the episodes that are audited together, so that passages of similar length can be batched."""
_VERSION = re.compile(r"(\d+)(\.safetensors|\.pt)?$")


@dataclass(frozen=True, slots=True)
class EpisodeSource:
    """Stored episodes: their number, and each one with the name of its trial or session."""

    count: int
    episodes: Callable[[], Iterator[tuple[str, Episode]]]


@dataclass(frozen=True, slots=True)
class TurnAudit:
    """The tokens of one turn that one version sampled: how far their logprobs are off from a forward pass."""

    episode: str
    node: int
    version: int
    differences: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The average difference."""
        return sum(self.differences) / len(self.differences)

    @property
    def largest(self) -> float:
        """The largest difference."""
        return max(self.differences)

    def as_json(self) -> dict[str, Any]:
        """As plain data; `token` is the one with the largest difference."""
        return {
            "episode": self.episode,
            "node": self.node,
            "version": self.version,
            "tokens": len(self.differences),
            "mean": self.mean,
            "largest": self.largest,
            "token": self.differences.index(self.largest),
        }


@dataclass
class AuditSummary:
    """The result of an audit over all turns."""

    turns: int = 0
    tokens: int = 0
    total: float = 0.0
    worst: list[TurnAudit] = field(default_factory=list)
    """The turns with the largest differences, the worst first."""
    skipped: dict[int, int] = field(default_factory=dict)
    """Turns per version whose weights are not available."""

    def add(self, turn: TurnAudit, max_worst: int = 10) -> None:
        """Add a turn."""
        self.turns += 1
        self.tokens += len(turn.differences)
        self.total += sum(turn.differences)
        self.worst = sorted([*self.worst, turn], key=lambda each: -each.largest)[:max_worst]

    @property
    def mean(self) -> float | None:
        """The average difference per token; None without tokens."""
        return self.total / self.tokens if self.tokens else None

    @property
    def largest(self) -> float | None:
        """The largest difference of any token."""
        return self.worst[0].largest if self.worst else None

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        skipped = {str(version): count for version, count in self.skipped.items()}
        totals = {"turns": self.turns, "tokens": self.tokens, "mean": self.mean, "largest": self.largest}
        return {**totals, "left_out": skipped}

    def within(self, tolerance: float) -> bool:
        """Whether anything was audited, and no token differs by more."""
        return self.largest is not None and self.largest <= tolerance


@contextmanager
def ledger_episodes(path: Path) -> Iterator[EpisodeSource]:
    """The episodes of a run."""
    with Ledger.read(path) as ledger:
        ((count,),) = ledger.transaction.rows("SELECT count(*) FROM payloads WHERE kind = 'rollout'")
        yield EpisodeSource(count, lambda: ((f"trial {each.number}", each.episode) for each in rollouts(ledger)))


@contextmanager
def gateway_episodes(path: Path) -> Iterator[EpisodeSource]:
    """The sessions of a gateway, which may be running."""
    with explained(path):
        connection = connect_to_read(path)
    with closing(connection):
        store = Transaction(path, connection)
        check_version(path, store.rows("PRAGMA user_version")[0][0])
        sessions = store.rows("SELECT number, id FROM sessions ORDER BY opened_at")

        def episodes() -> Iterator[tuple[str, Episode]]:
            for number, id in sessions:
                nodes = (node for node, _ in load_nodes(store.rows, number))
                yield f"session {id}", Episode(Task(id, ()), (ROOT, *nodes))

        yield EpisodeSource(len(sessions), episodes)


@dataclass(frozen=True, slots=True)
class ExternalCheckpoints:
    """The checkpoints of another trainer, as the state CHECKPOINTS of its run's ledger describes them."""

    directory: str
    offset: int = 0
    """What is added to the number of a checkpoint to get the version of its weights."""
    initial_version: int | None = None
    """The version of the model's original weights, if the trainer started from them."""

    def find(self, directory: Path | None = None) -> dict[int, Path]:
        """Its checkpoints by version, in their own directory or where they were moved to."""
        checkpoints = find_checkpoints(directory or Path(self.directory)) if directory or self.directory else {}
        return {number + self.offset: path for number, path in checkpoints.items()}


def find_checkpoints(directory: Path) -> dict[int, Path]:
    """The checkpoints in a directory by version, complete or adapters: those whose names end in a number."""
    checkpoints = {}
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        is_checkpoint = any(any(path.glob(name)) for name in ("model*.safetensors", "adapter_config.json"))
        if (match := _VERSION.search(path.name)) and (path.is_file() or is_checkpoint):
            checkpoints[int(match[1])] = path
    return checkpoints


def count_versions(source: EpisodeSource) -> dict[int, int]:
    """How many turns each version sampled, the oldest first."""
    counts: dict[int, int] = {}
    for _, episode in source.episodes():
        for node in episode.nodes:
            for version in {span.version for span in node.spans}:
                counts[version] = counts.get(version, 0) + 1
    return dict(sorted(counts.items()))


def audit(source: EpisodeSource, forward: "Forward", weights: Mapping[int, Path | None]) -> Iterator[list[TurnAudit]]:
    """Audit the turns that these versions sampled, a batch of episodes at a time.

    None stands for the model's original weights. They are audited first, because other weights replace them.
    """
    for version, path in sorted(weights.items(), key=lambda item: (item[1] is not None, item[0])):
        if path is not None:
            forward.put(path)
        batch: list[_Branch] = []
        for name, episode in source.episodes():
            batch += _branches(name, episode, version)
            if sum(len(branch.passage.ids) for branch in batch) > _BATCH_TOKENS:
                yield list(_audit_batch(batch, forward, version))
                batch = []
        yield list(_audit_batch(batch, forward, version))


@dataclass(frozen=True, slots=True)
class _Branch:
    episode: str
    nodes: list[int]
    """The node of each audited token."""
    passage: "Passage"


def _branches(name: str, episode: Episode, version: int) -> Iterator[_Branch]:
    """Each branch with the tokens of this version that no earlier branch has; branches without any are skipped."""
    from loopwright.engines.inprocess.forward import Passage

    covered: set[int] = set()
    for path in episode.branches():
        ids: list[int] = []
        nodes: list[int] = []
        places: list[int] = []
        logprobs: list[float] = []
        samplings: list[Sampling] = []
        for index in path:
            node = episode.nodes[index]
            sampling = Sampling.model_validate(node.sampling) if node.spans else Sampling()
            for span in node.spans if index not in covered else ():
                if span.version == version:
                    places += range(len(ids) + span.start, len(ids) + span.stop)
                    logprobs += node.logprobs[span.start : span.stop]
                    nodes += [index] * (span.stop - span.start)
                    samplings += [sampling] * (span.stop - span.start)
            ids += node.ids
        covered.update(path)
        if places:
            yield _Branch(name, nodes, Passage(ids, places, logprobs, samplings))


def _audit_batch(branches: list[_Branch], forward: "Forward", version: int) -> Iterator[TurnAudit]:
    results = forward.differences([branch.passage for branch in branches])
    for branch, differences in zip(branches, results, strict=True):
        turns: dict[int, list[float]] = {}
        for node, difference in zip(branch.nodes, differences, strict=True):
            turns.setdefault(node, []).append(difference)
        yield from (TurnAudit(branch.episode, node, version, tuple(values)) for node, values in turns.items())
