"""A trained policy on disk: what it takes, what it gives, and how to apply it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopwright.core.errors import InvalidAction, LoopwrightError, storage
from loopwright.spaces.draws import Draws, EnvParamConfig
from loopwright.spaces.parameter import parameter
from loopwright.spaces.space import Space

if TYPE_CHECKING:
    from loopwright.agents.rl import RlAgent

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
        **{name: run.get(name, {}) for name in ("parameters", "env_params", "constraints")},
    }
    with storage(directory):
        (directory / f".{_CARD}").write_text(json.dumps(card, indent=2))
        (directory / f".{_CARD}").replace(directory / _CARD)


def act(directory: Path, regime: Mapping[str, Any], observation: Any = None) -> Any:
    """What the policy does: a batch policy for a regime, a live one for an observation."""
    try:
        card = json.loads((directory / _CARD).read_text())
    except (OSError, ValueError) as error:
        raise PolicyError(f"{directory} holds no policy: {error}. Give the `policy` folder of a run.") from error
    predict = _predictor(card, directory)
    if not card["live"]:
        return _batch(card, predict, regime)
    if observation is None:
        raise PolicyError("a live policy acts on an observation: give --observation with a JSON list")
    import numpy as np

    try:
        return np.asarray(predict(np.asarray(observation, np.float32))).tolist()
    except (TypeError, ValueError) as error:
        raise PolicyError(f"{observation!r} is no observation of this policy: {error}") from error


def _predictor(card: Mapping[str, Any], directory: Path) -> Any:
    if card["library"] == "rllib":
        from loopwright.agents.rllib_ray import load_policy
    else:
        from loopwright.agents.sb3 import load_policy  # type: ignore[assignment]
    try:
        return load_policy(card["algorithm"], directory)
    except (OSError, ValueError) as error:
        raise PolicyError(f"{directory} holds no whole policy yet: {error}") from error


def _batch(card: Mapping[str, Any], predict: Any, regime: Mapping[str, Any]) -> dict[str, Any]:
    from loopwright.core.trial import Observation
    from loopwright.envs.codec import ActionCodec, ObservationCodec
    from loopwright.envs.observation import RegimeEncoder

    parameters = {name: parameter(written) for name, written in card["parameters"].items()}
    configs = {name: EnvParamConfig(**config) for name, config in card["env_params"].items()}
    draws = Draws(0, parameters, configs)
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
    space = Space(parameters, tuple(card["constraints"]), frozenset(configs))
    structure = RegimeEncoder(draws) if draws.values else None
    seen = ObservationCodec(card["metrics"], structure, flat=True).encode(
        Observation(dict.fromkeys(card["metrics"]), known)
    )
    return ActionCodec(space, card["view"]).decode(predict(seen))
