"""How a ratio is measured: rounds of ours and the peer in turn, and the best of each.

A busy machine only ever makes a round slower, so the best of several is what the code costs.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """One measured figure and what it must reach."""

    name: str
    value: float
    target: float | None
    """None for a figure that is shown beside others."""
    unit: str = "×"
    at_least: bool = False
    detail: str = ""

    @property
    def passed(self) -> bool:
        """Whether the target is met."""
        if self.target is None:
            return True
        return self.value >= self.target if self.at_least else self.value <= self.target

    @property
    def goal(self) -> str:
        """The target in words."""
        return "none" if self.target is None else f"{'≥' if self.at_least else '≤'} {self.target:g} {self.unit}"

    def __str__(self) -> str:
        mark = "pass" if self.passed else "FAIL"
        return f"{mark}  {self.name}: {self.value:.3g} {self.unit} (target {self.goal})  {self.detail}"


def seconds(work: Callable[[], object]) -> float:
    """How long it takes, once."""
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def best_of(rounds: int, contenders: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """The best time in seconds of each, measured in turns so that a disturbance meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, work in contenders.items():
            times[name].append(seconds(work))
    return {name: min(values) for name, values in times.items()}
