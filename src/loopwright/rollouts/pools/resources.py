"""The resources that pools request, and whether a cluster can provide them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field, field_validator

from loopwright.core.config import Config, Size
from loopwright.core.errors import ClusterError, Problem

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
Resources = Mapping[str, float]
"""Amounts by name, in Ray's terms: `{"CPU": 2, "GPU": 1, "memory": 1e9, "tpu": 4}`."""
ROUNDING = 1e-6
"""Ray's resources are floats; a difference below this is a rounding error."""
_KEYS = {"CPU": "cpus", "GPU": "gpus", "memory": "memory"}
"""Resources that have a key of their own."""


class ResourcesError(ClusterError):
    """A cluster lacks the requested resources; the message lists requests, capacity and usage."""


class PlacementConfig(Config):
    """How many workers a pool has, and what each needs: the same keys for loops, judgers, engines and gateways."""

    workers: int = Field(default=0, ge=0)
    """0: in this process; 1: in one Ray actor; more: one actor each, behind a router."""
    cpus: float = Field(default=1.0, gt=0)
    """CPUs of each worker."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs of each worker; a share such as 0.5 puts two workers on one GPU."""
    memory: Size | None = Field(default=None, gt=0)
    """Memory of each worker, for example "1GiB"."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom resources of each worker, such as `{ tpu = 1 }`."""
    strategy: Strategy = "PACK"
    """How the workers are placed: `PACK` on few nodes, `SPREAD` over many, `STRICT_PACK` on one node,
    `STRICT_SPREAD` each on a different node."""
    placement_group: str | None = None
    """The name of an existing placement group, which has a bundle for each worker; otherwise one is created."""
    start_bundle: int = Field(default=0, ge=0)
    """The first bundle that is used of the existing placement group."""

    @field_validator("resources")
    @classmethod
    def _custom(cls, resources: dict[str, float]) -> dict[str, float]:
        for name, amount in resources.items():
            if name in _KEYS:
                raise ValueError(f"{name}: use the key {_KEYS[name]!r}")
            if amount <= 0:
                raise ValueError(f"{name}: {amount:g} is not greater than zero")
        return dict(sorted(resources.items()))

    def request(self, name: str) -> "ResourceRequest":
        """What the pool of this name needs; it has at least one worker."""
        return ResourceRequest(
            name,
            self.workers,
            self.cpus,
            self.memory,
            self.gpus,
            self.resources,
            self.strategy,
            self.placement_group,
            self.start_bundle,
        )


