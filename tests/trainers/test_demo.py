"""`make demo-train`: an agent that is unaware of training is trained, end to end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.training_demo import EXAMPLE, RISE, train
from safetensors.torch import load_file

from loopwright.engines.inprocess.models import tiny
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.rollouts import rollouts
from loopwright.ledger.steps import steps

WRITING = "def lower(answer):\n    return sum(letter.islower() for letter in answer) / 12\n"
JUDGER = '{ type = "composed", parts = [{ type = "verifier" }, { type = "python", function = "writing:lower" }] }'
SHORTER = {
    '"smollm2"': '"tiny"',
    "threads = 2": "threads = 1",
    "steps = 12": "steps = 2",
    "prompts_per_step = 4": "prompts_per_step = 2",
    "group_size = 8": "group_size = 3",
    "checkpoint_every = 6": "checkpoint_every = 1",
    "samples = 4": "samples = 1",
    ", lora = { r = 8, layers = 10 }": "",
    # A random model solves no task, so its writing style is rewarded too, to give a signal.
    '{ type = "verifier" }': JUDGER,
}


def loopwright(*arguments, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loopwright", *arguments]
    environment = {**os.environ, "XDG_CACHE_HOME": str(directory / "cache")}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    """The output of a shorter demo with a tiny model."""
    directory, text = tmp_path_factory.mktemp("demo"), EXAMPLE.read_text()
    for old, new in SHORTER.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (directory / "short.toml").write_text(text)
    (directory / "writing.py").write_text(WRITING)
    for name in ("agent", "tasks"):
        (directory / name).symlink_to(EXAMPLE.parent / name)
    done = loopwright("run", "short.toml", "--output", "out", directory=directory)
    assert done.returncode == 0, done.stderr
    return directory / "out"


def test_each_rollout_is_a_captured_and_verified_process(output):
    with Ledger.read(output / "shell" / "ledger.db") as ledger:
        episodes = list(rollouts(ledger))
        assert len([one for one in episodes if one.evaluated is None]) == 2 * 2 * 3, "trials are in the ledger"
        assert {one.evaluated for one in episodes} == {None, 0, 2}, "held-out tasks too"
        assert [step.step for step in steps(ledger, "train")] == [1, 2]
    for one in episodes:
        episode = one.episode
        assert (episode.turns, episode.trainable) == (1, one.evaluated is None)
        assert episode.evidence["agent"]["stdout"].startswith("$ ")
        assert set(episode.evidence["verifier"]["rewards"]) == {"reward"}
        assert {"boot", "agent", "generate", "collect", "verify", "teardown"} <= set(episode.attempts[-1].phases_s)


def test_the_weights_change_and_a_report_is_written(output):
    weights = load_file(output / "shell" / "policy" / "model.safetensors")
    assert any(not value.equal(weights[name]) for name, value in tiny(attention="sdpa").state_dict().items())
    assert "held-out" in (output / "report.html").read_text()


def test_the_audit_confirms_the_captured_tokens(output):
    done = loopwright("audit", "out", directory=output.parent)
    assert done.returncode == 0, done.stdout + done.stderr


def test_untouched_tasks_score_0_and_solved_tasks_1(tmp_path):
    done = loopwright("tasks", "scan", EXAMPLE.parent / "tasks", "--check", "--sandbox", "bwrap", directory=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "20 tasks" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_learns_held_out_tasks():
    result = train(1)
    assert 0 < result.before < result.after
    assert result.after - result.before >= RISE
