"""Live environments: episodes, books, and servers that do not behave."""

import contextlib
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from fractions import Fraction

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from tests.envs.worlds import BAD_ANSWERS, Line, live, wait_until

from loopwright.core.errors import InvalidAction
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.reward import Penalties
from loopwright.envs.live.server import ServerError, ServerLost
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.observer import Observer
from loopwright.ledger.trial_book import RunStopped
from loopwright.scenario.signals import Signals


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
    return list(env.book.ledger.trials())


def test_numbers_rise_over_episodes_and_each_step_is_a_row(tmp_path):
    env = live(tmp_path)
    told = played(env, 12)
    assert [info["trial"] for *_, info in told] == list(range(1, 13))
    assert [row.number for row in rows(env)] == list(range(1, 13))
    assert [row.group for row in rows(env)] == [1] * 5 + [2] * 5 + [3] * 2
    assert rows(env)[4].metrics == {"observation": [5.0, 0.0]}
    assert rows(env)[4].reward.value == 5.0
    env.close()
    assert [one["length"] for one in env.book.ledger.episodes()] == [5, 5, 2]


def test_a_step_after_the_end_needs_a_reset(tmp_path):
    env = live(tmp_path)
    played(env, 5)
    with pytest.raises(InvalidAction, match="call reset"):
        env.step_now(0)
    assert env.book.step == 5
    env.close()


def test_the_regime_is_drawn_per_episode_and_handed_to_the_server(tmp_path):
    env = live(tmp_path, drawn={"speed": [1, 2, 3]})
    told = played(env, 40)
    regimes = [options["env_params"]["speed"] for options in env.server.resets]
    assert len(set(regimes)) > 1
    assert [row.regime["speed"] for row in rows(env)] == [speed for speed in regimes for _ in range(5)]
    assert [info["env_params"]["speed"] for *_, info in told] == [row.regime["speed"] for row in rows(env)]
    assert [row.draw for row in rows(env)] == [n for n in range(1, 9) for _ in range(5)]
    env.close()


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
    env.close()


def test_the_budget_ends_the_last_episode(tmp_path):
    env = live(tmp_path, budget=7)
    assert [truncated for *_, truncated, _ in played(env, 7)] == [False] * 6 + [True]
    env.close()
    assert [one["truncated"] for one in env.book.ledger.episodes()] == [False, True]


def test_an_episode_row_carries_its_first_and_last_trial(tmp_path):
    env = live(tmp_path, record="episodes", drawn={"speed": [1, 2]})
    told = played(env, 12)
    assert [info["trial"] for *_, info in told] == list(range(1, 13))
    env.close()
    found = list(env.book.ledger.trials())
    assert [(row.metrics["first"], row.metrics["last"], row.number) for row in found] == [
        (1, 5, 5),
        (6, 10, 10),
        (11, 12, 12),
    ]
    assert [row.reward.value for row in found] == [15.0, 15.0, 3.0]
    assert [row.regime for row in found] == [one["regime"] for one in env.book.ledger.episodes()]


def test_going_on_keeps_numbers_draws_and_episodes_rising(tmp_path):
    env = live(tmp_path, drawn={"speed": [1, 2]})
    played(env, 7)
    env.close()
    env.book.ledger.close()
    again = live(tmp_path, drawn={"speed": [1, 2]})
    played(again, 5)
    last = rows(again)[-1]
    assert (last.number, last.group, last.draw) == (12, 3, 3)
    again.close()


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
    env.close()


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
    env.close()


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
    assert failed.reason.startswith(("obs: ", "reward: ", "terminated: ", "truncated: ", "info: ", "'step' returned "))
    assert [one["length"] for one in env.book.ledger.episodes()] == [3, 5]
    env.close()


def test_a_penalty_that_is_set_is_told(tmp_path):
    env = live(tmp_path, Line({1: 5}), penalties=Penalties(metric_failure=-9.0))
    assert played(env, 1)[0][1] == -9.0
    env.close()


