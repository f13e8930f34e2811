"""What RL agents reject when the scenario is loaded."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from tests.agents.rl.scenarios import (
    LISTS,
    RANGE,
    batch_scenario,
    live_scenario,
    load_error,
    train,
    updates,
    write_scenario,
)

from loopwright.agents.rl.options import read_option
from loopwright.scenario.load import load

pytestmark = pytest.mark.filterwarnings("ignore:You are trying to run PPO on the GPU")


@pytest.mark.parametrize(
    ("agent", "args", "words"),
    [
        ('type = "sac", trials = 90', LISTS, "[run.agent] type: 'sac' needs a range"),
        ('type = "dqn", trials = 90', RANGE, "[run.agent] type: 'dqn' needs lists of at most 4096 points"),
        ('type = "a2c", trials = 90, library = "rllib"', LISTS, "'a2c' needs 'sb3', not 'rllib'"),
        ('type = "ppo", trials = 4', LISTS, "evaluating the policy takes 4 of 4; raise it, or set evaluate = 0"),
        (
            'type = "ppo", trials = 5',
            LISTS,
            "1 of 5 remain for training, but the first update of the policy needs 2",
        ),
        ('type = "ppo", trials = 50, rollout = 64', LISTS, "46 of 50 remain for training, but the first update"),
        ('type = "ppo", trials = 90, count_cached = false', LISTS, "count_cached"),
        (
            'type = "ppo", trials = 90, options = { n_stepz = 8 }',
            LISTS,
            "[run.agent] options: unknown option 'n_stepz' of PPO. Known: learning_rate, n_steps,",
        ),
        ('type = "dqn", trials = 90, options = { clip_range = 1 }', LISTS, "unknown option 'clip_range' of DQN"),
        ('type = "ppo", trials = 90, warm_start = "nowhere"', LISTS, "has no ledger.db"),
        ('type = "dqn", trials = 90, warm_start = "nowhere"', LISTS, "'dqn' of sb3 cannot imitate"),
        ('type = "ppo"', LISTS, "trials"),
    ],
)
def test_an_impossible_configuration_is_rejected_at_load_time(tmp_path, agent, args, words):
    assert words in load_error(tmp_path, batch_scenario(agent, args))


def test_repeats_count_towards_the_budget(tmp_path):
    agent = 'type = "ppo", trials = 12, seed = 1'
    message = load_error(tmp_path, batch_scenario(agent, run="repeats = 3"))
    assert "evaluating the policy takes 12 of 12" in message
    message = load_error(tmp_path, batch_scenario(agent.replace("12", "15"), run="repeats = 3"))
    assert "3 of 15 remain for training, but the first update of the policy needs 6" in message
    assert train(tmp_path, batch_scenario(agent.replace("12", "18"), run="repeats = 3")) == 0
    assert updates(tmp_path) > 0


@pytest.mark.slow
def test_options_of_rllib_are_checked_at_load_time(tmp_path):
    def message(options: str, kind: str = "ppo") -> str:
        return load_error(tmp_path, batch_scenario(f'type = "{kind}", library = "rllib", trials = 90, {options}'))

    unknown = message("options = { lamda_ = 1.0, gamma = 0.5 }")
    assert "unknown option 'lamda_' of PPO" in unknown
    assert "Did you mean 'lambda_'?" in unknown
    assert "'gamma'" not in unknown
    wrong = message('options = { gamma = "high", num_epochs = 2.5, use_gae = 1 }')
    assert "options.gamma: must be a number, not 'high'; the default is 0.99." in wrong
    assert "options.num_epochs: must be a whole number, not 2.5" in wrong
    assert "options.use_gae: must be true or false, not 1" in wrong
    assert "`grad_clip_by` (globe) must be one of" in message('options = { grad_clip_by = "globe" }')
    assert "`minibatch_size` (99) must be <= `train_batch_size_per_learner` (64)" in message(
        "options = { minibatch_size = 99 }"
    )
    assert "unknown option 'num_sgd_iter'" in message("options = { num_sgd_iter = 3 }"), "deprecated"
    good = 'type = "dqn", library = "rllib", trials = 90, options = { grad_clip = 0.5, hiddens = [8], n_step = 3 }'
    load(write_scenario(tmp_path, batch_scenario(good)))


@pytest.mark.parametrize(
    ("annotation", "default", "value", "expected"),
    [
        (float, 0.99, 1, 1.0),
        (int | tuple[int, str], 4, [2, "episode"], (2, "episode")),
        (float | Callable[[float], float], 0.1, 0.5, 0.5),
        (int, 40.0, 0.5, 0.5),  # the annotation is wrong, the default is right
        (type["Learner"] | None, None, "module:Class", "module:Class"),  # noqa: F821   # cannot be checked
    ],
)
def test_an_option_is_read_as_the_library_declares_it(annotation, default, value, expected):
    assert read_option(annotation, default, value) == expected


@pytest.mark.parametrize(
    ("annotation", "value", "reason"),
    [
        (float | None, "high", "must be a number, not 'high'."),
        (int, True, "must be a whole number, not True."),
        (int | tuple[int, str], "often", "must be a whole number or a list, not 'often'."),
        (dict[str, Any] | None, 3, "must be a table, not 3."),
    ],
)
def test_an_option_of_the_wrong_type_is_refused(annotation, value, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        read_option(annotation, None, value)


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        ("sac", "x = { low = 0, high = 3, dtype = 'int', points = 4 }"),
        ("dqn", "x = { low = 0.0, high = 3.0, points = 4 }"),
    ],
)
def test_a_range_with_points_suits_sac_and_dqn(tmp_path, kind, args):
    load(write_scenario(tmp_path, batch_scenario(f'type = "{kind}", trials = 90', args, more="")))


def test_a_live_run_rejects_a_warm_start(tmp_path):
    assert "warm_start: not supported in a live run" in load_error(
        tmp_path, live_scenario('type = "ppo", trials = 9, warm_start = "x"')
    )


def test_a_live_budget_must_allow_one_rollout(tmp_path):
    assert "the first update of the policy needs 64" in load_error(
        tmp_path, live_scenario('type = "ppo", trials = 9, rollout = 64')
    )


@pytest.mark.parametrize(
    "path", ["gymnasium:CartPole-v1", "tests.envs.helpers:LineServer", "rl_late:make", "rl_late:Ordinary"]
)
def test_an_unsupported_action_space_is_rejected_at_load_time(tmp_path, path):
    (tmp_path / "rl_late.py").write_text(LATE)
    message = load_error(tmp_path, live_scenario('type = "sac", trials = 50', path))
    assert "[run.agent] type: 'sac' supports the action spaces Box; the server has a Discrete." in message


LATE = """
from gymnasium import Env, spaces

def make():
    from tests.envs.helpers import LineServer

    return LineServer()

class Ordinary(Env):
    def __init__(self):
        self.observation_space, self.action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(3)
"""
