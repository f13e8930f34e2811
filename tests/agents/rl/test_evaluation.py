"""Evaluation during training: separate episodes, the best policy beside the last, several seeds in one run."""

import pytest
from tests.agents.rl.scenarios import (
    batch_scenario,
    live_scenario,
    load_error,
    numbers,
    resume,
    state,
    train,
    train_and_interrupt,
)

from loopwright.agents.rl.policy import act
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.steps import steps

pytestmark = pytest.mark.filterwarnings("ignore:You are trying to run PPO on the GPU")
SEEDS = 'type = "ppo", trials = 200, rollout = 64, seeds = [4, 9], evaluate = { every = 100, episodes = 3 }'


def recorded(directory, kind):
    with Ledger.read(directory / "out" / "r" / "ledger.db") as ledger:
        return list(steps(ledger, kind))


def test_g15_evaluation_is_separate_from_training_and_the_best_policy_is_kept(tmp_path):
    agent = 'type = "ppo", trials = 300, rollout = 64, evaluate = { every = 100, episodes = 4 }, log = ["tensorboard"]'
    assert train(tmp_path, live_scenario(agent)) == 0
    assert numbers(tmp_path) == list(range(1, 301)), "evaluation steps are no trials"
    evals = recorded(tmp_path, "eval")
    assert [step.step for step in evals] == [100, 200, 300]
    assert all(len(step.numbers["returns"]) == 4 for step in evals)
    assert len(state(tmp_path, "baseline 0")) == 4
    best = max(step.numbers["return"] for step in evals)
    assert state(tmp_path, "best 0")["return"] == best
    assert act(tmp_path / "out" / "r" / "policy" / "best", {}, [0.0] * 4) in (0, 1)
    update = recorded(tmp_path, "train")[-1].numbers
    assert {"loss", "approx_kl", "entropy_loss", "explained_variance", "learning_rate"} <= update.keys()
    assert list((tmp_path / "out" / "r" / "tensorboard" / "1").iterdir())
    page = (tmp_path / "out" / "report.html").read_text()
    assert "4 evaluation episodes" in page
    assert "random policy" in page


def test_several_seeds_are_one_run_with_an_aggregate(tmp_path):
    assert train(tmp_path, live_scenario(SEEDS, more="envs = 2")) == 0
    assert numbers(tmp_path) == list(range(1, 401))
    assert [step.numbers["seed"] for step in recorded(tmp_path, "eval")] == [4, 4, 9, 9]
    folder = tmp_path / "out" / "r" / "policy"
    for policy in (folder, folder / "seed-4", folder / "seed-9" / "best"):
        assert act(policy, {}, [0.0] * 4) in (0, 1)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Interquartile mean of the return over 2 seeds" in page
    assert "Probability of improvement over a random policy" in page


def test_several_seeds_resume_where_they_stopped(tmp_path):
    text = live_scenario(SEEDS.replace("200", "2000").replace("every = 100", "every = 1000"))
    assert train_and_interrupt(tmp_path, text, 2300) == 130
    assert state(tmp_path, "seeds") == [4]
    assert resume(tmp_path) == 0
    assert numbers(tmp_path) == list(range(1, 4001))
    assert state(tmp_path, "seeds") == [4, 9]


def test_a_batch_run_is_evaluated_during_training_within_its_budget(tmp_path):
    agent = 'type = "ppo", trials = 120, rollout = 16, seeds = [1, 2], evaluate = { every = 32, episodes = 2 }'
    assert train(tmp_path, batch_scenario(agent)) == 0
    assert 230 <= len(numbers(tmp_path)) <= 240
    assert len(recorded(tmp_path, "eval")) >= 2
    assert (tmp_path / "out" / "r" / "policy" / "seed-2" / "best").is_dir()
    assert act(tmp_path / "out" / "r" / "policy", {"wind": 0})


def test_a_server_object_cannot_be_evaluated_and_a_seed_is_given_once(tmp_path):
    message = load_error(tmp_path, live_scenario('type = "ppo", trials = 200, seeds = [1, 1]'))
    assert "[run.agent] seeds: has a seed twice" in message


def test_several_seeds_of_a_batch_run_have_an_aggregate_and_curves(tmp_path):
    agent = 'type = "ppo", trials = 80, rollout = 16, seeds = [4, 9, 11], evaluate = { every = 16, episodes = 1 }'
    assert train(tmp_path, batch_scenario(agent)) == 0
    assert {step.numbers["seed"] for step in recorded(tmp_path, "eval")} == {4, 9, 11}
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Interquartile mean y of the policy over 3 seeds and 2 regimes" in page
    assert "Probability of improvement over the best static action" in page
    assert "evaluation reward" in page
