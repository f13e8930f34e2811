"""The live environment: numbers, episodes, failures, observers and stopping."""

from fractions import Fraction

import gymnasium
import numpy as np
import pytest
from tests.envs.helpers import BAD_STEPS, LineServer, live_env, play, rows

from loopwright.core.errors import InvalidAction
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.trial import Penalties
from loopwright.envs.live.server import ServerError, ServerLost
from loopwright.ledger.trial_book import Observer, RunStopped


def test_numbers_rise_across_episodes_and_each_step_is_a_row(tmp_path):
    env = live_env(tmp_path)
    steps = play(env, 12)
    assert [info["trial"] for *_, info in steps] == list(range(1, 13))
    assert [row.number for row in rows(env)] == list(range(1, 13))
    assert [row.group for row in rows(env)] == [1] * 5 + [2] * 5 + [3] * 2
    assert rows(env)[4].metrics == {"observation": [5.0, 0.0]}
    assert rows(env)[4].reward.value == 5.0
    env.close()
    assert [one["length"] for one in env.book.ledger.episodes()] == [5, 5, 2]


def test_a_step_after_the_end_of_an_episode_needs_a_reset(tmp_path):
    env = live_env(tmp_path)
    play(env, 5)
    with pytest.raises(InvalidAction, match="call reset"):
        env.step_now(0)
    assert env.book.step == 5
    env.close()


def test_the_regime_is_drawn_per_episode_and_passed_to_the_server(tmp_path):
    env = live_env(tmp_path, drawn={"speed": [1, 2, 3]})
    steps = play(env, 40)
    regimes = [options["env_params"]["speed"] for options in env.server.resets]
    assert len(set(regimes)) > 1
    assert [row.regime["speed"] for row in rows(env)] == [speed for speed in regimes for _ in range(5)]
    assert [info["env_params"]["speed"] for *_, info in steps] == [row.regime["speed"] for row in rows(env)]
    assert [row.draw for row in rows(env)] == [n for n in range(1, 9) for _ in range(5)]
    env.close()


def test_repeated_resets_use_up_neither_a_draw_nor_a_number(tmp_path):
    env = live_env(tmp_path, drawn={"speed": [1, 2, 3]})
    regimes = [env.start_episode()[1]["env_params"] for _ in range(5)]
    assert all(one == regimes[0] for one in regimes)
    env.step_now(1)
    assert (rows(env)[0].number, rows(env)[0].draw, rows(env)[0].regime) == (1, 1, regimes[0])
    _, info = env.start_episode()
    assert info["trial"] == 1
    env.step_now(1)
    assert [(row.number, row.group, row.draw) for row in rows(env)] == [(1, 1, 1), (2, 2, 2)]
    env.close()


def test_the_budget_ends_the_last_episode(tmp_path):
    env = live_env(tmp_path, budget=7)
    assert [truncated for *_, truncated, _ in play(env, 7)] == [False] * 6 + [True]
    env.close()
    assert [one["truncated"] for one in env.book.ledger.episodes()] == [False, True]


@pytest.mark.parametrize("record", ["steps", "episodes"])
@pytest.mark.parametrize("answer", BAD_STEPS.values(), ids=BAD_STEPS)
def test_an_unusable_step_is_a_missing_metric_and_ends_the_episode(tmp_path, answer, record):
    env = live_env(tmp_path, LineServer({3: answer}), record=record)
    steps = play(env, 3)
    observation, reward, terminated, truncated, info = steps[-1]
    assert env.server.observation_space.contains(observation)
    assert (terminated, truncated, info["trial"], info["outcome"]) == (False, True, 3, "metric_missing")
    assert reward < min(one[1] for one in steps[:-1])
    play(env, 5)
    failed = next(row for row in rows(env) if row.number == 3)
    assert (failed.outcome, failed.fault, failed.reward) == (Outcome.METRIC_MISSING, Fault.WORKLOAD, None)
    assert failed.reason.startswith(("obs: ", "reward: ", "terminated: ", "truncated: ", "info: ", "'step' returned "))
    assert [one["length"] for one in env.book.ledger.episodes()] == [3, 5]
    env.close()


def test_the_learner_receives_the_configured_penalty(tmp_path):
    env = live_env(tmp_path, LineServer({1: 5}), penalties=Penalties(metric_failure=-9.0))
    assert play(env, 1)[0][1] == -9.0
    env.close()


@pytest.mark.parametrize("record", ["steps", "episodes"])
@pytest.mark.parametrize(
    "error", [ServerLost("gone"), RuntimeError("segfault"), ValueError("its own"), OSError(5, "io"), SystemExit(3)]
)
def test_a_server_that_dies_is_lost_and_the_run_continues(tmp_path, error, record):
    env = live_env(tmp_path, LineServer({3: error}), record=record)
    with pytest.raises(ServerLost):
        play(env, 3)
    row = rows(env)[-1]
    assert (row.number, row.outcome, row.fault, row.reward) == (3, Outcome.LOST, Fault.INFRA, None)
    assert str(error) in row.reason
    play(env, 2)
    assert env.book.step == 5
    env.close()
    env.book.ledger.close()
    again = live_env(tmp_path, record=record)
    play(again, 5)
    assert rows(again)[-1].number == 10
    again.close()


