"""A training from start to end: build the learner, warm it up, learn, evaluate, save. Imported late, for its extras."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopwright.agents.policy import describe
from loopwright.agents.warm import warm_trials
from loopwright.core.canonical import key_of
from loopwright.core.trial import Feedback, Observation
from loopwright.envs.adapter import Driver, LiveAdapter, RunStopped
from loopwright.envs.live import LiveEnv
from loopwright.envs.trial import TrialEnv
from loopwright.reports.best import best_of

if TYPE_CHECKING:
    from loopwright.agents.rl import Learner, RlAgent


def train(agent: "RlAgent") -> int:
    """Train until the budget is used up or the run is stopped; the policy is saved either way."""
    work = _live if agent.live else _batch
    directory = agent.env.run.directory / "policy"
    directory.mkdir(parents=True, exist_ok=True)
    return work(agent, directory)


def _batch(agent: "RlAgent", directory: Path) -> int:
    env: TrialEnv = agent.env
    driver = Driver(env, agent.view())
    try:
        agent._learner = learner = _learner(agent, driver, directory)
        if agent.config.warm_start is not None and env.run.step == 0:
            learner.imitate(_imitated(driver, agent.config.warm_start))
        regimes = _regimes(env)
        reserved = 2 * len(regimes) * agent.config.evaluate * env.terms.repeats
        try:
            learner.learn(max(1, agent.config.trials - reserved))
            _save(agent, learner, directory)
            _evaluate(driver, learner, regimes, agent.config.evaluate)
        except RunStopped:
            _save(agent, learner, directory)
    finally:
        driver.close()
    return 0


def _live(agent: "RlAgent", directory: Path) -> int:
    env: LiveEnv = agent.env
    adapter = LiveAdapter(env)
    try:
        agent._learner = learner = _learner(agent, adapter, directory)
        try:
            learner.learn(agent.config.trials)
        except RunStopped:
            pass
        finally:
            env.flush()
            _save(agent, learner, directory)
    finally:
        adapter.close()
    return 0


def _learner(agent: "RlAgent", env: Any, directory: Path) -> "Learner":
    run = agent.env.run
    flush = agent.env.flush if isinstance(agent.env, LiveEnv) else lambda: None
    if agent.config.library == "rllib":
        from loopwright.agents.rllib_ray import RllibLearner

        return RllibLearner(agent.algorithm, env, agent.config, directory, lambda: run.step, flush)
    from loopwright.agents.sb3 import Sb3Learner, SlotVecEnv

    world = SlotVecEnv(env, agent.parallel) if isinstance(env, Driver) else env
    return Sb3Learner(agent.algorithm, world, agent.config, directory, lambda: run.step, flush)


def _save(agent: "RlAgent", learner: "Learner", directory: Path) -> None:
    learner.save(directory)
    describe(agent, directory)


def _imitated(driver: Driver, folder: str) -> list[tuple[Any, Any]]:
    """The better half of an earlier run's trials, as what the policy would have seen and should have done."""
    warm = sorted(warm_trials(driver.env, folder), key=lambda pair: -pair[1][0])
    better = warm[: max(1, len(warm) // 2)]
    blank = Observation(dict.fromkeys(driver.env.metric_names), driver.env.reset().context)
    return [(driver.observations.encode(blank), driver.actions.encode(action)) for action, _ in better]


def _regimes(env: TrialEnv) -> list[dict[str, Any]]:
    """Every regime that can be drawn, or the one of a run that draws nothing."""
    regimes: list[dict[str, Any]] = [{}]
    for name, choice in env.draws.values.items():
        regimes = [{**regime, name: value} for regime in regimes for value in choice.values]
    return regimes if len(regimes) <= 64 else []


def _evaluate(driver: Driver, learner: "Learner", regimes: list[dict[str, Any]], times: int) -> None:
    """Measure the policy under each regime, and beside it the best static action; both are trials like any other."""
    env = driver.env
    static = best_of(env.run.ledger.trials()).front
    rows = []
    for regime in regimes if times else []:
        seen = driver.observations.encode(Observation(dict.fromkeys(env.metric_names), regime))
        own = driver.actions.decode(learner.act(seen))
        row: dict[str, Any] = {"regime": regime, "policy": _measured(driver, own, regime, times)}
        if static:
            row["static"] = _measured(driver, dict(static[0].action), regime, times)
        rows.append(row)
    env.run.ledger.set_state("policy", {"evaluated_at": time.time(), "regimes": rows})


def _measured(driver: Driver, action: dict[str, Any], regime: dict[str, Any], times: int) -> dict[str, Any]:
    told: list[Feedback] = [driver.measure(action, regime) for _ in range(times)]
    rewards = [feedback.reward.value for feedback in told if feedback.reward is not None]
    mean = sum(rewards) / len(rewards) if len(rewards) == len(told) else None
    return {"action": action, "key": key_of(action), "reward": mean, "trials": [feedback.trial for feedback in told]}
