"""The race of agents: each searches the same recorded campaign, once per seed, and nothing is run."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from loopwright.agents.search.base import BudgetedConfig, SpaceAgent
from loopwright.core.agent import Agent, agents
from loopwright.core.errors import LoopwrightError, did_you_mean
from loopwright.core.trial import key_of
from loopwright.envs.replay import Recording, ReplayEnv
from loopwright.selection.regret import RegretCurves, RegretMeter


class RaceError(LoopwrightError):
    """An agent cannot take part in a race."""


def race(
    recording: Recording,
    names: Sequence[str],
    *,
    seeds: int,
    trials: int,
    show: Callable[[str, int], None] | None = None,
) -> list[RegretCurves]:
    """The regret of each agent after each trial, for every seed. `show` is called before each search."""
    if len(recording.labels) > 1:
        raise RaceError(
            f"{recording.source} has {len(recording.labels)} objectives ({', '.join(recording.labels)}); a race needs "
            "one, since regret is a single number."
        )
    contestants = {name: _contestant(name, recording, trials) for name in names}
    meter, results = RegretMeter(recording), []
    for name, agent in contestants.items():
        curves, estimated, seconds = [], 0, 0.0
        for place in range(seeds):
            if show is not None:
                show(name, place)
            # Not the seeds that people use: `random` with the campaign's own would find exactly its points.
            seed = int(key_of("race", place)[:8], 16)
            config: Any = agent.Config.model_validate({"type": name, "trials": trials, "seed": seed})
            started_s = time.perf_counter()
            with ReplayEnv(recording, trials=trials, seed=seed) as env:
                agent(env, config).run()
                curve = meter.curve(env.book.ledger.trials())
                # An agent that ends early, for example because it has seen all points, keeps what it has.
                curves.append(tuple(curve + curve[-1:] * (trials - len(curve))))
                estimated += env.estimated
            seconds += time.perf_counter() - started_s
        total = seeds * trials
        results.append(RegretCurves(name, tuple(curves), estimated / total, total / seconds))
    return results


def _contestant(name: str, recording: Recording, trials: int) -> type[Agent]:
    """The agent of this name, if it can search this space."""
    able = [each for each, kind in agents.working().items() if _problem(kind, recording) is None]
    if name not in agents.names():
        raise RaceError(f"unknown agent {name!r}. {did_you_mean(name, able)}")
    agent = agents.get(name)
    if problem := _problem(agent, recording):
        raise RaceError(f"agent {name!r} {problem}. Agents that can race: {', '.join(able)}.")
    config = agent.Config.model_validate({"type": name, "trials": trials})
    if problems := agent.problems(config, recording.space, recording.source):
        raise RaceError(f"agent {name!r}: {problems[0].key}: {problems[0].message}")
    return agent


def _problem(agent: type[Agent], recording: Recording) -> str | None:
    if not (issubclass(agent, SpaceAgent) and issubclass(agent.Config, BudgetedConfig)):
        return "does not search a space with a budget of `trials`"
    if recording.env_params and not agent.samples_env_params:
        return "does not sample env_params, which the campaign has"
    return None
