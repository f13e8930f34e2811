"""Live environments: episodes, books, and servers that do not behave."""

import os
import signal
import subprocess
import sys
import textwrap

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from tests.envs.worlds import BAD_ANSWERS, Line, live, wait_until

from loopwright.core.env import Penalties
from loopwright.core.errors import InvalidAction
from loopwright.core.ledger import Ledger
from loopwright.core.observer import Observer
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.run import RunStopped
from loopwright.envs.server import ServerError, ServerLost


def played(env, steps, action=2):
    """Steps on, resetting where an episode ends."""
    told, over = [], True
    for _ in range(steps):
        if over:
            env.start_episode()
        told.append(env.step_now(action))
        over = told[-1][2] or told[-1][3]
    return told


def rows(env):
    env.flush()
    return list(env.run.ledger.trials())


def test_numbers_rise_over_episodes_and_each_step_is_a_row(tmp_path):
    env = live(tmp_path)
    told = played(env, 12)
    assert [info["trial"] for *_, info in told] == list(range(1, 13))
    assert [row.number for row in rows(env)] == list(range(1, 13))
    assert [row.group for row in rows(env)] == [1] * 5 + [2] * 5 + [3] * 2
    assert rows(env)[4].metrics == {"observation": [5.0, 0.0]}
    assert rows(env)[4].reward.value == 5.0
    env.shut()
    assert [one["length"] for one in env.run.ledger.episodes()] == [5, 5, 2]


def test_a_step_after_the_end_needs_a_reset(tmp_path):
    env = live(tmp_path)
    played(env, 5)
    with pytest.raises(InvalidAction, match="call reset"):
        env.step_now(0)
    assert env.run.step == 5
    env.shut()


def test_the_regime_is_drawn_per_episode_and_handed_to_the_server(tmp_path):
    env = live(tmp_path, drawn={"speed": [1, 2, 3]})
    told = played(env, 40)
    regimes = [options["env_params"]["speed"] for options in env.server.resets]
    assert len(set(regimes)) > 1
    assert [row.regime["speed"] for row in rows(env)] == [speed for speed in regimes for _ in range(5)]
    assert [info["env_params"]["speed"] for *_, info in told] == [row.regime["speed"] for row in rows(env)]
    assert [row.draw for row in rows(env)] == [n for n in range(1, 9) for _ in range(5)]
    env.shut()


def test_resetting_again_burns_neither_a_draw_nor_a_number(tmp_path):
    env = live(tmp_path, drawn={"speed": [1, 2, 3]})
    shown = [env.start_episode()[1]["env_params"] for _ in range(5)]
    assert all(one == shown[0] for one in shown)
    env.step_now(1)
    assert (rows(env)[0].number, rows(env)[0].draw, rows(env)[0].regime) == (1, 1, shown[0])
    _, info = env.start_episode()
    assert info["trial"] == 1
    env.step_now(1)
    assert [(row.number, row.group, row.draw) for row in rows(env)] == [(1, 1, 1), (2, 2, 2)]
    env.shut()


def test_the_budget_ends_the_last_episode(tmp_path):
    env = live(tmp_path, budget=7)
    assert [truncated for *_, truncated, _ in played(env, 7)] == [False] * 6 + [True]
    env.shut()
    assert [one["truncated"] for one in env.run.ledger.episodes()] == [False, True]


def test_an_episode_row_carries_its_first_and_last_trial(tmp_path):
    env = live(tmp_path, record="episodes", drawn={"speed": [1, 2]})
    told = played(env, 12)
    assert [info["trial"] for *_, info in told] == list(range(1, 13))
    env.shut()
    found = list(env.run.ledger.trials())
    assert [(row.metrics["first"], row.metrics["last"], row.number) for row in found] == [
        (1, 5, 5),
        (6, 10, 10),
        (11, 12, 12),
    ]
    assert [row.reward.value for row in found] == [15.0, 15.0, 3.0]
    assert [row.regime for row in found] == [one["regime"] for one in env.run.ledger.episodes()]


