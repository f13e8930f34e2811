"""A trained policy on disk: `policy.json` says what it observes and chooses, `act` applies it. Requires gymnasium."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from loopwright.agents.rl.learner import PolicyLearner, RlAlgorithm, RlConfig, backend
from loopwright.agents.rl.library_spaces import flat_actions, flatten_codec
from loopwright.core.errors import InvalidAction, LoopwrightError, storage
from loopwright.core.trial import Observation
from loopwright.envs.gym.adapter import structure_of
from loopwright.envs.gym.codec import ActionCodec, LiveObservationCodec, ObservationCodec
from loopwright.envs.gym.observation import RegimeEncoder
from loopwright.envs.live.env import LiveEnv
from loopwright.envs.live.samples import checker, reader
from loopwright.envs.live.server import GymServer
from loopwright.envs.live.wire import WireError, decode_space, encode_space
from loopwright.envs.search import SearchEnv
from loopwright.spaces.parameter import parameter
from loopwright.spaces.space import Draws, EnvParamConfig, Space

_CARD = "policy.json"


class PolicyError(LoopwrightError, ValueError):
    """A policy that cannot be loaded or applied."""


def policy_card(env: LiveEnv | SearchEnv, config: RlConfig, algorithm: RlAlgorithm) -> dict[str, Any]:
    """What `act` needs to know of a policy. A live policy has the server's spaces."""
    server = env.server if isinstance(env, LiveEnv) else None
    run, structure = env.book.ledger.state("run", {}), structure_of(env)
    return {
        "algorithm": algorithm.name,
        "library": config.library,
        "live": server is not None,
        "view": algorithm.view,
        "metrics": env.metric_names,
        **(_spaces_as_json(server) if server is not None else {}),
        "encoder": None if structure is None or isinstance(structure, RegimeEncoder) else type(structure).__qualname__,
        "episode_steps": 1 if isinstance(env, LiveEnv) else env.rules.episode_steps,
        **{name: run.get(name, {}) for name in ("parameters", "env_params", "constraints")},
    }


def write_policy_card(directory: Path, card: Mapping[str, Any], trials: int) -> None:
    """Write the card beside the policy, with the trials so far."""
    with storage(directory):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f".{_CARD}").write_text(json.dumps({**card, "trials": trials}, indent=2))
        (directory / f".{_CARD}").replace(directory / _CARD)


def keep_best(learner: PolicyLearner, card: Mapping[str, Any]) -> None:
    """Write the policy as it is now to `best`, beside the last one."""
    directory = learner.context.directory / "best"
    with learner.context.book.uninterrupted():
        learner.write_policy(directory)
        write_policy_card(directory, card, learner.context.book.step)


def act(directory: Path, regime: Mapping[str, Any], observation: Any = None) -> Any:
    """The policy's action: of a batch policy for a regime, of a live one for an observation and the regime, if any.

    The observation is JSON: a number, lists of numbers, or an object for a `Dict` space. In episodes of several trials,
    a batch policy observes the metrics of the last one, as an object; without them it acts as at the start.
    """
    try:
        card = json.loads((directory / _CARD).read_text())
    except (OSError, ValueError) as error:
        raise PolicyError(f"no policy in {directory}: {error}. Give the `policy` directory of a run.") from error
    if encoder_class := card.get("encoder"):
        raise PolicyError(
            f"the observations of this policy are encoded by {encoder_class}.encode_observation, in the "
            "scenario's own `env`, which `act` cannot call. Load the policy with its library, as docs/rl.md shows."
        )
    metrics = {} if card["live"] else _validate_metrics(card, observation)
    try:
        predict = backend(card["library"]).load_policy(card["algorithm"], directory)
    except (OSError, ValueError) as error:
        raise PolicyError(f"the policy in {directory} is incomplete: {error}") from error
    parameters = {name: parameter(value) for name, value in card["parameters"].items()}
    draws = Draws(0, parameters, {name: EnvParamConfig(**config) for name, config in card["env_params"].items()})
    regime = _validate_regime(draws, regime)
    encoder = RegimeEncoder(draws) if draws.values else None
    if card["live"]:
        encoded = _encode_live(card, encoder, regime, observation)
        choice, description = predict(encoded), card.get("action_space")
        actions = flat_actions(decode_space(description, "action_space"), card["library"]) if description else None
        return _as_json(choice if actions is None else actions.decode(choice))
    codec = ObservationCodec(card["metrics"], encoder, flat=True)
    encoded = codec.encode(Observation(metrics, regime))
    space = Space(parameters, tuple(card["constraints"]), frozenset(card["env_params"]))
    return ActionCodec(space, card["view"]).decode(predict(encoded))


