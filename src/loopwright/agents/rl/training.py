"""A training from start to end: build the learner, warm it up, learn, save, evaluate. Requires gymnasium."""

import math
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopwright.agents.rl.evaluation import LiveEvaluator
from loopwright.agents.rl.learner import (
    MAX_REGIMES,
    EvaluationConfig,
    ImitationLearner,
    LearnerContext,
    PolicyLearner,
    RlAlgorithm,
    RlConfig,
    backend,
)
from loopwright.agents.rl.policy import keep_best, policy_card, write_policy_card
from loopwright.agents.search.warm_start import warm_trials
from loopwright.core.errors import InvalidAction, LoopwrightError, storage
from loopwright.core.trial import Observation, Reward, Trial, key_of, mean_reward
from loopwright.envs.gym.adapter import Driver
from loopwright.envs.live.env import LiveEnv
from loopwright.envs.live.server import ServerError, ServerLost
from loopwright.envs.search import SearchEnv
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.steps import Step, Steps
from loopwright.ledger.trial_book import RunStopped, TrialBook
from loopwright.reports.curves import Curves
from loopwright.selection.recommendation import recommend
from loopwright.selection.trials import stored_trials

_Act = Callable[[Observation], dict[str, Any]]
"""Chooses an action, in native values."""


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
        library = backend(config.library)
        for training in _trainings(env.book, config):
            context = _context(training, 1, config.trials, env.flush)
            with (
                closing(context.curves),
                closing(
                    library.build_learner(algorithm.name, library.live_env(env), training.config, context)
                ) as learner,
            ):
                card = policy_card(env, training.config, algorithm)
                evaluator = None
                if config.evaluation is not None:
                    evaluator = LiveEvaluator(env, config.evaluation, card, training.config.seed)
                    learner.evaluate_if_due = evaluator.evaluate_if_due
                with closing(evaluator) if evaluator is not None else nullcontext():
                    _learn(learner, training.until, card)
                    if evaluator is not None:
                        evaluator.evaluate(learner)
            training.finish()
        _publish_best(env.book, config)


