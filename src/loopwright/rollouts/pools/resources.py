"""Who asks for which CPUs and how much memory, and whether a cluster has them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from loopwright.core.errors import LoopwrightError

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
_CLOSE = 1e-6


class ResourcesError(LoopwrightError, RuntimeError):
    """A cluster does not have what was asked for; says who asked, what there is and what is taken."""


@dataclass(frozen=True)
class ResourceRequest:
    """What one pool needs: so many workers, each of this size."""

    name: str
    workers: int
    cpus: float = 1.0
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.workers < 1 or self.cpus <= 0 or (self.memory_bytes is not None and self.memory_bytes <= 0):
            raise ValueError(f"{self.name!r}: workers, cpus and memory of a pool on Ray must be greater than zero")

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one worker, in Ray's words."""
        return {"CPU": self.cpus} | ({} if self.memory_bytes is None else {"memory": float(self.memory_bytes)})

    def __str__(self) -> str:
        size = format_resources(self.cpus, self.memory_bytes)
        if self.workers == 1:
            return f"{self.name!r} asks for 1 worker of {size}"
        memory = None if self.memory_bytes is None else self.memory_bytes * self.workers
        total = format_resources(self.cpus * self.workers, memory)
        return f"{self.name!r} asks for {self.workers} workers of {size} each ({total})"


@dataclass(frozen=True)
class ClusterNode:
    """One machine of a cluster."""

    name: str
    cpus: float
    memory_bytes: float
    free_cpus: float
    free_memory_bytes: float

    def holds(self, ask: ResourceRequest) -> int:
        """How many of its workers an empty node holds."""
        by_cpu = int((self.cpus + _CLOSE) // ask.cpus)
        return by_cpu if ask.memory_bytes is None else min(by_cpu, int(self.memory_bytes // ask.memory_bytes))


def format_resources(cpus: float, memory_bytes: float | None) -> str:
    """CPUs and memory in words."""
    words = f"{cpus:g} CPU{'' if cpus == 1 else 's'}"
    if memory_bytes is None:
        return words
    size, unit = memory_bytes, "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{words} and {size:.3g} {unit}"


def find_shortage(requests: Sequence[ResourceRequest], nodes: Sequence[ClusterNode], strategy: Strategy) -> str | None:
    """Why these can never be placed, even if the cluster were idle; None if they may be."""
    cpus = sum(ask.cpus * ask.workers for ask in requests)
    memory = sum((ask.memory_bytes or 0) * ask.workers for ask in requests)
    if strategy == "STRICT_PACK":
        if not any(node.cpus + _CLOSE >= cpus and node.memory_bytes >= memory for node in nodes):
            return f"no node has {format_resources(cpus, memory or None)}, and STRICT_PACK wants all workers on one"
    elif strategy == "STRICT_SPREAD" and (workers := sum(ask.workers for ask in requests)) > len(nodes):
        return f"there are {workers} workers, and STRICT_SPREAD wants each on a node of its own"
    for ask in requests:
        held = sum(node.holds(ask) for node in nodes)
        if held == 0:
            return f"no node is large enough for one worker of {ask.name!r}"
        if held < ask.workers:
            return f"only {held} workers of {ask.name!r} fit"
    if cpus > sum(node.cpus for node in nodes) + _CLOSE or memory > sum(node.memory_bytes for node in nodes):
        return f"together they need {format_resources(cpus, memory or None)}"
    return None


def placement_error(requests: Sequence[ResourceRequest], nodes: Sequence[ClusterNode], why: str) -> ResourcesError:
    """The error that tells all of it."""
    has = format_resources(sum(node.cpus for node in nodes), sum(node.memory_bytes for node in nodes))
    taken = format_resources(
        max(0.0, sum(node.cpus - node.free_cpus for node in nodes)),
        max(0.0, sum(node.memory_bytes - node.free_memory_bytes for node in nodes)),
    )
    each = ", ".join(
        f"{node.name}: {format_resources(node.cpus, node.memory_bytes)}, "
        f"free {format_resources(node.free_cpus, node.free_memory_bytes)}"
        for node in nodes
    )
    return ResourcesError(
        f"the workers cannot be placed: {why}. {'; '.join(map(str, requests))}. "
        f"The Ray cluster has {has}, of which {taken} are taken ({each or 'no node is alive'}). "
        "Ask for fewer `workers`, for less `cpus` or `memory` each, or add nodes."
    )
