"""The course of a training, for a terminal: how far it is, and its curves as they grow."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from loopwright.ledger.ledger import Ledger
from loopwright.ledger.steps import Kind, Step, steps
from loopwright.reports.formatting import number
from loopwright.reports.kinds import kind_of
from loopwright.reports.training.digest import bounds, is_number, value_of

if TYPE_CHECKING:
    from rich.table import Table

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 40
_IN_A_LINE = 12
_RECENT = 21
_DRAWN = {
    "reward": "reward",
    "kl": "KL",
    "mismatch_kl": "mismatch",
    "entropy": "entropy",
    "grad_norm": "gradient",
    "length": "length",
}


class Course:
    """What the steps of a training have come to so far, those before a resume included."""

    def __init__(self, ledger: Ledger, total: int) -> None:
        self.total = total
        self._steps: dict[Kind, dict[int, Step]] = {
            "train": {step.step: step for step in steps(ledger, "train")},
            "eval": {step.step: step for step in steps(ledger, "eval")},
        }
        self._first = self.done

    @classmethod
    def of(cls, ledger: Ledger) -> "Course | None":
        """That of a run that trains; None for others."""
        about = ledger.state("run", {})
        return cls(ledger, about["agent"]["steps"]) if kind_of(about) == "training" else None

    def add(self, kind: Kind, step: Step) -> None:
        """One more; after a crash, training may have gone back to an earlier one."""
        if step.step <= max(self._steps[kind], default=0):
            self._steps[kind] = {n: one for n, one in self._steps[kind].items() if n < step.step}
        self._steps[kind][step.step] = step
        if kind == "train":
            self._first = min(self._first, step.step - 1)

    @property
    def done(self) -> int:
        """How many steps were taken."""
        return max(self._steps["train"], default=0)

    @property
    def seconds_left(self) -> float | None:
        """How long the rest will take at the speed of the last steps, evaluations between them included."""
        fresh = [step for step in self._steps["train"].values() if step.step > self._first][-_RECENT:]
        if not fresh:
            return None
        several = len(fresh) > 1
        each = (fresh[-1].at - fresh[0].at) / (len(fresh) - 1) if several else _seconds(fresh[0])
        return max(0.0, each) * max(0, self.total - self.done)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens trained on per second, in the last step."""
        if not self.done:
            return None
        last = self._steps["train"][self.done]
        tokens, spent = last.numbers.get("tokens"), _seconds(last)
        return tokens / spent if is_number(tokens) and spent else None

    def parts(self) -> list[str]:
        """The state of the training, for one line."""
        found = [f"step {self.done}/{self.total}"]
        rewards = self._values("train", "reward")
        if rewards:
            found.append(f"reward {sparkline(rewards, _IN_A_LINE)} {number(rewards[-1], 3)}")
        if held_out := self._held_out():
            found.append(f"held-out {held_out}")
        for name in ("kl", "entropy"):
            found += [f"{_DRAWN[name]} {number(value, 3)}" for value in self._values("train", name)[-1:]]
        return found

    def speed(self) -> list[str]:
        """How fast it goes, if that is known."""
        return [] if self.tokens_per_s is None else [f"{number(round(self.tokens_per_s))} tokens/s"]

    def curves(self) -> "Table":
        """A row per curve: its course, where it is and where it came from."""
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for name, values, told in self._rows():
            table.add_row(Text(f"  {name}", "dim"), Text(sparkline(values, _WIDTH), "cyan"), Text(told))
        return table

    def _rows(self) -> Iterator[tuple[str, list[float], str]]:
        for name, title in _DRAWN.items():
            values = self._values("train", name)
            if values:
                yield title, values, f"{number(values[-1], 3)}  (began at {number(values[0], 3)})"
            held_out = self._values("eval", "reward") if name == "reward" else []
            if held_out:
                yield "held-out", held_out, f"{self._held_out()}  (began at {number(held_out[0], 3)})"

    def _held_out(self) -> str:
        """The last evaluation's reward and its interval."""
        told = [step.numbers for step in self._steps["eval"].values() if is_number(step.numbers.get("reward"))]
        return f"{number(told[-1]['reward'], 3)} (95 %: {bounds(told[-1], 'reward')})" if told else ""

    def _values(self, kind: Kind, name: str) -> list[float]:
        found = (value_of(step, name) for step in self._steps[kind].values())
        return [value for value in found if value is not None]


def _seconds(step: Step) -> float:
    return sum(step.numbers.get(phase) or 0.0 for phase in ("rollout_s", "train_s"))


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve in one line of text; many values are drawn by their means."""
    size = -(-len(values) // width)
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    if high == low:
        return _BLOCKS[0] * len(means)
    return "".join(_BLOCKS[round((mean - low) / (high - low) * (len(_BLOCKS) - 1))] for mean in means)