def _train_batch(env: SearchEnv, config: RlConfig, algorithm: RlAlgorithm, slots: int) -> None:
    repeats = env.rules.repeats
    evaluation_trials = config.evaluation_trials(env.space, repeats * env.rules.episode_steps)
    with closing(Driver(env, algorithm.view)) as driver:
        library = backend(config.library)
        for training in _trainings(env.book, config):
            until = training.until - evaluation_trials
            context = _context(training, repeats, (config.trials - evaluation_trials) // repeats, lambda: None)
            batch_env = library.batch_env(driver, slots)
            with (
                closing(context.curves),
                closing(library.build_learner(algorithm.name, batch_env, training.config, context)) as learner,
            ):
                if config.warm_start is not None and training.is_new:
                    assert isinstance(learner, ImitationLearner)  # noqa: S101  others are refused when the scenario is loaded
                    learner.imitate(warm_start_pairs(driver, config.warm_start))
                card = policy_card(env, training.config, algorithm)
                if config.evaluation is not None:
                    learner.evaluate_if_due = _BatchEvaluator(driver, config.evaluation, until, training.label, card)
                _learn(learner, until, card)
                _evaluate(driver, learner, config.measurements, training.label)
            training.finish()
        _publish_best(env.book, config)


@dataclass
class _Training:
    """The training with one seed."""

    book: TrialBook
    config: RlConfig
    directory: Path
    until: int
    """The number of its last trial."""
    label: str
    """Tells its evaluation from those of other seeds; empty if there is only one."""

    @property
    def is_new(self) -> bool:
        return not self.directory.exists() or not any(self.directory.iterdir())

    def finish(self) -> None:
        """Record that this seed needs no more training."""
        self.book.ledger.set_state("seeds", [*self.book.ledger.state("seeds", []), self.config.seed])


def _trainings(book: TrialBook, config: RlConfig) -> Iterator[_Training]:
    """A training per seed, each with the budget of one, without those that an earlier process finished."""
    folder = book.directory / "policy"
    if not config.seeds:
        yield _Training(book, config, folder, config.trials, "")
        return
    for place, seed in enumerate(config.seeds):
        if seed not in book.ledger.state("seeds", []):
            one = config.model_copy(update={"seed": seed})
            yield _Training(book, one, folder / f"seed-{seed}", (place + 1) * config.trials, f"seed {seed} ")


def _context(training: _Training, trials_per_step: int, max_steps: int, flush: Callable[[], None]) -> LearnerContext:
    book, config = training.book, training.config
    training.directory.mkdir(parents=True, exist_ok=True)
    place = book.directory if not training.label else training.directory
    curves = Curves(config.log, place, f"{book.ledger.state('id', '')}{training.label.replace(' ', '')}")
    return LearnerContext(book, trials_per_step, max_steps, flush, training.directory, curves)


def _publish_best(book: TrialBook, config: RlConfig) -> None:
    """With several seeds, copy the policy of the best one to where a single one would be."""
    scores = {seed: book.ledger.state(f"best {seed}", {}).get("return") for seed in config.seeds}
    returns = {seed: score for seed, score in scores.items() if score is not None}
    if config.seeds:
        best = max(returns, key=lambda seed: returns[seed]) if returns else config.seeds[0]
        folder = book.directory / "policy"
        source = folder / f"seed-{best}"
        with storage(folder), book.uninterrupted():
            shutil.copytree(source / "best" if (source / "best").is_dir() else source, folder, dirs_exist_ok=True)
            book.ledger.set_state("best seed", best)


def _learn(learner: PolicyLearner, until: int, card: dict[str, Any]) -> None:
    """Learn and save, also if the run is stopped or the server fails; a policy that failed to train is not saved."""
    write_policy_card(learner.context.directory, card, learner.context.book.step)
    try:
        learner.learn(until)
    except (RunStopped, ServerLost, ServerError):
        _save(learner, card)
        raise
    _save(learner, card)


def _save(learner: PolicyLearner, card: dict[str, Any]) -> None:
    learner.context.flush()
    with learner.context.book.uninterrupted():
        learner.save()
        write_policy_card(learner.context.directory, card, learner.context.book.step)


def warm_start_pairs(driver: Driver, directory: str) -> list[tuple[Any, Any]]:
    """Pairs of observation and action to imitate: the better half of an earlier run's trials under each regime."""
    env = driver.env
    by_regime: dict[str, list[tuple[float, Any, Any]]] = defaultdict(list)
    for action, trial_regime, objectives in warm_trials(env, directory):
        if trial_regime.keys() != env.draws.values.keys():
            continue
        try:
            regime = {name: choice.validate_value(trial_regime[name]) for name, choice in env.draws.values.items()}
            first = Observation(dict.fromkeys(env.metric_names), regime)
            pair = driver.encode_for_policy(first), driver.actions.encode(action)
        except InvalidAction:
            continue  # a regime or a point that this run does not have
        by_regime[key_of(regime)].append((objectives[0], *pair))
    pairs = []
    for trials in by_regime.values():
        trials.sort(key=lambda trial: -trial[0])
        pairs += [(observation, action) for _, observation, action in trials[: (len(trials) + 1) // 2]]
    return pairs


def _evaluate(driver: Driver, learner: PolicyLearner, times: int, label: str = "") -> None:
    """Measure the policy and the best static action under each regime, as ordinary trials."""
    env, regimes = driver.env, _regimes(driver)
    if not times or len(regimes) > MAX_REGIMES:
        return
    evaluation = _Evaluation(driver, times)
    # Trials of the evaluation do not compete, so that a resumed run finds the same static action.
    candidates = (trial for trial in stored_trials(env.book.ledger) if trial.number not in evaluation.numbers)
    static = recommend(candidates, env.book.ledger.state("run")).front
    rows, policy = [], _policy_of(driver, learner)
    for index, regime in enumerate(regimes):
        row: dict[str, Any] = {"regime": regime, "policy": evaluation.measure(policy, regime, f"{label}{index} policy")}
        if static:
            row["static"] = evaluation.measure(lambda _: dict(static[0].action), regime, f"{label}{index} static")
        rows.append(row)
    env.book.ledger.set_state("policy", {"evaluated_at": time.time(), "regimes": rows})
    if label:  # of several seeds, the best one is shown, and all of them in the aggregate
        _compare_seeds(env.book.ledger, learner.config.seed, rows)


def _policy_of(driver: Driver, learner: PolicyLearner, *, deterministic: bool = True) -> _Act:
    """The policy as a function from an observation to native values."""

    def act(observation: Observation) -> dict[str, Any]:
        encoded = driver.encode_for_policy(observation)
        return driver.actions.decode(learner.choose(encoded, None, None, deterministic=deterministic)[0])

    return act


def _regimes(driver: Driver) -> list[dict[str, Any]]:
    """Every regime that can be drawn."""
    regimes: list[dict[str, Any]] = [{}]
    for name, choice in driver.env.draws.values.items():
        regimes = [{**regime, name: value} for regime in regimes for value in choice.values]
    return regimes


class _BatchEvaluator:
    """Measures the policy of a batch run under every regime at regular intervals, as ordinary trials of the budget."""

    def __init__(
        self, driver: Driver, config: EvaluationConfig, until: int, label: str, card: Mapping[str, Any]
    ) -> None:
        self._card = card
        self._driver, self._config, self._until, self._label = driver, config, until, label
        self._regimes = _regimes(driver)
        self._due = driver.env.book.step + config.every

    def __call__(self, learner: PolicyLearner) -> None:
        book = self._driver.env.book
        rules = self._driver.env.rules
        cost = len(self._regimes) * self._config.episodes * rules.repeats * rules.episode_steps
        if book.step < self._due or len(self._regimes) > MAX_REGIMES or book.step + cost > self._until:
            return
        step, evaluation = book.step, _Evaluation(self._driver, self._config.episodes)
        policy = _policy_of(self._driver, learner, deterministic=self._config.deterministic)
        rewards = [
            evaluation.measure(policy, regime, f"{self._label}{index} policy at {step}")["reward"]
            for index, regime in enumerate(self._regimes)
        ]
        self._due = book.step + self._config.every
        if None in rewards:
            return  # a failed measurement has no reward, so there is no mean
        mean = sum(rewards) / len(rewards)
        Steps(book.ledger).add("eval", Step(step, time.time(), {"reward": mean, "seed": learner.config.seed}))
        learner.log_numbers(step, {"eval/reward": mean})
        name = f"best policy {self._label}"
        if mean > book.ledger.state(name, {"reward": -math.inf})["reward"]:
            keep_best(learner, self._card)
            book.ledger.set_state(name, {"step": step, "reward": mean})


def _compare_seeds(ledger: Ledger, seed: int, rows: list[dict[str, Any]]) -> None:
    scores = [row["policy"]["reward"] for row in rows]
    mean = sum(scores) / len(scores) if None not in scores else None
    ledger.set_state(f"evaluation {seed}", rows)
    if mean is not None:
        ledger.set_state(f"best {seed}", {"return": mean})
    means = {
        other: best["return"] for other in (*ledger.state("seeds", []), seed) if (best := ledger.state(f"best {other}"))
    }
    if means:
        best_rows = ledger.state(f"evaluation {max(means, key=lambda other: means[other])}")
        ledger.set_state("policy", {"evaluated_at": time.time(), "regimes": best_rows})


class _Evaluation:
    """Measurements of an evaluation, each a whole episode. Those from before a crash are reused."""

    def __init__(self, driver: Driver, times: int) -> None:
        self._driver, self._times = driver, times
        self._groups: dict[tuple[str, int, int], list[Trial]] = {}
        ledger = driver.env.book.ledger
        for number, note in ledger.notes().items():
            if "evaluation" in note and (trial := ledger.trial(number)) is not None:
                self._groups[note["evaluation"], note["time"], note.get("step", 0)] = ledger.group(trial.group)
        self.numbers = {trial.number for group in self._groups.values() for trial in group}

    def measure(self, act: _Act, regime: dict[str, Any], label: str) -> dict[str, Any]:
        """The mean reward per trial of what acts under a regime, and its last action."""
        names, steps = self._driver.env.metric_names, self._driver.env.rules.episode_steps
        action: dict[str, Any] = {}
        numbers: list[int] = []
        returns: list[float] = []
        for n in range(self._times):
            observation = Observation(dict.fromkeys(names), regime)
            rewards: list[Reward | None] = []
            metrics: Mapping[str, float | None]
            for step in range(steps):
                if group := self._groups.get((label, n, step)):
                    action, metrics = dict(group[0].action), group[0].metrics
                    numbers.append(group[0].number)
                    rewards.append(mean_reward([trial.reward for trial in group]))
                else:
                    action = act(observation)
                    feedback = self._driver.measure(action, regime, {"evaluation": label, "time": n, "step": step})
                    metrics = feedback.observation.metrics
                    numbers.append(feedback.trial)
                    rewards.append(feedback.reward)
                observation = Observation({name: metrics.get(name) for name in names}, regime, step=step + 1)
            if (reward := mean_reward(rewards)) is not None:
                returns.append(reward.value)
        mean = sum(returns) / len(returns) if len(returns) == self._times else None
        return {"action": action, "key": key_of(action), "reward": mean, "rewards": returns, "trials": numbers}