@dataclass(frozen=True)
class ResourceRequest:
    """What one pool needs: a number of workers of the same size, and where they go."""

    name: str
    workers: int
    cpus: float = 1.0
    memory_bytes: int | None = None
    gpus: float = 0.0
    resources: Resources = field(default_factory=dict)
    strategy: Strategy = "PACK"
    group: str | None = None
    """The name of an existing placement group."""
    start_bundle: int = 0

    def __post_init__(self) -> None:
        if self.workers < 1 or self.cpus <= 0 or (self.memory_bytes is not None and self.memory_bytes <= 0):
            raise ValueError(f"{self.name!r}: workers, cpus and memory of a pool on Ray must be greater than zero")

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one worker."""
        amounts = {"CPU": self.cpus, "GPU": self.gpus, "memory": float(self.memory_bytes or 0), **self.resources}
        return {name: amount for name, amount in amounts.items() if amount}

    def __str__(self) -> str:
        size = format_resources(self.bundle)
        if self.workers == 1:
            return f"{self.name!r} requests 1 worker of {size}"
        total = format_resources({name: amount * self.workers for name, amount in self.bundle.items()})
        return f"{self.name!r} requests {self.workers} workers of {size} each ({total})"


@dataclass(frozen=True)
class ClusterNode:
    """One machine of a cluster."""

    name: str
    total: Resources
    free: Resources

    def capacity_for(self, request: ResourceRequest) -> int:
        """How many of the request's workers fit on this node while it is idle."""
        return min(int((self.total.get(name, 0) + ROUNDING) // amount) for name, amount in request.bundle.items())


def format_resources(amounts: Resources) -> str:
    """Amounts as text, for example `2 CPUs, 1 GPU and 1.5 GiB`."""
    parts = [
        f"{amounts[name]:g} {name}{'' if amounts[name] == 1 else 's'}" for name in ("CPU", "GPU") if name in amounts
    ]
    if "memory" in amounts:
        size, unit = amounts["memory"], "B"
        for larger in ("KiB", "MiB", "GiB", "TiB"):
            if size < 1024:
                break
            size, unit = size / 1024, larger
        parts.append(f"{size:.3g} {unit}")
    parts += [f"{amount:g} {name}" for name, amount in amounts.items() if name not in _KEYS]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts) or "nothing"


def sum_resources(amounts: Sequence[Resources]) -> dict[str, float]:
    """The sum of several amounts, by name."""
    return {
        name: sum(each.get(name, 0) for each in amounts) for name in dict.fromkeys(n for each in amounts for n in each)
    }


def find_shortage(requests: Sequence[ResourceRequest], nodes: Sequence[ClusterNode]) -> str | None:
    """Why the requests cannot be placed even on an idle cluster; None if they may fit."""
    for request in requests:
        total = {name: amount * request.workers for name, amount in request.bundle.items()}
        fit = [node.capacity_for(request) for node in nodes]
        if not any(fit):
            return f"no node is large enough for one worker of {request.name!r}"
        if request.strategy == "STRICT_PACK" and max(fit) < request.workers:
            return f"no node has {format_resources(total)}, and STRICT_PACK puts all workers on one node"
        if request.strategy == "STRICT_SPREAD" and (hosts := sum(count > 0 for count in fit)) < request.workers:
            return f"STRICT_SPREAD needs one node for each of the {request.workers} workers, and {hosts} have room"
        if sum(fit) < request.workers:
            return f"only {sum(fit)} workers of {request.name!r} fit"
    needed = sum_resources([request.bundle for request in requests for _ in range(request.workers)])
    available = sum_resources([node.total for node in nodes])
    if any(amount > available.get(name, 0) + ROUNDING for name, amount in needed.items()):
        return f"together they need {format_resources(needed)}"
    return None


def overlap_problems(requests: Sequence[ResourceRequest]) -> list[Problem]:
    """Pools that would use the same bundles of an existing placement group."""
    problems: list[Problem] = []
    for index, one in enumerate(requests):
        for other in requests[:index]:
            first, last = (
                max(one.start_bundle, other.start_bundle),
                min(one.start_bundle + one.workers, other.start_bundle + other.workers),
            )
            if one.group is not None and one.group == other.group and first < last:
                message = f"bundle {first} of {one.group!r} is used by {other.name!r} too; start at bundle {last}."
                problems.append(Problem(f"{one.name}.start_bundle", message))
    return problems


def placement_error(requests: Sequence[ResourceRequest], nodes: Sequence[ClusterNode], reason: str) -> ResourcesError:
    """An error with the reason, the requests, and what each node has and has free."""
    names = {"CPU", "memory", *(name for request in requests for name in request.bundle)}

    def text(amounts: Resources) -> str:
        return format_resources({name: amounts.get(name, 0) for name in sorted(names)})

    total, free = sum_resources([node.total for node in nodes]), sum_resources([node.free for node in nodes])
    used = {name: max(0.0, amount - free.get(name, 0)) for name, amount in total.items()}
    per_node = ", ".join(f"{node.name}: {text(node.total)}, free {text(node.free)}" for node in nodes)
    return ResourcesError(
        f"the workers cannot be placed: {reason}. {'; '.join(map(str, requests))}. "
        f"The Ray cluster has {text(total)}, of which {text(used)} are in use ({per_node or 'no node is alive'}). "
        "Request fewer `workers`, or less for each, or add nodes."
    )
