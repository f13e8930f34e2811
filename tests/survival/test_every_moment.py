"""A kill before each single effect of a campaign: whatever was half done, `resume` continues."""

import os
import signal
import sqlite3
import sys
import traceback
from itertools import count

import pytest

from loopwright.scenario.dispatch import dispatch, reopen
from loopwright.scenario.load import load
from tests.survival.campaign import SCENARIO, Campaign

EFFECTS = {
    *("connect", "execute", "executemany", "executescript", "fetchone", "fetchall"),
    *("open", "mkdir", "rename", "replace", "unlink", "symlink", "ftruncate", "pwrite", "write", "fork_exec", "wait4"),
}
MODULES = {"posix", "_sqlite3", "sqlite3", "_posixsubprocess"}
TINY = SCENARIO.format(
    parallel=2,
    agent='{ type = "random", trials = 5, seed = 1 }',
    reward='{ type = "identity", metrics = ["y"] }',
    run="",
    workload="",
    args="a = [1, 2, 3]\nb = [1, 2]",
    more="",
)


def in_a_child(work):
    """Call a function in a forked process with its own group; returns its exit status, or minus the signal."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.setsid()
            code = work()
        except BaseException:  # noqa: BLE001  Whatever it was, a forked test must not go on as a second pytest.
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def begin_or_go_on(campaign):
    if (campaign.output / "campaign.json").exists():
        return dispatch(reopen(campaign.output), campaign.output, resume=True)
    return dispatch(load(campaign.scenario), campaign.output)


def is_effect(function):
    """Whether a call changes something outside this process, directly or in SQLite."""
    if function.__name__ not in EFFECTS:
        return False
    owner = getattr(function, "__self__", None)
    return isinstance(owner, sqlite3.Connection | sqlite3.Cursor) or function.__module__ in MODULES


def dying_before(effect, work):
    """Work until killed just before the n-th effect."""
    remaining = [effect]

    def watch(_, event, function):
        if event == "c_call" and is_effect(function):
            remaining[0] -= 1
            if remaining[0] == 0:
                os.killpg(0, signal.SIGKILL)

    def watched():
        sys.setprofile(watch)
        return work()

    return watched


def dies_before(effects, tmp_path):
    """Die before each of these effects and resume; returns how many there were before the campaign was complete."""
    calm = Campaign(tmp_path / "calm", TINY)
    assert in_a_child(lambda: begin_or_go_on(calm)) == 0
    survived = 0
    for effect in effects:
        stormy = Campaign(tmp_path / f"stormy-{effect}", TINY)
        code = in_a_child(dying_before(effect, lambda stormy=stormy: begin_or_go_on(stormy)))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        assert in_a_child(lambda stormy=stormy: begin_or_go_on(stormy)) == 0, f"after death before effect {effect}"
        assert stormy.result() == calm.result()
        assert stormy.left_running() == []
        survived += 1
    return survived


def test_s13_a_kill_before_any_of_the_first_effects_loses_nothing(tmp_path):
    # All effects that create the campaign's files, and some of the trials' effects.
    effects = [*range(1, 20), *range(45, 120, 7)]
    assert dies_before(effects, tmp_path) == len(effects)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_s13_a_kill_before_any_effect_loses_nothing(tmp_path):
    survived = dies_before(count(1), tmp_path)
    print(survived, "effects")
    assert survived > 150