def _validate_metrics(card: Mapping[str, Any], observation: Any) -> dict[str, float | None]:
    """The metrics of the last trial, as a batch policy observes them."""
    names = card["metrics"]
    if observation is None:
        return dict.fromkeys(names)
    if card.get("episode_steps", 1) == 1:
        raise PolicyError("a policy of a batch run acts on the regime alone; --observation is for live policies")
    if not isinstance(observation, Mapping) or {*observation} != {*names}:
        example = json.dumps(dict.fromkeys(names, 0.0))
        raise PolicyError(f"--observation: give the metrics of the last trial, such as '{example}'")
    if wrong := [name for name in names if isinstance(observation[name], bool | str | list | dict)]:
        raise PolicyError(f"--observation: {wrong[0]} must be a number or null, not {observation[wrong[0]]!r}")
    return {name: observation[name] for name in names}


def _validate_regime(draws: Draws, regime: Mapping[str, Any]) -> dict[str, Any]:
    """The regime with its values as the scenario has them. Each must be one that can be drawn."""
    if set(regime) != set(draws.values):
        names = ", ".join(draws.values) or "(none)"
        raise PolicyError(f"this policy acts on the regime {names}; give each parameter with --regime")
    values = {}
    for name, choice in draws.values.items():
        try:
            values[name] = choice.validate_value(regime[name])
        except InvalidAction as error:
            raise PolicyError(f"--regime {name}: {error}") from None
    return values


def _encode_live(
    card: Mapping[str, Any], encoder: RegimeEncoder | None, regime: dict[str, Any], observation: Any
) -> Any:
    bounded = _map_boxes(card.get("observation_space"), lambda box: {**box, "low": 0, "high": 0})
    try:
        space = decode_space(bounded, "observation_space")
    except WireError as error:
        raise PolicyError(f"{_CARD} lacks the policy's observation space: {error}. Train it again.") from error
    if observation is None:
        raise PolicyError(f"a live policy acts on an observation: give --observation with one of {space}, as JSON")
    try:
        value = reader(space)(observation, "observation")
        if problem := checker(space, "observation")(value):
            raise WireError(problem)
    except WireError as error:
        raise PolicyError(f"{observation!r} is not an observation of this policy: {error}") from error
    codec = LiveObservationCodec(space, encoder)
    codec.set_regime(regime)
    flatten = flatten_codec(codec.gym_space, card["library"])
    return codec.encode(value) if flatten is None else flatten.encode(codec.encode(value))


def _as_json(action: Any) -> Any:
    if isinstance(action, Mapping):
        return {name: _as_json(part) for name, part in action.items()}
    return [_as_json(part) for part in action] if isinstance(action, tuple) else np.asarray(action).tolist()


def _spaces_as_json(server: GymServer) -> dict[str, Any]:
    """Observations without the bounds of their boxes, which they may exceed; actions with them."""
    forms = {}
    for name, space, form in (
        (
            "observation_space",
            server.observation_space,
            lambda box: {key: box[key] for key in ("type", "shape", "dtype")},
        ),
        ("action_space", server.action_space, _box_as_json),
    ):
        try:
            forms[name] = _map_boxes(encode_space(space), form)
        except WireError:
            forms[name] = None  # a space that can be learned from but has no JSON form
    return forms


def _box_as_json(box: dict[str, Any]) -> dict[str, Any]:
    """A box with its bounds; infinite ones as text, since JSON has no infinity."""

    def bounds(value: Any) -> Any:
        if isinstance(value, list):
            return [bounds(part) for part in value]
        return value if np.isfinite(value) else str(value)

    shape = tuple(box["shape"])
    return {**box, **{name: bounds(np.broadcast_to(box[name], shape).tolist()) for name in ("low", "high")}}


def _map_boxes(description: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    if isinstance(description, list):
        return [_map_boxes(part, change) for part in description]
    if not isinstance(description, dict):
        return description
    if description.get("type") == "Box":
        return change(description)
    return {key: _map_boxes(part, change) for key, part in description.items()}
