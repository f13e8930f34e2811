"""The CPUs and memory that pools request, and whether a cluster can provide them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator

from loopwright.core.config import Config, size_bytes
from loopwright.core.errors import ClusterError

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
ROUNDING = 1e-6
"""Ray's resources are floats; a difference below this is a rounding error."""


class ResourcesError(ClusterError):
    """A cluster lacks the requested resources; the message lists requests, capacity and usage."""


class PlacementConfig(Config):
    """How many workers a pool has, and what each of them needs: the same keys for loops and judgers."""

    workers: int = Field(default=0, ge=0)
    """0: in this process; 1: in one Ray actor; more: one actor each, behind a router."""
    cpus: float = Field(default=1.0, gt=0)
    """CPUs of each worker."""
    memory: int | None = Field(default=None, gt=0)
    """Memory of each worker, for example "1GiB"."""

    @field_validator("memory", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        return size_bytes(value)


@dataclass(frozen=True)
class ResourceRequest:
    """What one pool needs: a number of workers of the same size."""

    name: str
    workers: int
    cpus: float = 1.0
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.workers < 1 or self.cpus <= 0 or (self.memory_bytes is not None and self.memory_bytes <= 0):
            raise ValueError(f"{self.name!r}: workers, cpus and memory of a pool on Ray must be greater than zero")

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one worker, in Ray's terms."""
        return {"CPU": self.cpus} | ({} if self.memory_bytes is None else {"memory": float(self.memory_bytes)})

    def __str__(self) -> str:
        size = format_resources(self.cpus, self.memory_bytes)
        if self.workers == 1:
            return f"{self.name!r} requests 1 worker of {size}"
        memory = None if self.memory_bytes is None else self.memory_bytes * self.workers
        total = format_resources(self.cpus * self.workers, memory)
        return f"{self.name!r} requests {self.workers} workers of {size} each ({total})"


@dataclass(frozen=True)
class ClusterNode:
    """One machine of a cluster."""

    name: str
    cpus: float
    memory_bytes: float
    free_cpus: float
    free_memory_bytes: float

    def capacity_for(self, request: ResourceRequest) -> int:
        """How many of the request's workers fit on this node while it is idle."""
        by_cpu = int((self.cpus + ROUNDING) // request.cpus)
        return by_cpu if request.memory_bytes is None else min(by_cpu, int(self.memory_bytes // request.memory_bytes))


def format_resources(cpus: float, memory_bytes: float | None) -> str:
    """CPUs and memory as text, for example `2 CPUs and 1.5 GiB`."""
    text = f"{cpus:g} CPU{'' if cpus == 1 else 's'}"
    if memory_bytes is None:
        return text
    size, unit = memory_bytes, "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{text} and {size:.3g} {unit}"


def find_shortage(requests: Sequence[ResourceRequest], nodes: Sequence[ClusterNode], strategy: Strategy) -> str | None:
    """Why the requests cannot be placed even on an idle cluster; None if they may fit."""
    cpus = sum(request.cpus * request.workers for request in requests)
    memory = sum((request.memory_bytes or 0) * request.workers for request in requests)
    if strategy == "STRICT_PACK":
        if not any(node.cpus + ROUNDING >= cpus and node.memory_bytes >= memory for node in nodes):
            return f"no node has {format_resources(cpus, memory or None)}, and STRICT_PACK puts all workers on one node"
    elif strategy == "STRICT_SPREAD" and (workers := sum(request.workers for request in requests)) > len(nodes):
        return f"STRICT_SPREAD needs one node for each of the {workers} workers"
    for request in requests:
        capacity = sum(node.capacity_for(request) for node in nodes)
        if capacity == 0:
            return f"no node is large enough for one worker of {request.name!r}"
        if capacity < request.workers:
            return f"only {capacity} workers of {request.name!r} fit"
    if cpus > sum(node.cpus for node in nodes) + ROUNDING or memory > sum(node.memory_bytes for node in nodes):
        return f"together they need {format_resources(cpus, memory or None)}"
    return None


def placement_error(requests: Sequence[ResourceRequest], nodes: Sequence[ClusterNode], reason: str) -> ResourcesError:
    """An error with the reason, the requests, and what each node has and has free."""
    total = format_resources(sum(node.cpus for node in nodes), sum(node.memory_bytes for node in nodes))
    used = format_resources(
        max(0.0, sum(node.cpus - node.free_cpus for node in nodes)),
        max(0.0, sum(node.memory_bytes - node.free_memory_bytes for node in nodes)),
    )
    per_node = ", ".join(
        f"{node.name}: {format_resources(node.cpus, node.memory_bytes)}, "
        f"free {format_resources(node.free_cpus, node.free_memory_bytes)}"
        for node in nodes
    )
    return ResourcesError(
        f"the workers cannot be placed: {reason}. {'; '.join(map(str, requests))}. "
        f"The Ray cluster has {total}, of which {used} are in use ({per_node or 'no node is alive'}). "
        "Request fewer `workers`, less `cpus` or `memory` for each, or add nodes."
    )
