"""Episodes of several trials in batch runs (G12): one draw per episode, metrics of the last trial observed."""

import numpy as np
import pytest

import loopwright
from loopwright.agents.rl.policy import PolicyError, act
from loopwright.envs.gym.adapter import GymnasiumAdapter
from loopwright.envs.gym.vector import VectorAdapter
from tests.agents.rl.scenarios import batch_scenario, load_error, numbers, resume, rows, state, train, write_scenario
from tests.contracts.gymnasium_harness import check
from tests.envs.helpers import search_env

ARGUMENTS = {"x": [0, 1], "wind": [0, 1, 2, 3, 4, 5, 6, 7]}
HIDDEN = """
from loopwright import ObsLeafDescriptor
from loopwright.envs import SearchEnv

class Blind(SearchEnv):
    def structured_observation_descriptors(self):
        return {"last": ObsLeafDescriptor.discrete(3)}

    def encode_observation(self, metrics, regime):
        return {"last": 2 if metrics.get("y") is None else int(metrics["y"] > 0)}

def match(x, wind):
    return {"y": float(x == wind) + 0.5 * x}
"""


def environment(tmp_path, **options):
    return search_env(
        tmp_path, ARGUMENTS, lambda x, wind: 10 * wind + x, env_params={"wind": {}}, episode_steps=3, **options
    )


def test_g12_an_episode_ends_after_its_steps_and_the_budget_truncates_it(tmp_path):
    env = GymnasiumAdapter(environment(tmp_path, budget=5), view="dict")
    observation, info = env.reset()
    assert observation["observation"] == [0.0]
    ends, drawn = [], [info["env_params"]["wind"]]
    for _ in range(5):
        observation, reward, *end, info = env.step_raw({"x": 1})
        drawn.append(info["env_params"]["wind"])
        assert observation["observation"] == [reward] == [10 * drawn[-1] + 1]
        ends.append(tuple(end))
        if end[0]:
            assert env.reset()[0]["observation"] == [0.0]
    assert ends == [(False, False), (False, False), (True, False), (False, False), (False, True)]
    assert drawn[0] == drawn[1] == drawn[2] == drawn[3]
    assert [trial.draw for trial in env.inner.book.ledger.trials()] == [1, 1, 1, 2, 2]
    env.close()


def test_g12_a_reset_within_an_episode_begins_another_one(tmp_path):
    env = GymnasiumAdapter(environment(tmp_path))
    env.reset()
    env.step_raw({"x": 0})
    env.reset()
    env.reset()
    assert [env.step_raw({"x": 0})[2] for _ in range(3)] == [False, False, True]
    assert [trial.draw for trial in env.inner.book.ledger.trials()] == [1, 2, 2, 2]
    env.close()


def test_g12_each_slot_of_a_vector_has_its_own_episode(tmp_path):
    env = VectorAdapter(environment(tmp_path), 2)
    env.reset()
    for place in range(6):
        observations, rewards, terminated, _, infos = env.step(np.array([[0], [1]]))
        assert terminated.tolist() == [place % 3 == 2] * 2
        assert ("final_obs" in infos) == terminated[0]
        np.testing.assert_allclose(observations["observation"].ravel(), 0.0 if terminated[0] else rewards)
    assert [trial.draw for trial in env.inner.book.ledger.trials()] == [1, 2] * 3 + [3, 4] * 3
    env.close()


def test_g01_episodes_of_several_trials_pass_the_checker(tmp_path):
    agent = 'type = "ppo", trials = 100'
    env = loopwright.make(write_scenario(tmp_path, batch_scenario(agent, run="episode = { steps = 3 }")))
    check(env, skip_render_check=True)
    env.close()


@pytest.mark.parametrize("agent", ['type = "ppo", trials = 64, rollout = 16', 'type = "dqn", trials = 64'])
def test_a_policy_is_trained_and_evaluated_in_whole_episodes(tmp_path, agent):
    assert train(tmp_path, batch_scenario(agent, run="episode = { steps = 4 }")) == 0
    assert numbers(tmp_path) == list(range(1, 65))
    assert [trial.draw for trial in rows(tmp_path)[:48]] == [1 + n // 4 for n in range(48)]
    regimes = state(tmp_path, "policy")["regimes"]
    assert [len(row[side]["trials"]) for row in regimes for side in ("policy", "static")] == [4] * 4
    assert resume(tmp_path) == 0
    policy = tmp_path / "out" / "r" / "policy"
    assert act(policy, {"wind": 1}, {"y": -2.0})["x"] in range(4)
    assert act(policy, {"wind": 1})["x"] in range(4)
    for observation in ([1], {"z": 1}, {"y": "much"}):
        with pytest.raises(PolicyError, match="--observation"):
            act(policy, {"wind": 1}, observation)


@pytest.mark.slow
def test_a_policy_learns_from_the_metrics_of_the_trial_before(tmp_path):
    """The regime is hidden, so that only the first trial tells it: 0.5 or 1.5 for x = 1, 1 or 0 for x = 0."""
    (tmp_path / "blind.py").write_text(HIDDEN)
    agent = 'type = "ppo", trials = 1000, rollout = 64, learning_rate = 0.01, seed = 1'
    text = batch_scenario(agent, "x = [0, 1]\nwind = [0, 1]", run='env = "blind:Blind"\nepisode = { steps = 2 }')
    assert train(tmp_path, text.replace("rl_toy:score", "blind:match")) == 0
    regimes = state(tmp_path, "policy")["regimes"]
    assert [row["policy"]["action"]["x"] for row in regimes] == [0, 1]


@pytest.mark.parametrize(
    ("agent", "run", "message"),
    [
        ('type = "random", trials = 20', "episode = { steps = 2 }", "learns no policy that acts step by step; ppo"),
        ('type = "ppo", trials = 20, rollout = 8', "episode = { steps = 0 }", "[run.episode] steps"),
        ('type = "ppo", trials = 20, rollout = 8', "episode = { step = 2 }", "unknown key 'step'"),
        ('type = "ppo", trials = 15, rollout = 8', "episode = { steps = 4 }", "evaluating the policy takes 16 of 15"),
    ],
)
def test_impossible_episodes_are_refused(tmp_path, agent, run, message):
    assert message in load_error(tmp_path, batch_scenario(agent, run=run))
