"""The progress of a training for a terminal: its step, and its curves as they grow."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from loopwright.ledger.ledger import Ledger
from loopwright.ledger.steps import Kind, Step, steps
from loopwright.reports.formatting import counted, number
from loopwright.reports.kinds import kind_of
from loopwright.reports.training.digest import bounds, hacking_signs, is_number, value_of

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 40
_LINE_WIDTH = 12
_RECENT = 21
_CURVES = {
    "reward": "reward",
    "kl": "KL",
    "mismatch_kl": "mismatch",
    "entropy": "entropy",
    "grad_norm": "gradient",
    "length": "length",
}


class TrainingProgress:
    """The steps and evaluations of a training so far, those before a resume included."""

    def __init__(self, ledger: Ledger, total: int) -> None:
        self.total = total
        self._steps: dict[Kind, dict[int, Step]] = {
            "train": {step.step: step for step in steps(ledger, "train")},
            "eval": {step.step: step for step in steps(ledger, "eval")},
        }
        self._first = self.done

    @classmethod
    def of(cls, ledger: Ledger) -> "TrainingProgress | None":
        """The progress of a training run; None for other kinds."""
        about = ledger.state("run", {})
        return cls(ledger, about["agent"]["steps"]) if kind_of(about) == "training" else None

    def add(self, kind: Kind, step: Step) -> None:
        """Add a step or an evaluation. Earlier ones may be repeated; later evaluations stay valid."""
        self._steps[kind][step.step] = step
        if kind == "train":
            self._steps[kind] = {n: each for n, each in self._steps[kind].items() if n <= step.step}
            self._first = min(self._first, step.step - 1)

    @property
    def done(self) -> int:
        """The number of steps so far."""
        return max(self._steps["train"], default=0)

    @property
    def seconds_left(self) -> float | None:
        """The time left at the speed of the last steps, including the evaluations between them."""
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
        tokens, seconds = last.numbers.get("tokens"), _seconds(last)
        return tokens / seconds if is_number(tokens) and seconds else None

    def parts(self) -> list[str]:
        """The state of the training, for one line."""
        parts = [f"step {self.done}/{self.total}"]
        rewards = self._values("train", "reward")
        if rewards:
            parts.append(f"reward {sparkline(rewards, _LINE_WIDTH)} {number(rewards[-1], 3)}")
        if held_out := self._held_out():
            parts.append(f"held-out {held_out}")
        for name in ("kl", "entropy"):
            parts += [f"{_CURVES[name]} {number(value, 3)}" for value in self._values("train", name)[-1:]]
        return parts

    def notes(self) -> list[str]:
        """What to look into, for one line."""
        short = int(sum(self._values("train", "short")))
        notes = [counted(short, "short group")] if short else []
        return notes + ["possible reward hacking"] * bool(hacking_signs([*self._steps["train"].values()]))

    def speed(self) -> list[str]:
        """Tokens per second for one line, if the last step was trained on any."""
        return [f"{number(round(self.tokens_per_s))} tokens/s"] if self.tokens_per_s else []

    def curves(self) -> Table:
        """A row per curve: its sparkline, its latest and its first value."""
        rows = []
        for name, title in _CURVES.items():
            if values := self._values("train", name):
                rows.append((title, values, number(values[-1], 3)))
            if name == "reward" and (values := self._values("eval", "reward")):
                rows.append(("held-out", values, self._held_out()))
        table = Table.grid(padding=(0, 2))
        for title, values, latest in rows:
            summary = f"{latest}  (began at {number(values[0], 3)})"
            table.add_row(Text(f"  {title}", "dim"), Text(sparkline(values, _WIDTH), "cyan"), Text(summary))
        return table

    def _held_out(self) -> str:
        """The last evaluation's reward and its interval."""
        evals = [step.numbers for step in self._steps["eval"].values() if is_number(step.numbers.get("reward"))]
        if not evals:
            return ""
        cuts = evals[-1].get("cuts") or 0
        notes = ["unreliable"] if evals[-1].get("unreliable") else []
        notes += [f"{number(cuts)} cut off"] if cuts else []
        held_out = f"{number(evals[-1]['reward'], 3)} (95 %: {bounds(evals[-1], 'reward')})"
        return f"{held_out} {', '.join(notes)}".rstrip()

    def _values(self, kind: Kind, name: str) -> list[float]:
        values = (value_of(step, name) for step in self._steps[kind].values())
        return [value for value in values if value is not None]


def _seconds(step: Step) -> float:
    return sum(step.numbers.get(phase) or 0.0 for phase in ("rollout_s", "train_s"))


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve in one line of text; where there are more values than columns, means of neighbours are drawn."""
    size = -(-len(values) // width)
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    if high == low:
        return _BLOCKS[0] * len(means)
    return "".join(_BLOCKS[round((mean - low) / (high - low) * (len(_BLOCKS) - 1))] for mean in means)
