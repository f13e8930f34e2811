"""A training from start to end: build the learner, warm it up, learn, evaluate, save. Imported late, for its extras."""

import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopwright.agents.rl.agent import MOST_REGIMES, Books, reserved
from loopwright.agents.rl.observation_wrappers import in_sight
from loopwright.agents.rl.policy import describe
from loopwright.agents.search.warm_start import warm_trials
from loopwright.core.canonical import key_of
from loopwright.core.errors import InvalidAction, LoopwrightError
from loopwright.core.reward import Reward
from loopwright.core.trial import Trial
from loopwright.envs.gym.adapter import Driver, LiveAdapter
from loopwright.envs.live.env import LiveEnv
from loopwright.envs.live.server import ServerError, ServerLost
from loopwright.envs.search import TrialEnv
from loopwright.ledger.env import mean_reward
from loopwright.ledger.run import RunStopped
from loopwright.reports.search.best import best_of

if TYPE_CHECKING:
    from loopwright.agents.rl.agent import Learner, RlAgent


def train(agent: "RlAgent") -> int:
    """Train until the budget is used up or the run is stopped; the policy is saved either way."""
    work = _live if agent.live else _batch
    directory = agent.env.run.directory / "policy"
    directory.mkdir(parents=True, exist_ok=True)
    # A stop is no failure: the dispatcher knows of it, and says so by its exit code.
    with suppress(RunStopped):
        work(agent, directory)
    return 0


def _batch(agent: "RlAgent", directory: Path) -> None:
    env: TrialEnv = agent.env
    driver = Driver(env, agent.view())
    learning = agent.config.trials - reserved(agent.config, env.space, env.terms.repeats)
    try:
        agent._learner = learner = _learner(agent, driver, directory, learning)
        if agent.config.warm_start is not None and env.run.step == 0:
            learner.imitate(_imitated(driver, agent.config.warm_start))
        _learn(agent, learner, directory, learning)
        _evaluate(driver, learner, _regimes(env), agent.config.evaluate)
    finally:
        driver.close()


def _live(agent: "RlAgent", directory: Path) -> None:
    env: LiveEnv = agent.env
    adapter = LiveAdapter(env)
    try:
        if reason := agent.unable(adapter.action_space):
            raise LoopwrightError(reason)
        world = in_sight(adapter, agent.config.library)
        agent._learner = learner = _learner(agent, world, directory, agent.config.trials)
        _learn(agent, learner, directory, agent.config.trials)
    finally:
        adapter.close()


def _learn(agent: "RlAgent", learner: "Learner", directory: Path, until: int) -> None:
    """Learn, and save; also when the run is stopped or the server fails, but not what a failed training has left."""
    describe(agent, directory)
    try:
        learner.learn(until)
    except (RunStopped, ServerLost, ServerError):
        _save(agent, learner, directory)
        raise
    _save(agent, learner, directory)


def _learner(agent: "RlAgent", env: Any, directory: Path, learning: int) -> "Learner":
    run = agent.env.run
    flush = agent.env.flush if isinstance(agent.env, LiveEnv) else lambda: None
    cost = agent.env.terms.repeats
    books = Books(directory, lambda: run.step, flush, cost, learning // cost)
    if agent.config.library == "rllib":
        from loopwright.agents.rl.rllib_ray import RllibLearner

        return RllibLearner(agent.algorithm, env, agent.config, books)
    from loopwright.agents.rl.sb3 import Sb3Learner, SlotVecEnv

    world = SlotVecEnv(env, agent.parallel) if isinstance(env, Driver) else env
    return Sb3Learner(agent.algorithm, world, agent.config, books)


def _save(agent: "RlAgent", learner: "Learner", directory: Path) -> None:
    if isinstance(agent.env, LiveEnv):
        agent.env.flush()
    learner.save(directory)
    describe(agent, directory)


def _imitated(driver: Driver, folder: str) -> list[tuple[Any, Any]]:
    """The better half of what an earlier run tried under each regime: what the policy sees there, and should do."""
    env = driver.env
    by_regime: dict[str, list[tuple[float, Any, Any]]] = defaultdict(list)
    for action, regime, objectives in warm_trials(env, folder):
        if regime.keys() != env.draws.values.keys():
            continue
        try:
            known = {name: choice.validate_value(regime[name]) for name, choice in env.draws.values.items()}
            seen = driver.regime_alone(known)
            by_regime[key_of(known)].append((objectives[0], seen, driver.actions.encode(action)))
        except InvalidAction:
            continue  # a regime or a point that this run does not have
    pairs = []
    for tried in by_regime.values():
        tried.sort(key=lambda one: -one[0])
        pairs += [(seen, action) for _, seen, action in tried[: (len(tried) + 1) // 2]]
    return pairs


def _regimes(env: TrialEnv) -> list[dict[str, Any]]:
    """Every regime that can be drawn, or the one of a run that draws nothing; none where they are too many."""
    regimes: list[dict[str, Any]] = [{}]
    for name, choice in env.draws.values.items():
        regimes = [{**regime, name: value} for regime in regimes for value in choice.values]
    return regimes if len(regimes) <= MOST_REGIMES else []


def _evaluate(driver: Driver, learner: "Learner", regimes: list[dict[str, Any]], times: int) -> None:
    """Measure the policy under each regime, and beside it the best static action; both are trials like any other."""
    if not times or not regimes:
        return
    env = driver.env
    before = _Evaluated(driver)
    # The same after a resume: what was measured for the evaluation itself does not compete.
    static = best_of(trial for trial in env.run.ledger.trials() if trial.number not in before.numbers).front
    rows = []
    for index, regime in enumerate(regimes):
        seen = driver.regime_alone(regime)
        own = driver.actions.decode(learner.act(seen))
        row: dict[str, Any] = {"regime": regime, "policy": before.measured(own, regime, f"{index} policy", times)}
        if static:
            row["static"] = before.measured(dict(static[0].action), regime, f"{index} static", times)
        rows.append(row)
    env.run.ledger.set_state("policy", {"evaluated_at": time.time(), "regimes": rows})


class _Evaluated:
    """The measurements of an evaluation, those that were made before a crash included: none is made twice."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self._ledger = driver, driver.env.run.ledger
        self._groups: dict[tuple[str, int], list[Trial]] = {}
        for number, note in self._ledger.notes().items():
            if "evaluation" in note and (trial := self._ledger.trial(number)) is not None:
                self._groups[note["evaluation"], note["time"]] = self._ledger.group(trial.group)
        self.numbers = {trial.number for group in self._groups.values() for trial in group}

    def measured(self, action: dict[str, Any], regime: dict[str, Any], what: str, times: int) -> dict[str, Any]:
        """How an action does under a regime."""
        told: list[tuple[int, Reward | None]] = []
        for n in range(times):
            if group := self._groups.get((what, n)):
                action = dict(group[0].action)
                told.append((group[0].number, mean_reward([trial.reward for trial in group])))
            else:
                feedback = self._driver.measure(action, regime, {"evaluation": what, "time": n})
                told.append((feedback.trial, feedback.reward))
        rewards = [reward.value for _, reward in told if reward is not None]
        mean = sum(rewards) / len(rewards) if len(rewards) == len(told) else None
        return {"action": action, "key": key_of(action), "reward": mean, "trials": [number for number, _ in told]}
