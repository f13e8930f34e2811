"""What a live environment records, also after a crash."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from gymnasium import spaces
from tests.envs.helpers import LineServer, live_env, play, rows, wait_until

from loopwright.core.outcome import Outcome
from loopwright.ledger.ledger import Ledger


def test_an_episode_row_has_its_first_and_last_trial(tmp_path):
    env = live_env(tmp_path, record="episodes", drawn={"speed": [1, 2]})
    steps = play(env, 12)
    assert [info["trial"] for *_, info in steps] == list(range(1, 13))
    env.close()
    trials = list(env.book.ledger.trials())
    assert [(row.metrics["first"], row.metrics["last"], row.number) for row in trials] == [
        (1, 5, 5),
        (6, 10, 10),
        (11, 12, 12),
    ]
    assert [row.reward.value for row in trials] == [15.0, 15.0, 3.0]
    assert [row.regime for row in trials] == [one["regime"] for one in env.book.ledger.episodes()]


def test_a_resumed_run_continues_numbers_draws_and_episodes(tmp_path):
    env = live_env(tmp_path, drawn={"speed": [1, 2]})
    play(env, 7)
    env.close()
    env.book.ledger.close()
    again = live_env(tmp_path, drawn={"speed": [1, 2]})
    play(again, 5)
    last = rows(again)[-1]
    assert (last.number, last.group, last.draw) == (12, 3, 3)
    again.close()


def test_reused_arrays_are_recorded_as_they_were(tmp_path):
    class Reusing(LineServer):
        """Writes each observation into the same array, as some simulators do."""

        action_space = spaces.Box(-1, 1, (1,), np.float32)

        def __init__(self):
            super().__init__()
            self.buffer = np.zeros(2, np.float32)

        def step(self, action):
            self.buffer[0] += 1
            return self.buffer, 0.0, False, False, {}

    env = live_env(tmp_path, Reusing())
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
def test_samples_of_every_space_are_recorded(tmp_path, space, sample):
    class Still(LineServer):
        observation_space = action_space = space

        def reset(self, *, seed=None, options=None):
            return sample, {}

        def step(self, action):
            return sample, 0.0, False, False, {}

    env = live_env(tmp_path, Still())
    env.start_episode()
    env.step_now(sample)
    assert rows(env)[0].outcome is Outcome.OK
    env.close()


def test_rows_are_in_the_ledger_within_a_second(tmp_path):
    env = live_env(tmp_path)
    play(env, 3)
    wait_until(lambda: env.book.ledger.last()[0] == 3, 1.0)
    env.close()


def test_an_unfinished_episode_is_recorded_and_closed_by_the_next_run(tmp_path):
    env = live_env(tmp_path, record="episodes", drawn={"speed": [1, 2]})
    play(env, 8)
    env.flush()  # as before a checkpoint
    dead = tmp_path / "dead" / "run"  # what a dead process would leave
    dead.mkdir(parents=True)
    shutil.copy(tmp_path / "run" / "ledger.head", dead)
    left = sqlite3.connect(tmp_path / "run" / "ledger.db")
    left.execute("VACUUM INTO ?", (str(dead / "ledger.db"),))
    left.close()
    env.close()
    assert [row.number for row in env.book.ledger.trials()] == [5, 8]
    again = live_env(tmp_path / "dead", record="episodes", drawn={"speed": [1, 2]})
    assert (again.book.step, again.book.group, again.book.draw) == (8, 2, 2)
    play(again, 5)
    again.close()
    trials = list(again.book.ledger.trials())
    assert [(row.metrics["first"], row.metrics["last"], row.draw) for row in trials] == [
        (1, 5, 1),
        (6, 8, 2),
        (9, 13, 3),
    ]
    assert [row.reward.value for row in trials] == [15.0, 6.0, 15.0]
    assert [one["truncated"] for one in again.book.ledger.episodes()] == [False, True, False]


KILLED = """
    import sys, time
    from pathlib import Path
    from tests.envs.helpers import play, rows, LineServer, live_env
    class Endless(LineServer):
        def step(self, action):
            return self._observation(), 1.0, False, False, {}
    env = live_env(Path(sys.argv[1]), Endless(), record=sys.argv[2]) if sys.argv[2:] else live_env(Path(sys.argv[1]))
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


def test_s13_a_killed_live_run_resumes_without_gaps(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)])
    path = tmp_path / "run" / "ledger.db"

    def has_rows():
        if not path.exists():
            return False
        with Ledger.read(path) as ledger:
            return ledger.last()[0] > 50

    wait_until(has_rows)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    env = live_env(tmp_path)
    began_at = env.book.step
    assert began_at > 50
    play(env, 10)
    assert [row.number for row in rows(env)] == list(range(1, began_at + 11))
    env.close()


def test_s13_numbers_of_a_killed_episode_are_not_reused(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), "episodes"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    steps = [int(process.stdout.readline()) for _ in range(3)]  # three checkpoints in one episode
    os.kill(process.pid, signal.SIGKILL)
    steps += map(int, process.communicate()[0].split())
    env = live_env(tmp_path, record="episodes")
    began_at = env.book.step
    assert began_at >= steps[-1] >= 300
    play(env, 5)
    env.close()
    first, second = env.book.ledger.trials()
    assert (first.metrics["first"], first.metrics["last"]) == (1, began_at)
    assert first.reward.value == began_at
    assert (second.metrics["first"], second.metrics["last"]) == (began_at + 1, began_at + 5)
