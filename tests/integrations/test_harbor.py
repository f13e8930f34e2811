"""The real Harbor, in a separate interpreter, runs the shipped tasks; `make test-harbor` sets it up."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

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
