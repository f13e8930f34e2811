"""The contract G15: numbers come from complete episodes, and "better" needs an interval that excludes zero."""

from random import Random

import pytest
from scipy.stats import trim_mean

from loopwright.reports.live.digest import Episodes, read_live
from loopwright.reports.live.policy import comparison
from loopwright.reports.live.statistics import (
    aggregate,
    interquartile_mean,
    probability_of_improvement,
    stratified_difference,
)
from loopwright.reports.objective import Objective
from tests.agents.rl.scenarios import live_scenario, train
from tests.envs.helpers import LineServer, live_env


def test_g15_an_episode_that_the_budget_cuts_is_in_no_mean(tmp_path):
    env = live_env(tmp_path, budget=12)
    for step in range(12):
        if step % 5 == 0:
            env.start_episode()
        env.step_now(1)
    env.close()
    with env.book.ledger:
        digest = read_live(env.book.ledger)
    assert (digest.steps, digest.episodes.total.count, digest.episodes.cut) == (12, 2, 1)


def test_g15_a_reset_in_mid_episode_and_a_close_cut_it(tmp_path):
    env = live_env(tmp_path)
    for _ in range(2):
        env.start_episode()
        env.step_now(1)
    env.close()
    assert [episode["complete"] for episode in env.book.ledger.episodes()] == [False, False]


@pytest.mark.filterwarnings("ignore:You are trying to run PPO on the GPU")
def test_g15_returns_that_do_not_change_are_not_called_an_improvement(tmp_path, capsys):
    """MountainCar fails every episode after 200 steps, and the last one is cut at 100 by the budget."""
    assert train(tmp_path, live_scenario('type = "ppo", trials = 500, rollout = 64', "gymnasium:MountainCar-v0")) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert "−200" in page
    assert "−100" not in page
    assert "cut short" in page


def test_g15_curves_are_windowed_and_begin_with_the_first_full_window():
    records = [{"first": n, "last": n, "return": float(n > 50), "length": 1} for n in range(1, 101)]
    points = Episodes.of(records, count=100).points
    assert [point.mean_reward for point in points[:9]] == [None] * 9
    assert points[49].mean_reward == 0
    assert points[-1].mean_reward == 1, "a mean over everything would be 0.5"


def noise(seed: int, times: int) -> dict:
    random = Random(seed)

    def side() -> dict:
        rewards = [random.gauss(0, 1) for _ in range(times)]
        return {"action": {"x": 1}, "reward": sum(rewards) / times, "rewards": rewards, "trials": [1]}

    return {"regimes": [{"regime": {"wind": n}, "policy": side(), "static": side()} for n in range(4)]}


@pytest.mark.parametrize("times", [1, 3])
def test_g15_on_pure_noise_a_policy_wins_as_rarely_as_a_95_percent_interval_errs(times):
    verdicts = [comparison({"policy": noise(seed, times)}.get).verdict(Objective("y")) for seed in range(200)]
    assert sum("no clear winner" not in verdict for verdict in verdicts) <= 20


def test_g15_a_clear_difference_wins():
    state = noise(1, 3)
    for row in state["regimes"]:
        row["policy"]["rewards"] = [value + 5 for value in row["policy"]["rewards"]]
        row["policy"]["reward"] += 5
    assert comparison({"policy": state}.get).verdict(Objective("y")).startswith("the policy wins")
    assert stratified_difference([([1.0], [0.0])]) is None, "one measurement of each tells nothing"


def test_g15_aggregates_are_those_of_rliable():
    random = Random(3)
    scores = [[random.gauss(task, 1) for _ in range(5)] for task in range(3)]
    everything = [score for task in scores for score in task]
    assert interquartile_mean(everything) == pytest.approx(trim_mean(everything, 0.25))
    whole = aggregate(scores)
    assert whole.low < whole.mean < whole.high
    assert probability_of_improvement([[2.0, 3.0]], [[1.0, 1.5]]).mean == 1
    assert probability_of_improvement([[1.0, 2.0]], [[1.0, 2.0]]).mean == 0.5
    below = probability_of_improvement(scores, [[score - 10 for score in task] for task in scores])
    assert (below.low, below.high) == (1, 1)


def test_g15_a_failed_step_is_not_a_complete_episode(tmp_path):
    env = live_env(tmp_path, LineServer({2: (None, 0.0, False, False, {})}))
    env.start_episode()
    env.step_now(1)
    env.step_now(1)
    env.close()
    assert [episode["complete"] for episode in env.book.ledger.episodes()] == [False]


def test_g15_returns_of_several_seeds_are_not_mixed():
    records = [
        {"first": 10 * n + 1, "last": 10 * n + 10, "return": float(n % 20), "length": 10, "episode": n}
        for n in range(40)
    ]
    episodes = Episodes.of(records, count=10, seed_trials=200)
    assert (episodes.total.count, episodes.window) == (40, 10)
    assert (episodes.before, episodes.after) == (4.5, 14.5), "the first and the last ten of the second seed"
    assert [point.mean_reward for point in episodes.points][19:22] == [19.0, 0.0, 1.0]
