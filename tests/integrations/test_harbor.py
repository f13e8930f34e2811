"""The real Harbor, in a separate interpreter, runs the shipped tasks; `make test-harbor` sets it up."""

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from loopwright.core.outcome import Outcome
from loopwright.rollouts.remote.config import RemoteConfig
from tests.clients.policies import terminus
from tests.gateway.harness import Replier
from tests.rollouts.harbor import task_at, write
from tests.rollouts.remote.agents import open_setup, running

HOME = Path(__file__).parents[2]
HARBOR = HOME / ".venvs" / "harbor" / "bin" / "harbor"
ENVIRONMENT = "loopwright.integrations.harbor_env:LocalEnvironment"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not HARBOR.exists(), reason="Harbor is not installed here; run: make test-harbor"),
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap"),
]


def rewards(agent: str, jobs: Path) -> dict[str, dict[str, float]]:
    """Harbor's score of each of our tasks with one of its agents."""
    command = [
        HARBOR,
        "run",
        "--agent",
        agent,
        "--env",
        ENVIRONMENT,
        "--jobs-dir",
        jobs,
        "--n-concurrent",
        "2",
        "--yes",
    ]
    for split in ("train", "eval"):
        subprocess.run(
            [*map(str, command), "--path", str(HOME / "examples" / "tasks" / split)],
            env={**os.environ, "PYTHONPATH": str(HOME / "src"), "HARBOR_TELEMETRY": "0"},
            cwd=jobs,
            check=True,
            stdout=subprocess.DEVNULL,
        )
    trials = [json.loads(file.read_text()) for file in jobs.glob("*/*/result.json")]
    assert [trial["exception_info"] for trial in trials if trial["exception_info"]] == []
    return {trial["task_name"]: trial["verifier_result"]["rewards"] for trial in trials}


def test_harbor_scores_the_solutions_one_and_the_untouched_state_zero(tmp_path):
    names = {f"loopwright/{path.parent.name}" for path in (HOME / "examples" / "tasks").rglob("task.toml")}
    assert len(names) >= 20
    for agent, expected in (("oracle", 1.0), ("nop", 0.0)):
        (tmp_path / agent).mkdir()
        assert rewards(agent, tmp_path / agent) == {name: {"reward": expected} for name in names}


TEST = "python3 -c \"import sys; sys.path.append('.'); import calc; print(int(calc.add(20, 3) == 23))\""


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
@pytest.mark.parametrize("sandbox", ["none", "bwrap", "docker"])
def test_terminus_2_is_an_agent_by_its_name(tmp_path, monkeypatch, request, sandbox):
    """It types into tmux, in our sandbox, and its conversation is recorded by the gateway."""
    if sandbox == "docker":
        request.getfixturevalue("docker_daemon")
    monkeypatch.chdir(tmp_path)  # where the policy writes its log
    path = write(
        tmp_path / "task",
        instruction="fix add in calc.py",
        test=f'{TEST} > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"',
        toml='[environment]\ndocker_image = "debian:12-slim"\n' if sandbox == "docker" else "",
        **{"environment__calc.py": "def add(a, b):\n    return a - b\n"},
    )

    def replies(prompt):
        return terminus(prompt, None)

    async def main():
        options = {"sandbox": sandbox, "deadline_s": 120.0, "run_tests": True}
        harbor = str(HARBOR.parents[1])
        async with open_setup(tmp_path, Replier(replies), agent="terminus-2", harbor=harbor, **options) as setup:
            assert setup.config.problems(tmp_path) == []
            return await setup.roll(task_at(path), timeout_s=300.0)

    episode = asyncio.run(main())
    assert (episode.outcome, episode.reason) == (Outcome.OK, ""), episode.evidence
    assert episode.evidence["verifier"]["rewards"] == {"reward": 1.0}
    assert episode.turns >= 3
    assert running("terminus-2") == [], "tmux ends with the rollout"


def test_an_unknown_agent_is_named_before_anything_starts(tmp_path):
    harbor = str(HARBOR.parents[1])
    (problem,) = RemoteConfig(agent="terminus2", harbor=harbor).problems(tmp_path)
    assert problem.message.startswith("Harbor has no agent 'terminus2'.")
    assert problem.message.endswith("Did you mean 'terminus-2'?")
