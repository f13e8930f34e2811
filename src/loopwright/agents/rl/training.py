"""A training from start to end: build the learner, warm it up, learn, save, evaluate. Requires gymnasium."""

import time
from collections import defaultdict
from contextlib import closing, suppress
from typing import Any

from loopwright.agents.rl.learner import (
    MAX_REGIMES,
    ImitationLearner,
    LearnerContext,
    PolicyLearner,
    RlAlgorithm,
    RlConfig,
    backend,
)
from loopwright.agents.rl.policy import policy_card, write_policy_card
from loopwright.agents.search.warm_start import warm_trials
from loopwright.core.canonical import key_of
from loopwright.core.errors import InvalidAction, LoopwrightError
from loopwright.core.reward import Reward, mean_reward
from loopwright.core.trial import Trial
from loopwright.envs.gym.adapter import Driver
from loopwright.envs.live.env import LiveEnv
from loopwright.envs.live.server import ServerError, ServerLost
from loopwright.envs.search import SearchEnv
from loopwright.ledger.trial_book import RunStopped
from loopwright.reports.search.best import best_of
from loopwright.reports.search.trials import stored_trials


def train(env: LiveEnv | SearchEnv, config: RlConfig, algorithm: RlAlgorithm, *, slots: int) -> None:
    """Train until the budget is used up or the run is stopped. The policy is saved either way."""
    (env.book.directory / "policy").mkdir(parents=True, exist_ok=True)
    # A stop is not a failure: the dispatcher reports it by its exit code.
    with suppress(RunStopped):
        if isinstance(env, LiveEnv):
            _train_live(env, config, algorithm)
        else:
            _train_batch(env, config, algorithm, slots)


def _train_live(env: LiveEnv, config: RlConfig, algorithm: RlAlgorithm) -> None:
    with closing(env):
        if reason := algorithm.action_space_problem(env.server.action_space, config.library):
            raise LoopwrightError(reason)
        context = LearnerContext(env.book, 1, config.trials, env.flush)
        library = backend(config.library)
        with closing(library.build_learner(algorithm.name, library.live_env(env), config, context)) as learner:
            _learn(learner, config.trials, policy_card(env, config, algorithm))


def _train_batch(env: SearchEnv, config: RlConfig, algorithm: RlAlgorithm, slots: int) -> None:
    repeats = env.rules.repeats
    until = config.trials - config.evaluation_trials(env.space, repeats)
    with closing(Driver(env, algorithm.view)) as driver:
        context = LearnerContext(env.book, repeats, until // repeats, flush=lambda: None)
        library = backend(config.library)
        with closing(
            library.build_learner(algorithm.name, library.batch_env(driver, slots), config, context)
        ) as learner:
            if config.warm_start is not None and env.book.step == 0:
                assert isinstance(learner, ImitationLearner)  # noqa: S101  others are refused when the scenario is loaded
                learner.imitate(warm_start_pairs(driver, config.warm_start))
            _learn(learner, until, policy_card(env, config, algorithm))
            _evaluate(driver, learner, config.evaluate)


def _learn(learner: PolicyLearner, until: int, card: dict[str, Any]) -> None:
    """Learn and save, also if the run is stopped or the server fails; a policy that failed to train is not saved."""
    write_policy_card(learner.context, card)
    try:
        learner.learn(until)
    except (RunStopped, ServerLost, ServerError):
        _save(learner, card)
        raise
    _save(learner, card)


def _save(learner: PolicyLearner, card: dict[str, Any]) -> None:
    learner.context.flush()
    learner.save()
    write_policy_card(learner.context, card)


def warm_start_pairs(driver: Driver, directory: str) -> list[tuple[Any, Any]]:
    """Pairs of observation and action to imitate: the better half of an earlier run's trials under each regime."""
    env = driver.env
    by_regime: dict[str, list[tuple[float, Any, Any]]] = defaultdict(list)
    for action, trial_regime, objectives in warm_trials(env, directory):
        if trial_regime.keys() != env.draws.values.keys():
            continue
        try:
            regime = {name: choice.validate_value(trial_regime[name]) for name, choice in env.draws.values.items()}
            pair = driver.encode_regime(regime), driver.actions.encode(action)
        except InvalidAction:
            continue  # a regime or a point that this run does not have
        by_regime[key_of(regime)].append((objectives[0], *pair))
    pairs = []
    for trials in by_regime.values():
        trials.sort(key=lambda trial: -trial[0])
        pairs += [(observation, action) for _, observation, action in trials[: (len(trials) + 1) // 2]]
    return pairs


def _evaluate(driver: Driver, learner: PolicyLearner, times: int) -> None:
    """Measure the policy and the best static action under each regime, as ordinary trials."""
    env = driver.env
    regimes: list[dict[str, Any]] = [{}]
    for name, choice in env.draws.values.items():
        regimes = [{**regime, name: value} for regime in regimes for value in choice.values]
    if not times or len(regimes) > MAX_REGIMES:
        return
    evaluation = _Evaluation(driver, times)
    # Trials of the evaluation do not compete, so that a resumed run finds the same static action.
    candidates = (trial for trial in stored_trials(env.book.ledger) if trial.number not in evaluation.numbers)
    static = best_of(candidates).front
    rows = []
    for index, regime in enumerate(regimes):
        action = driver.actions.decode(learner.act(driver.encode_regime(regime)))
        row: dict[str, Any] = {"regime": regime, "policy": evaluation.measure(action, regime, f"{index} policy")}
        if static:
            row["static"] = evaluation.measure(dict(static[0].action), regime, f"{index} static")
        rows.append(row)
    env.book.ledger.set_state("policy", {"evaluated_at": time.time(), "regimes": rows})


class _Evaluation:
    """Measurements of an evaluation. Those from before a crash are reused."""

    def __init__(self, driver: Driver, times: int) -> None:
        self._driver, self._times = driver, times
        self._groups: dict[tuple[str, int], list[Trial]] = {}
        ledger = driver.env.book.ledger
        for number, note in ledger.notes().items():
            if "evaluation" in note and (trial := ledger.trial(number)) is not None:
                self._groups[note["evaluation"], note["time"]] = ledger.group(trial.group)
        self.numbers = {trial.number for group in self._groups.values() for trial in group}

    def measure(self, action: dict[str, Any], regime: dict[str, Any], label: str) -> dict[str, Any]:
        """The mean reward of an action under a regime."""
        numbers: list[int] = []
        rewards: list[Reward | None] = []
        for n in range(self._times):
            if group := self._groups.get((label, n)):
                action = dict(group[0].action)
                numbers.append(group[0].number)
                rewards.append(mean_reward([trial.reward for trial in group]))
            else:
                feedback = self._driver.measure(action, regime, {"evaluation": label, "time": n})
                numbers.append(feedback.trial)
                rewards.append(feedback.reward)
        values = [reward.value for reward in rewards if reward is not None]
        mean = sum(values) / len(values) if len(values) == len(rewards) else None
        return {"action": action, "key": key_of(action), "reward": mean, "rewards": values, "trials": numbers}
