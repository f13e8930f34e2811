"""Servers that hang in a call, and calls that must not be interrupted."""

import contextlib
import os
import signal
import socket
import threading
import time

import pytest
from tests.envs.helpers import LineServer, live_env, play, rows, wait_until

from loopwright.core.outcome import Fault, Outcome
from loopwright.envs.live.server import ServerLost
from loopwright.ledger.trial_book import RunStopped
from loopwright.scenario.dispatch import Signals


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


class Hanging(LineServer):
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
def test_a_step_that_hangs_is_lost_and_the_run_continues(tmp_path, hang, record):
    env = live_env(tmp_path, Hanging("step", hang), record=record, timeout_s=0.2)
    began_s = time.monotonic()
    with pytest.raises(ServerLost, match=r"did not respond to 'step' within 0.2 s \(timeout_s\)"):
        play(env, 3)
    assert 0.2 <= time.monotonic() - began_s < 5
    row = rows(env)[-1]
    assert (row.number, row.outcome, row.fault, row.reward) == (3, Outcome.LOST, Fault.INFRA, None)
    assert "timeout_s" in row.reason
    play(env, 2)
    assert env.book.step == 5
    env.close()
    assert [one["length"] for one in env.book.ledger.episodes()] == [3, 2]


def test_a_reset_that_hangs_is_lost_and_uses_up_no_number(tmp_path):
    env = live_env(tmp_path, Hanging("reset", sleeping), timeout_s=0.2)
    with pytest.raises(ServerLost, match="did not respond to 'reset'"):
        play(env, 15)
    assert env.book.step == 10
    play(env, 5)
    env.close()
    assert [row.number for row in env.book.ledger.trials()] == list(range(1, 16))


def test_a_close_that_hangs_is_interrupted(tmp_path, caplog):
    env = live_env(tmp_path, Hanging("close", sleeping, at=1), timeout_s=0.2)
    play(env, 3)
    env.close()
    assert "did not respond to 'close'" in caplog.text
    assert env.book.ledger.last()[0] == 3


def test_only_calls_of_the_server_are_interrupted(tmp_path):
    env = live_env(tmp_path, timeout_s=0.05)
    other = live_env(tmp_path / "other", timeout_s=0.05)
    play(env, 3)
    time.sleep(0.4)  # learning may be slow
    play(other, 1)
    env.step_now(1)
    env.close()
    other.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "loopwright-watchdog" and _stays(thread)]


def _stays(thread):
    thread.join(2)
    return thread.is_alive()


def test_ctrl_c_in_a_step_leaves_no_pending_interrupt(tmp_path):
    env = live_env(tmp_path, LineServer({2: KeyboardInterrupt()}), timeout_s=0.05)
    with pytest.raises(KeyboardInterrupt):
        play(env, 2)
    time.sleep(0.3)
    env.close()


def test_a_hanging_step_in_another_thread_is_only_logged(tmp_path, caplog):
    release = threading.Event()
    env = live_env(tmp_path, Hanging("step", release.wait), timeout_s=0.05)
    steps = []
    thread = threading.Thread(target=lambda: steps.extend(play(env, 3)))
    thread.start()
    wait_until(lambda: "cannot be interrupted" in caplog.text)
    assert caplog.text.count("serve-env") == 1
    release.set()
    thread.join()
    assert len(steps) == 3
    env.close()


def test_s12_a_signal_during_a_hanging_step_stops_the_run(tmp_path):
    env = live_env(tmp_path, Hanging("step", retrying), timeout_s=0.5)
    with Signals().installed() as signals:
        signals.books = [env.book]
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        with pytest.raises(ServerLost):
            play(env, 3)
        with pytest.raises(RunStopped):
            env.start_episode()
        timer.join()
    assert signals.received == signal.SIGTERM
    env.close()