@pytest.mark.parametrize("record", ["steps", "episodes"])
@pytest.mark.parametrize(
    "error", [ServerLost("gone"), RuntimeError("segfault"), ValueError("its own"), OSError(5, "io"), SystemExit(3)]
)
def test_a_server_that_dies_is_lost_and_the_run_can_go_on(tmp_path, error, record):
    env = live(tmp_path, Line({3: error}), record=record)
    with pytest.raises(ServerLost):
        played(env, 3)
    row = rows(env)[-1]
    assert (row.number, row.outcome, row.fault, row.reward) == (3, Outcome.LOST, Fault.INFRA, None)
    assert str(error) in row.reason
    played(env, 2)
    assert env.book.step == 5
    env.close()
    env.book.ledger.close()
    again = live(tmp_path, record=record)
    played(again, 5)
    assert rows(again)[-1].number == 10
    again.close()


def test_an_action_that_the_server_cannot_read_is_invalid(tmp_path):
    env = live(tmp_path, Line({2: InvalidAction("cannot read the action")}))
    told = played(env, 3)
    assert told[1][-1]["outcome"] == "invalid"
    assert [row.outcome for row in rows(env)] == [Outcome.OK, Outcome.INVALID, Outcome.OK]
    assert rows(env)[1].fault is Fault.POLICY
    env.close()


def test_an_action_outside_the_space_of_a_server_that_asserts_is_invalid(tmp_path):
    env = live(tmp_path, gymnasium.make("CartPole-v1").unwrapped)
    told = played(env, 1, action=7)
    assert told[0][-1]["outcome"] == "invalid"
    env.close()


def test_a_reset_that_gives_nonsense_costs_no_number(tmp_path):
    class Mad(Line):
        def _seen(self):
            return np.full(2, np.nan, np.float32)

    env = live(tmp_path, Mad())
    with pytest.raises(ServerError, match=r"obs: element \[0\] is nan"):
        env.start_episode()
    assert env.book.step == 0
    env.close()


@pytest.mark.parametrize("reward", [1, np.float32(1), np.int64(1), np.array(1.0), Fraction(1)])
def test_a_reward_may_be_any_real_number_and_a_flag_numpys(tmp_path, reward):
    env = live(tmp_path, Line({1: (np.zeros(2, np.float32), reward, np.False_, np.True_, {})}))
    _, told, terminated, truncated, info = played(env, 1)[0]
    assert (told, terminated, truncated, info) == (1.0, False, True, {"trial": 1})
    assert (type(told), type(terminated), type(truncated)) == (float, bool, bool)
    env.close()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "'reset' returned None, expected"),
        ((np.zeros(2, np.float32), None), "'reset' returned info: expected a dict, got None"),
        ((np.zeros(3, np.float32), {}), r"'reset' returned obs: expected shape \(2,\), got \(3,\)"),
    ],
)
def test_an_unusable_answer_to_reset_is_said(tmp_path, answer, said):
    class Mad(Line):
        def reset(self, **options):
            return answer

    env = live(tmp_path, Mad())
    with pytest.raises(ServerError, match=said):
        env.start_episode()
    env.close()


def test_a_reset_that_raises_is_lost_and_the_next_one_may_go_well(tmp_path):
    class Once(Line):
        def reset(self, **options):
            if not self.resets:
                self.resets.append(None)
                raise SystemExit(3)
            return super().reset(**options)

    env = live(tmp_path, Once())
    with pytest.raises(ServerLost, match="the server failed in 'reset': SystemExit: 3"):
        env.start_episode()
    assert [info["trial"] for *_, info in played(env, 2)] == [1, 2]
    env.close()


def test_a_close_that_raises_hides_nothing(tmp_path, caplog):
    class Sticky(Line):
        def close(self):
            raise RuntimeError("stuck")

    env = live(tmp_path, Sticky())
    played(env, 2)
    env.close()
    assert "the server failed in 'close': RuntimeError('stuck')" in caplog.text
    assert len(list(env.book.ledger.trials())) == 2


def test_a_closed_environment_says_so(tmp_path):
    env = live(tmp_path)
    played(env, 2)
    env.close()
    for call in (lambda: env.step_now(1), env.start_episode):
        with pytest.raises(InvalidAction, match="the environment is closed"):
            call()


