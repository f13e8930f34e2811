"""An objective as its user measures it. Rewards are maximised; a metric to minimise is shown as itself, not negated."""

import re
from dataclasses import dataclass

from loopwright.reports.formatting import counted, ends, measured

_NEGATED_NAME = re.compile(r"[−-]\s*([^\W\d]\w*)")
Interval = tuple[float, float]


@dataclass(frozen=True)
class Objective:
    """One objective of a run: its name, and whether less of it is better."""

    name: str
    is_minimised: bool = False

    @classmethod
    def of(cls, label: str) -> "Objective":
        """The objective behind a reward's label: `−loss` is the metric `loss`, minimised."""
        names = [_NEGATED_NAME.fullmatch(part.strip()) for part in label.split(" + ")]
        if label and all(names):
            return cls(" + ".join(match[1] for match in names if match), is_minimised=True)
        return cls(label)

    @property
    def direction(self) -> str:
        """`minimises` or `maximises`."""
        return "minimises" if self.is_minimised else "maximises"

    def value(self, reward: float) -> float:
        """A reward, or a difference between rewards, in the objective's own unit and direction."""
        return 0.0 - reward if self.is_minimised else reward

    def interval(self, interval: Interval | None) -> Interval | None:
        """An interval of rewards in the objective's own unit, the lower end first."""
        return (self.value(interval[1]), self.value(interval[0])) if interval and self.is_minimised else interval

    def text(self, reward: float) -> str:
        """A reward in the objective's own unit, to read."""
        return measured(self.value(reward), self.name)

    def evidence(self, interval: Interval | None, count: int, noun: str = "measurement") -> str:
        """How sure a reward is, in the objective's own unit."""
        return evidence(self.interval(interval), count, noun)


def evidence(interval: Interval | None, count: int, noun: str = "measurement") -> str:
    """How sure a number is: its 95 % interval and how often it was measured."""
    if interval is None:
        return "measured once" if count == 1 else counted(count, noun)
    return f"{ends(*interval)}, {counted(count, noun)}"
