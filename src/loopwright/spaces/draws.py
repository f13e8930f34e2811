"""Draws: what the environment chooses for itself in each trial (domain randomisation)."""

from collections.abc import Mapping
from random import Random
from typing import Any, Literal

from pydantic import Field

from loopwright.core.config import Config
from loopwright.core.trial import Regime
from loopwright.spaces.parameter import Choice, Fixed, Parameter


class EnvParamConfig(Config):
    """How a list-valued argument is drawn. The values themselves stay where the argument is."""

    weights: tuple[float, ...] | None = None
    """How often each candidate is drawn; they add up to 1. Without them all are equally likely."""
    encoding: Literal["categorical", "scalar", "log"] = Field(default="categorical")
    """How a learner sees the drawn value."""


class Draws:
    """The regimes of a run: a draw depends on the seed, the name and the index of the draw, and on nothing else."""

    def __init__(self, seed: int, parameters: Mapping[str, Parameter], configs: Mapping[str, EnvParamConfig]) -> None:
        self.seed, self.configs = seed, dict(configs)
        self.values = {n: p for n, p in parameters.items() if n in configs and isinstance(p, Choice)}

    def sample(self, draw: int) -> Regime:
        """The regime of a draw; empty if nothing is drawn."""
        return {name: self._one(name, choice, draw) for name, choice in self.values.items()}

    def _one(self, name: str, choice: Choice, draw: int) -> Any:
        return Random(f"{self.seed}:{name}:{draw}").choices(choice.values, self.configs[name].weights)[0]


def problem_with(target: Parameter | None, config: EnvParamConfig) -> str | None:
    """Why this argument cannot be drawn in this way, and the fix; None if it can."""
    if isinstance(target, Fixed) and isinstance(target.value, dict):
        return "is a table; only a list of plain values can be drawn. Draw one of its parts as an argument of its own"
    if isinstance(target, Fixed):
        return f"has one value, {target.value!r}; drawing needs a list of at least two"
    if not isinstance(target, Choice):
        return "is a range; drawing needs a list of candidates"
    if target.when is not None:
        return "has a `when`; a drawn argument cannot be conditional. Remove one of the two"
    if any(isinstance(value, (dict, list)) for value in target.values):
        return "has nested candidates; only plain values can be drawn"
    if problem := _unencodable(target, config.encoding):
        return problem
    weights = config.weights
    if weights is None:
        return None
    if len(weights) != len(target.values):
        return f"has {len(target.values)} candidates but {len(weights)} weights; give one weight for each"
    if any(weight < 0 for weight in weights):
        return f"has a negative weight in {list(weights)}"
    if abs(sum(weights) - 1.0) > 1e-6:
        return f"has weights that add up to {sum(weights):g}, not 1"
    return None


def _unencodable(target: Choice, encoding: str) -> str | None:
    numbers = [v for v in target.values if isinstance(v, (int, float)) and not isinstance(v, bool)]
    if encoding != "categorical" and len(numbers) < len(target.values):
        return f"has candidates that are no numbers; encoding = {encoding!r} needs numbers, use 'categorical'"
    if encoding == "log" and min(numbers) <= 0:
        return f"has the candidate {min(numbers)}; encoding = 'log' needs numbers above 0, use 'scalar'"
    return None
