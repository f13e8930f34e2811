"""Warnings about signs of reward hacking, from the numbers of the last steps."""

from collections.abc import Sequence
from math import fsum

from loopwright.ledger.steps import Step
from loopwright.reports.formatting import counted, percent

_RECENT = 10
_LIMITS = {
    "truncation_rate": (0.3, "{} of the rollouts were truncated"),
    "control_rate": (0.02, "{} of the sampled tokens are control tokens inside a turn"),
    "repetition": (0.5, "{} of the 4-grams within a turn are repetitions"),
    "length_reward": (0.8, "the correlation between length and reward is {}"),
}
"""From which mean of the last steps on each number is a sign of reward hacking."""


def hacking_signs(train: Sequence[Step]) -> list[str]:
    """A line for each number that is beyond its limit."""
    lines = []
    for name, (limit, meaning) in _LIMITS.items():
        values = [step.numbers[name] for step in train[-_RECENT:] if isinstance(step.numbers.get(name), (int, float))]
        mean = fsum(values) / len(values) if values else 0.0
        if abs(mean) >= limit:
            figures = [percent(figure) if "of the" in meaning else f"{figure:.3g}" for figure in (mean, limit)]
            steps = counted(len(values), "step")
            lines.append(
                f"Possible reward hacking: {meaning.format(figures[0])} (mean of the last {steps}; the limit is "
                f"{figures[1]}). Read some episodes: `loopwright episodes`."
            )
    return lines