def test_an_action_that_the_server_rejects_is_invalid(tmp_path):
    env = live_env(tmp_path, LineServer({2: InvalidAction("cannot read the action")}))
    steps = play(env, 3)
    assert steps[1][-1]["outcome"] == "invalid"
    assert [row.outcome for row in rows(env)] == [Outcome.OK, Outcome.INVALID, Outcome.OK]
    assert rows(env)[1].fault is Fault.POLICY
    env.close()


def test_an_action_outside_the_space_of_a_server_that_asserts_is_invalid(tmp_path):
    env = live_env(tmp_path, gymnasium.make("CartPole-v1").unwrapped)
    steps = play(env, 1, action=7)
    assert steps[0][-1]["outcome"] == "invalid"
    env.close()


def test_a_reset_with_a_bad_observation_uses_up_no_number(tmp_path):
    class Mad(LineServer):
        def _observation(self):
            return np.full(2, np.nan, np.float32)

    env = live_env(tmp_path, Mad())
    with pytest.raises(ServerError, match=r"obs: element \[0\] is nan"):
        env.start_episode()
    assert env.book.step == 0
    env.close()


@pytest.mark.parametrize("reward", [1, np.float32(1), np.int64(1), np.array(1.0), Fraction(1)])
def test_rewards_of_any_real_type_and_numpy_flags_are_accepted(tmp_path, reward):
    env = live_env(tmp_path, LineServer({1: (np.zeros(2, np.float32), reward, np.False_, np.True_, {})}))
    _, steps, terminated, truncated, info = play(env, 1)[0]
    assert (steps, terminated, truncated, info) == (1.0, False, True, {"trial": 1})
    assert (type(steps), type(terminated), type(truncated)) == (float, bool, bool)
    env.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "'reset' returned None, expected"),
        ((np.zeros(2, np.float32), None), "'reset' returned info: expected a dict, got None"),
        ((np.zeros(3, np.float32), {}), r"'reset' returned obs: expected shape \(2,\), got \(3,\)"),
    ],
)
def test_an_unusable_reset_is_an_error_that_names_the_field(tmp_path, answer, message):
    class Mad(LineServer):
        def reset(self, **options):
            return answer

    env = live_env(tmp_path, Mad())
    with pytest.raises(ServerError, match=message):
        env.start_episode()
    env.close()


def test_a_reset_that_raises_is_lost_and_the_next_one_may_succeed(tmp_path):
    class Once(LineServer):
        def reset(self, **options):
            if not self.resets:
                self.resets.append(None)
                raise SystemExit(3)
            return super().reset(**options)

    env = live_env(tmp_path, Once())
    with pytest.raises(ServerLost, match="the server failed in 'reset': SystemExit: 3"):
        env.start_episode()
    assert [info["trial"] for *_, info in play(env, 2)] == [1, 2]
    env.close()


def test_a_close_that_raises_is_logged(tmp_path, caplog):
    class Sticky(LineServer):
        def close(self):
            raise RuntimeError("stuck")

    env = live_env(tmp_path, Sticky())
    play(env, 2)
    env.close()
    assert "the server failed in 'close': RuntimeError('stuck')" in caplog.text
    assert len(list(env.book.ledger.trials())) == 2


def test_a_closed_environment_cannot_be_used(tmp_path):
    env = live_env(tmp_path)
    play(env, 2)
    env.close()
    for call in (lambda: env.step_now(1), env.start_episode):
        with pytest.raises(InvalidAction, match="the environment is closed"):
            call()


def test_observers_are_notified_of_every_step(tmp_path):
    class Told(Observer):
        def __init__(self):
            self.observation = []

        def before(self, trial):
            self.observation.append(("before", trial.number, trial.outcome))

        def after(self, trial):
            self.observation.append(("after", trial.number, trial.outcome))

    env, steps = live_env(tmp_path, LineServer({2: 5})), Told()
    env.book.observers.append(steps)
    play(env, 2)
    assert steps.observation == [
        ("before", 1, None),
        ("after", 1, Outcome.OK),
        ("before", 2, None),
        ("after", 2, Outcome.METRIC_MISSING),
    ]
    env.close()


def test_a_stop_takes_effect_between_two_steps(tmp_path):
    env = live_env(tmp_path)
    play(env, 2)
    env.book.stop()
    with pytest.raises(RunStopped):
        env.step_now(1)
    with pytest.raises(RunStopped):
        env.start_episode()
    env.close()
    assert env.book.step == 2
    assert [one["length"] for one in env.book.ledger.episodes()] == [2]
