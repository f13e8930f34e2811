"""The audit: whether what was captured is what was sampled, told by a forward pass over stored episodes.

Who changed an id or a logprob, spliced wrong tokens or stamped another version on them is found out here: the model
would have given another logprob.
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
from loopwright.gateway.sessions.store import nodes_of
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.rollouts import rollouts
from loopwright.ledger.sqlite import Transaction, connect_to_read, explained

if TYPE_CHECKING:
    from loopwright.engines.inprocess.forward import Forward, Passage

STORE = "gateway.db"
_TOGETHER_TOKENS = 32_768
"""Tokens of the episodes that are looked at together, so that passages of like length can be found among them."""
_VERSION = re.compile(r"(\d+)(\.safetensors|\.pt)?$")


@dataclass(frozen=True, slots=True)
class EpisodeSource:
    """Stored episodes: how many there are, and each with the name of its trial or session."""

    count: int
    episodes: Callable[[], Iterator[tuple[str, Episode]]]


@dataclass(frozen=True, slots=True)
class TurnAudit:
    """The tokens of one turn that one version sampled: how far their logprobs are from those of a forward pass."""

    episode: str
    node: int
    version: int
    off_by: tuple[float, ...]

    @property
    def mean(self) -> float:
        """On average."""
        return sum(self.off_by) / len(self.off_by)

    @property
    def largest(self) -> float:
        """At most."""
        return max(self.off_by)

    def as_json(self) -> dict[str, Any]:
        """As plain data; `token` is the one that is off most."""
        return {
            "episode": self.episode,
            "node": self.node,
            "version": self.version,
            "tokens": len(self.off_by),
            "mean": self.mean,
            "largest": self.largest,
            "token": self.off_by.index(self.largest),
        }


@dataclass
class AuditSummary:
    """All turns of an audit, as one."""

    turns: int = 0
    tokens: int = 0
    total: float = 0.0
    worst: list[TurnAudit] = field(default_factory=list)
    """The turns that are off most, the worst first."""
    left_out: dict[int, int] = field(default_factory=dict)
    """Turns by the version that sampled them, where its weights are not at hand."""

    def add(self, turn: TurnAudit, shown: int = 10) -> None:
        """Take in a turn."""
        self.turns += 1
        self.tokens += len(turn.off_by)
        self.total += sum(turn.off_by)
        self.worst = sorted([*self.worst, turn], key=lambda one: -one.largest)[:shown]

    @property
    def mean(self) -> float | None:
        """How far a token is off on average; None without any."""
        return self.total / self.tokens if self.tokens else None

    @property
    def largest(self) -> float | None:
        """How far a token is off at most."""
        return self.worst[0].largest if self.worst else None

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        left_out = {str(version): count for version, count in self.left_out.items()}
        parts = {"turns": self.turns, "tokens": self.tokens, "mean": self.mean, "largest": self.largest}
        return {**parts, "left_out": left_out}

    def within(self, tolerance: float) -> bool:
        """Whether there was something to look at, and no token of it is off by more."""
        return self.largest is not None and self.largest <= tolerance


@contextmanager
def in_ledger(path: Path) -> Iterator[EpisodeSource]:
    """The episodes of a run."""
    with Ledger.read(path) as ledger:
        ((count,),) = ledger.transaction.rows("SELECT count(*) FROM payloads WHERE kind = 'rollout'")
        yield EpisodeSource(count, lambda: ((f"trial {one.number}", one.episode) for one in rollouts(ledger)))


@contextmanager
def in_gateway(path: Path) -> Iterator[EpisodeSource]:
    """The sessions of a gateway, also while it serves."""
    with explained(path):
        connection = connect_to_read(path)
    with closing(connection):
        store = Transaction(path, connection)
        ids = [id for (id,) in store.rows("SELECT id FROM sessions ORDER BY opened_at")]

        def episodes() -> Iterator[tuple[str, Episode]]:
            for id in ids:
                nodes = (node for node, _ in nodes_of(store, id))
                yield f"session {id}", Episode(Task(id, ()), (ROOT, *nodes))

        yield EpisodeSource(len(ids), episodes)


def weights_in(place: Path) -> dict[int, Path]:
    """The checkpoints below a directory by version, whole or adapters: those whose names end in a number."""
    found = {}
    for path in sorted(place.iterdir()) if place.is_dir() else []:
        kept = any(any(path.glob(name)) for name in ("model*.safetensors", "adapter_config.json"))
        if (match := _VERSION.search(path.name)) and (path.is_file() or kept):
            found[int(match[1])] = path
    return found


def versions_of(captured: EpisodeSource) -> dict[int, int]:
    """How many turns each version sampled, the oldest first."""
    counts: dict[int, int] = {}
    for _, episode in captured.episodes():
        for node in episode.nodes:
            for version in {span.version for span in node.spans}:
                counts[version] = counts.get(version, 0) + 1
    return dict(sorted(counts.items()))


def audit(captured: EpisodeSource, forward: "Forward", weights: Mapping[int, Path | None]) -> Iterator[list[TurnAudit]]:
    """What a forward pass says of the turns that these versions sampled, some episodes at a time.

    None stands for the weights that the model comes with; they come first, for others take their place.
    """
    for version, place in sorted(weights.items(), key=lambda one: (one[1] is not None, one[0])):
        if place is not None:
            forward.put(place)
        together: list[_Branch] = []
        for name, episode in captured.episodes():
            together += _branches(name, episode, version)
            if sum(len(branch.passage.ids) for branch in together) > _TOGETHER_TOKENS:
                yield list(_checked(together, forward, version))
                together = []
        yield list(_checked(together, forward, version))


@dataclass(frozen=True, slots=True)
class _Branch:
    episode: str
    nodes: list[int]
    """The node of each token that is looked at."""
    passage: "Passage"


def _branches(name: str, episode: Episode, version: int) -> Iterator[_Branch]:
    """Each branch with the tokens of this version that no earlier branch has; those without any are left out."""
    from loopwright.engines.inprocess.forward import Passage

    seen: set[int] = set()
    for path in episode.branches():
        ids: list[int] = []
        nodes: list[int] = []
        places: list[int] = []
        logprobs: list[float] = []
        samplings: list[Sampling] = []
        for index in path:
            node = episode.nodes[index]
            sampling = Sampling.model_validate(node.sampling) if node.spans else Sampling()
            for span in node.spans if index not in seen else ():
                if span.version == version:
                    places += range(len(ids) + span.start, len(ids) + span.stop)
                    logprobs += node.logprobs[span.start : span.stop]
                    nodes += [index] * (span.stop - span.start)
                    samplings += [sampling] * (span.stop - span.start)
            ids += node.ids
        seen.update(path)
        if places:
            yield _Branch(name, nodes, Passage(ids, places, logprobs, samplings))


def _checked(branches: list[_Branch], forward: "Forward", version: int) -> Iterator[TurnAudit]:
    differences = forward.differences([branch.passage for branch in branches])
    for branch, off_by in zip(branches, differences, strict=True):
        turns: dict[int, list[float]] = {}
        for node, off in zip(branch.nodes, off_by, strict=True):
            turns.setdefault(node, []).append(off)
        yield from (TurnAudit(branch.episode, node, version, tuple(offs)) for node, offs in turns.items())