# -- servers that hang --------------------------------------------------------------------------------------------


def sleeping():
    time.sleep(60)


def looping():
    while True:
        pass


def waiting():
    here, there = socket.socketpair()
    with here, there:
        here.recv(1)


def swallowing():
    for _ in range(2):
        with contextlib.suppress(BaseException):
            time.sleep(60)
    time.sleep(60)


def retrying():
    while True:
        with contextlib.suppress(Exception):
            time.sleep(60)


class Hanging(Line):
    """Hangs in one of its methods, once the time has come."""

    def __init__(self, method, hang, at=3):
        super().__init__()
        self.method, self.hang, self.calls, self.at = method, hang, 0, at

    def _perhaps(self, method):
        self.calls += method == self.method
        if method == self.method and self.calls == self.at:
            self.hang()

    def reset(self, **options):
        self._perhaps("reset")
        return super().reset(**options)

    def step(self, action):
        self._perhaps("step")
        return super().step(action)

    def close(self):
        self._perhaps("close")
        super().close()


@pytest.mark.parametrize("record", ["steps", "episodes"])
@pytest.mark.parametrize("hang", [sleeping, looping, waiting, swallowing, retrying])
def test_a_step_that_hangs_is_lost_and_the_run_can_go_on(tmp_path, hang, record):
    env = live(tmp_path, Hanging("step", hang), record=record, timeout_s=0.2)
    began_s = time.monotonic()
    with pytest.raises(ServerLost, match=r"did not respond to 'step' within 0.2 s \(timeout_s\)"):
        played(env, 3)
    assert 0.2 <= time.monotonic() - began_s < 5
    row = rows(env)[-1]
    assert (row.number, row.outcome, row.fault, row.reward) == (3, Outcome.LOST, Fault.INFRA, None)
    assert "timeout_s" in row.reason
    played(env, 2)
    assert env.book.step == 5
    env.close()
    assert [one["length"] for one in env.book.ledger.episodes()] == [3, 2]


def test_a_reset_that_hangs_is_lost_and_costs_no_number(tmp_path):
    env = live(tmp_path, Hanging("reset", sleeping), timeout_s=0.2)
    with pytest.raises(ServerLost, match="did not respond to 'reset'"):
        played(env, 15)
    assert env.book.step == 10
    played(env, 5)
    env.close()
    assert [row.number for row in env.book.ledger.trials()] == list(range(1, 16))


def test_a_close_that_hangs_holds_nobody_up(tmp_path, caplog):
    env = live(tmp_path, Hanging("close", sleeping, at=1), timeout_s=0.2)
    played(env, 3)
    env.close()
    assert "did not respond to 'close'" in caplog.text
    assert env.book.ledger.last()[0] == 3


def test_only_a_call_of_the_server_is_interrupted(tmp_path):
    env = live(tmp_path, timeout_s=0.05)
    other = live(tmp_path / "other", timeout_s=0.05)
    played(env, 3)
    time.sleep(0.4)  # a policy takes its time to learn
    played(other, 1)
    env.step_now(1)
    env.close()
    other.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "loopwright-watchdog" and _stays(thread)]


def _stays(thread):
    thread.join(2)
    return thread.is_alive()


def test_ctrl_c_in_a_step_is_over_with_it(tmp_path):
    env = live(tmp_path, Line({2: KeyboardInterrupt()}), timeout_s=0.05)
    with pytest.raises(KeyboardInterrupt):
        played(env, 2)
    time.sleep(0.3)
    env.close()


def test_a_step_in_another_thread_is_told_of_and_left_alone(tmp_path, caplog):
    release = threading.Event()
    env = live(tmp_path, Hanging("step", release.wait), timeout_s=0.05)
    told = []
    thread = threading.Thread(target=lambda: told.extend(played(env, 3)))
    thread.start()
    wait_until(lambda: "cannot be interrupted" in caplog.text)
    assert caplog.text.count("serve-env") == 1
    release.set()
    thread.join()
    assert len(told) == 3
    env.close()