def test_going_on_keeps_numbers_draws_and_episodes_rising(tmp_path):
    env = live(tmp_path, drawn={"speed": [1, 2]})
    played(env, 7)
    env.shut()
    env.run.ledger.close()
    again = live(tmp_path, drawn={"speed": [1, 2]})
    played(again, 5)
    last = rows(again)[-1]
    assert (last.number, last.group, last.draw) == (12, 3, 3)
    again.shut()


def test_what_is_written_later_is_what_was_seen_then(tmp_path):
    class Reusing(Line):
        """Writes each observation into the same array, as some simulators do."""

        action_space = spaces.Box(-1, 1, (1,), np.float32)

        def __init__(self):
            super().__init__()
            self.buffer = np.zeros(2, np.float32)

        def step(self, action):
            self.buffer[0] += 1
            return self.buffer, 0.0, False, False, {}

    env = live(tmp_path, Reusing())
    env.start_episode()
    action = np.zeros(1, np.float32)
    for n in range(20):
        action[0] = n / 20
        env.step_now(action)
    assert [row.metrics["observation"][0] for row in rows(env)] == list(range(1, 21))
    assert [row.action[0] for row in rows(env)] == pytest.approx([n / 20 for n in range(20)])
    env.shut()


@pytest.mark.parametrize(
    ("space", "sample"),
    [
        (spaces.Box(0, 1, (2, 3), np.float32), np.zeros((3, 2), np.float32).T),
        (spaces.Discrete(4), np.int64(2)),
        (spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(0, 1, (1,))}), {"a": 1, "b": np.zeros(1, np.float32)}),
        (spaces.Tuple((spaces.Discrete(2), spaces.MultiBinary(2))), (np.int64(1), np.ones(2, np.int8))),
        (spaces.Text(5), "abc"),
    ],
)
def test_samples_of_every_space_can_be_written(tmp_path, space, sample):
    class Still(Line):
        observation_space = action_space = space

        def reset(self, *, seed=None, options=None):
            return sample, {}

        def step(self, action):
            return sample, 0.0, False, False, {}

    env = live(tmp_path, Still())
    env.start_episode()
    env.step_now(sample)
    assert rows(env)[0].outcome is Outcome.OK
    env.shut()


# -- servers that do not behave -----------------------------------------------------------------------------------


@pytest.mark.parametrize("record", ["steps", "episodes"])
@pytest.mark.parametrize("answer", BAD_ANSWERS.values(), ids=BAD_ANSWERS)
def test_an_unusable_answer_is_a_missing_metric_and_ends_the_episode(tmp_path, answer, record):
    env = live(tmp_path, Line({3: answer}), record=record)
    told = played(env, 3)
    seen, reward, terminated, truncated, info = told[-1]
    assert env.server.observation_space.contains(seen)
    assert (terminated, truncated, info["trial"], info["outcome"]) == (False, True, 3, "metric_missing")
    assert reward < min(one[1] for one in told[:-1])
    played(env, 5)
    failed = next(row for row in rows(env) if row.number == 3)
    assert (failed.outcome, failed.fault, failed.reward) == (Outcome.METRIC_MISSING, Fault.WORKLOAD, None)
    assert failed.reason
    assert [one["length"] for one in env.run.ledger.episodes()] == [3, 5]
    env.shut()


def test_a_penalty_that_is_set_is_told(tmp_path):
    env = live(tmp_path, Line({1: 5}), penalties=Penalties(metric_failure=-9.0))
    assert played(env, 1)[0][1] == -9.0
    env.shut()


