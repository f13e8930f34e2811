"""A trained policy on disk: what it takes, what it gives, and how to apply it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopwright.core.errors import InvalidAction, LoopwrightError, storage
from loopwright.spaces.draws import Draws, EnvParamConfig
from loopwright.spaces.parameter import parameter
from loopwright.spaces.space import Space

if TYPE_CHECKING:
    from loopwright.agents.rl.agent import RlAgent

_CARD = "policy.json"


class PolicyError(LoopwrightError, ValueError):
    """A policy that cannot be loaded or applied."""


def describe(agent: "RlAgent", directory: Path) -> None:
    """Write beside the policy all that applying it needs."""
    run = agent.env.run.ledger.state("run", {})
    card = {
        "algorithm": agent.algorithm,
        "library": agent.config.library,
        "live": agent.live,
        "view": agent.view(),
        "metrics": agent.env.metric_names,
        "trials": agent.env.run.step,
        **({"observation_space": _described(agent.env.server.observation_space)} if agent.live else {}),
        **{name: run.get(name, {}) for name in ("parameters", "env_params", "constraints")},
    }
    with storage(directory):
        (directory / f".{_CARD}").write_text(json.dumps(card, indent=2))
        (directory / f".{_CARD}").replace(directory / _CARD)


def act(directory: Path, regime: Mapping[str, Any], observation: Any = None) -> Any:
    """What the policy does: a batch policy for a regime, a live one for an observation, under the regime if it has one.

    The observation is written as JSON would have it: a number, lists of numbers, and for a `Dict` a table.
    """
    try:
        card = json.loads((directory / _CARD).read_text())
    except (OSError, ValueError) as error:
        raise PolicyError(f"{directory} holds no policy: {error}. Give the `policy` folder of a run.") from error
    predict = _predictor(card, directory)
    if card["live"]:
        return _live(card, predict, regime, observation)
    if observation is not None:
        raise PolicyError("this policy acts on a regime alone; --observation is for policies of live runs")
    return _batch(card, predict, regime)


def _predictor(card: Mapping[str, Any], directory: Path) -> Any:
    if card["library"] == "rllib":
        from loopwright.agents.rl.rllib_ray import load_policy
    else:
        from loopwright.agents.rl.sb3 import load_policy  # type: ignore[assignment]
    try:
        return load_policy(card["algorithm"], directory)
    except (OSError, ValueError) as error:
        raise PolicyError(f"{directory} holds no whole policy yet: {error}") from error


def _draws(card: Mapping[str, Any]) -> Draws:
    parameters = {name: parameter(written) for name, written in card["parameters"].items()}
    return Draws(0, parameters, {name: EnvParamConfig(**config) for name, config in card["env_params"].items()})


def _known(draws: Draws, regime: Mapping[str, Any]) -> dict[str, Any]:
    """The regime with its values as they were written; each must be one that could be drawn."""
    if set(regime) != set(draws.values):
        raise PolicyError(
            f"this policy acts on the regime {', '.join(draws.values) or '(none)'}; give each with --regime"
        )
    known = {}
    for name, choice in draws.values.items():
        try:
            known[name] = choice.validate_value(regime[name])
        except InvalidAction as error:
            raise PolicyError(f"--regime {name}: {error}") from None
    return known


def _live(card: Mapping[str, Any], predict: Any, regime: Mapping[str, Any], observation: Any) -> Any:
    import numpy as np

    from loopwright.agents.rl.observation_wrappers import row_for
    from loopwright.envs.gym.codec import LiveCodec
    from loopwright.envs.gym.observation import RegimeEncoder
    from loopwright.envs.live.reading import checker, reader
    from loopwright.envs.live.wire import WireError

    draws, space = _draws(card), _space(card)
    codec = LiveCodec(space, RegimeEncoder(draws) if draws.values else None)
    codec.begin(_known(draws, regime))
    if observation is None:
        raise PolicyError(f"a live policy acts on an observation: give --observation with one of {space}, as JSON")
    try:
        seen = reader(space)(observation, "observation")
        if problem := checker(space, "observation")(seen):
            raise WireError(problem)
    except WireError as error:
        raise PolicyError(f"{observation!r} is no observation of this policy: {error}") from error
    row, shown = row_for(codec.gym_space, card["library"]), codec.encode(seen)
    return np.asarray(predict(shown if row is None else row.encode(shown))).tolist()


def _described(space: Any) -> Any:
    """A space as JSON, without the bounds of a Box: observations may overstep them, and JSON has no infinity."""
    from loopwright.envs.live.wire import WireError, describe

    try:
        return _each_box(describe(space), lambda box: {"type": "Box", "shape": box["shape"], "dtype": box["dtype"]})
    except WireError:
        return None  # it can be learned from, but not be written as JSON


def _space(card: Mapping[str, Any]) -> Any:
    from loopwright.envs.live.wire import WireError, space_from

    told = _each_box(card.get("observation_space"), lambda box: {**box, "low": 0, "high": 0})
    try:
        return space_from(told, "observation_space")
    except WireError as error:
        raise PolicyError(f"{_CARD} does not say what the policy sees: {error}. Train it again.") from error


def _each_box(told: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    if isinstance(told, list):
        return [_each_box(part, change) for part in told]
    if not isinstance(told, dict):
        return told
    return change(told) if told.get("type") == "Box" else {key: _each_box(part, change) for key, part in told.items()}


def _batch(card: Mapping[str, Any], predict: Any, regime: Mapping[str, Any]) -> dict[str, Any]:
    from loopwright.core.trial import Observation
    from loopwright.envs.gym.codec import ActionCodec, ObservationCodec
    from loopwright.envs.gym.observation import RegimeEncoder

    draws = _draws(card)
    known = _known(draws, regime)
    parameters = {name: parameter(written) for name, written in card["parameters"].items()}
    space = Space(parameters, tuple(card["constraints"]), frozenset(card["env_params"]))
    structure = RegimeEncoder(draws) if draws.values else None
    seen = ObservationCodec(card["metrics"], structure, flat=True).encode(
        Observation(dict.fromkeys(card["metrics"]), known)
    )
    return ActionCodec(space, card["view"]).decode(predict(seen))