def test_s12_a_signal_in_a_step_that_hangs_is_still_heard(tmp_path):
    env = live(tmp_path, Hanging("step", retrying), timeout_s=0.5)
    with Signals().installed() as signals:
        signals.book = env.book
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        with pytest.raises(ServerLost):
            played(env, 3)
        with pytest.raises(RunStopped):
            env.start_episode()
        timer.join()
    assert signals.exit_code == 143
    env.close()


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
    env.book.observers.append(told)
    played(env, 2)
    assert told.seen == [
        ("before", 1, None),
        ("after", 1, Outcome.OK),
        ("before", 2, None),
        ("after", 2, Outcome.METRIC_MISSING),
    ]
    env.close()


def test_a_stop_ends_it_between_two_steps(tmp_path):
    env = live(tmp_path)
    played(env, 2)
    env.book.stop()
    with pytest.raises(RunStopped):
        env.step_now(1)
    with pytest.raises(RunStopped):
        env.start_episode()
    env.close()
    assert env.book.step == 2
    assert [one["length"] for one in env.book.ledger.episodes()] == [2]


def test_rows_are_in_the_ledger_within_a_second_unasked(tmp_path):
    env = live(tmp_path)
    played(env, 3)
    wait_until(lambda: env.book.ledger.last()[0] == 3, 1.0)
    env.close()


def test_an_episode_without_end_is_known_within_a_second_and_closed_by_the_next_run(tmp_path):
    env = live(tmp_path, record="episodes", drawn={"speed": [1, 2]})
    played(env, 8)
    env.flush()  # as before a checkpoint
    left = sqlite3.connect(tmp_path / "run" / "ledger.db")
    left.execute("VACUUM INTO ?", (str(tmp_path / "left.db"),))  # what a dead process would leave
    left.close()
    env.close()
    assert [row.number for row in env.book.ledger.trials()] == [5, 8]
    (tmp_path / "dead" / "run").mkdir(parents=True)
    (tmp_path / "left.db").rename(tmp_path / "dead" / "run" / "ledger.db")
    again = live(tmp_path / "dead", record="episodes", drawn={"speed": [1, 2]})
    assert (again.book.step, again.book.group, again.book.draw) == (8, 2, 2)
    played(again, 5)
    again.close()
    found = list(again.book.ledger.trials())
    assert [(row.metrics["first"], row.metrics["last"], row.draw) for row in found] == [
        (1, 5, 1),
        (6, 8, 2),
        (9, 13, 3),
    ]
    assert [row.reward.value for row in found] == [15.0, 6.0, 15.0]
    assert [one["truncated"] for one in again.book.ledger.episodes()] == [False, True, False]


KILLED = """
    import sys, time
    from pathlib import Path
    from tests.envs.worlds import Line, live
    class Endless(Line):
        def step(self, action):
            return self._seen(), 1.0, False, False, {}
    env = live(Path(sys.argv[1]), Endless(), record=sys.argv[2]) if sys.argv[2:] else live(Path(sys.argv[1]))
    over = True
    while True:
        if over:
            env.start_episode()
        _, _, *ends, info = env.step_now(1)
        over = any(ends)
        if sys.argv[2:] and info["trial"] % 100 == 0:
            env.flush()
            print(info["trial"], flush=True)
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
    began_at = env.book.step
    assert began_at > 50
    played(env, 10)
    assert [row.number for row in rows(env)] == list(range(1, began_at + 11))
    env.close()


def test_s13_numbers_of_a_killed_episode_are_not_given_out_again(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), "episodes"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    told = [int(process.stdout.readline()) for _ in range(3)]  # three checkpoints in one episode
    os.kill(process.pid, signal.SIGKILL)
    told += map(int, process.communicate()[0].split())
    env = live(tmp_path, record="episodes")
    began_at = env.book.step
    assert began_at >= told[-1] >= 300
    played(env, 5)
    env.close()
    first, second = env.book.ledger.trials()
    assert (first.metrics["first"], first.metrics["last"]) == (1, began_at)
    assert first.reward.value == began_at
    assert (second.metrics["first"], second.metrics["last"]) == (began_at + 1, began_at + 5)