@pytest.mark.parametrize("record", ["steps", "episodes"])
@pytest.mark.parametrize(
    "error", [ServerLost("gone"), RuntimeError("segfault"), ValueError("its own"), OSError(5, "io")]
)
def test_a_server_that_dies_is_lost_and_the_run_can_go_on(tmp_path, error, record):
    env = live(tmp_path, Line({3: error}), record=record)
    with pytest.raises(ServerLost):
        played(env, 3)
    row = rows(env)[-1]
    assert (row.number, row.outcome, row.fault, row.reward) == (3, Outcome.LOST, Fault.INFRA, None)
    assert str(error) in row.reason
    played(env, 2)
    assert env.run.step == 5
    env.shut()
    env.run.ledger.close()
    again = live(tmp_path, record=record)
    played(again, 5)
    assert rows(again)[-1].number == 10
    again.shut()


def test_an_action_that_the_server_cannot_read_is_invalid(tmp_path):
    env = live(tmp_path, Line({2: InvalidAction("cannot read the action")}))
    told = played(env, 3)
    assert told[1][-1]["outcome"] == "invalid"
    assert [row.outcome for row in rows(env)] == [Outcome.OK, Outcome.INVALID, Outcome.OK]
    assert rows(env)[1].fault is Fault.POLICY
    env.shut()


def test_an_action_outside_the_space_of_a_server_that_asserts_is_invalid(tmp_path):
    env = live(tmp_path, gymnasium.make("CartPole-v1").unwrapped)
    told = played(env, 1, action=7)
    assert told[0][-1]["outcome"] == "invalid"
    env.shut()


def test_a_reset_that_gives_nonsense_costs_no_number(tmp_path):
    class Mad(Line):
        def _seen(self):
            return np.full(2, np.nan, np.float32)

    env = live(tmp_path, Mad())
    with pytest.raises(ServerError, match=r"obs: element \[0\] is nan"):
        env.start_episode()
    assert env.run.step == 0
    env.shut()


# -- around it ----------------------------------------------------------------------------------------------------


def test_observers_are_told_of_every_step(tmp_path):
    class Told(Observer):
        def __init__(self):
            self.seen = []

        def before(self, trial):
            self.seen.append(("before", trial.number, trial.outcome))

        def after(self, trial):
            self.seen.append(("after", trial.number, trial.outcome))

    env, told = live(tmp_path, Line({2: 5})), Told()
    env.watch([told])
    played(env, 2)
    assert told.seen == [
        ("before", 1, None),
        ("after", 1, Outcome.OK),
        ("before", 2, None),
        ("after", 2, Outcome.METRIC_MISSING),
    ]
    env.shut()


def test_a_stop_ends_it_between_two_steps(tmp_path):
    env = live(tmp_path)
    played(env, 2)
    env.run.stop()
    with pytest.raises(RunStopped):
        env.step_now(1)
    with pytest.raises(RunStopped):
        env.start_episode()
    env.shut()
    assert env.run.step == 2
    assert [one["length"] for one in env.run.ledger.episodes()] == [2]


def test_rows_are_in_the_ledger_within_a_second_unasked(tmp_path):
    env = live(tmp_path)
    played(env, 3)
    wait_until(lambda: env.run.ledger.last()[0] == 3, 1.0)
    env.shut()


KILLED = """
    import sys, time
    from pathlib import Path
    from tests.envs.worlds import live
    env = live(Path(sys.argv[1]))
    over = True
    while True:
        if over:
            env.start_episode()
        _, _, *ends, _ = env.step_now(1)
        over = any(ends)
        time.sleep(0.001)
"""


def test_s13_a_killed_live_run_goes_on_without_gaps(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)])
    path = tmp_path / "run" / "ledger.db"

    def written():
        if not path.exists():
            return False
        with Ledger.read(path) as ledger:
            return ledger.last()[0] > 50

    wait_until(written)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    env = live(tmp_path)
    began_at = env.run.step
    assert began_at > 50
    played(env, 10)
    assert [row.number for row in rows(env)] == list(range(1, began_at + 11))
    env.shut()
