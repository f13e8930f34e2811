"""Agents of other people, run for real against `loopwright gateway serve`: every turn of theirs is captured.

`make test-agents` puts them into virtual environments of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.survival.serving import COMMAND, serving

MINI = Path(__file__).parents[2] / ".venvs" / "mini" / "bin" / "mini"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not MINI.exists(), reason="run `make test-agents`"),
]
POLICY = '''
import json

STEPS = [
    ("I look at it first.", "cat calc.py"),
    ("The sign is wrong.", "sed -i 's/a - b/a + b/' calc.py"),
    ("Does it work now?", "python3 -c 'import calc; print(calc.add(20, 3))'"),
    ("Done.", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
]

def policy(prompt, random):
    """Forgets to call a tool at first, and then solves the task in the format that mini expects."""
    if "Tool call error" not in prompt:
        return "I would add the numbers."
    said, command = STEPS[prompt.count("<|im_start|>tool")]
    call = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"{said}\\n<tool_call>\\n{call}\\n</tool_call>"
'''


def mini(home, session, *words):
    """mini-swe-agent at work, knowing nothing of us but a URL and a key."""
    env = {
        **{name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ},
        "HOME": str(home),
        "MSWEA_GLOBAL_CONFIG_DIR": str(home / "mini"),
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "OPENAI_BASE_URL": session["openai_base_url"],
        "OPENAI_API_KEY": session["key"],
    }
    command = [MINI, "-m", "openai/any", "-t", "fix add in calc.py", "-y", "--exit-immediately", *words]
    (home / "project").mkdir(exist_ok=True)
    return subprocess.run(
        command, cwd=home / "project", env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=800
    )


def exact(told):
    """That each row is as long as it says, and that every sampled token is in exactly one of them."""
    for row in told["rows"]:
        parts = ("response_ids", "response_mask", "logprobs", "versions")
        assert len({len(row[part]) for part in parts}) == 1
    sampled = sum(stop - start for node in told["episode"]["nodes"] for start, stop, _ in node["spans"])
    assert (
        sum(sum(row["response_mask"]) for row in told["rows"])
        == sampled
        == sum(turn["sampled_tokens"] for turn in told["turns"])
    )
    assert told["trainable"]


def test_mini_swe_agent_edits_a_file(tmp_path):
    (tmp_path / "parts.py").write_text(POLICY)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    words = ("--engine", "scripted", "--set", "engine.script=parts:policy", "--set", "engine.slip=0")
    with serving(tmp_path, *words, "--port", 0, "--output", "gw") as gateway:
        session = gateway.open("mini")
        done = mini(tmp_path, session)
        assert done.returncode == 0, done.stdout + done.stderr
        told = gateway.shown(session)
    assert "return a + b" in (tmp_path / "project" / "calc.py").read_text()
    assert "23" in told["episode"]["nodes"][-2]["message"]["content"], "what its commands said is in the episode"
    # It drops a turn that it cannot use: a branch of its own, and exported; all that follow it go on exactly.
    assert [turn["verdict"] for turn in told["turns"]] == ["exact", "forked", "exact", "exact", "exact"]
    assert told["turns"][1]["reason"]
    assert [turn["finish"] for turn in told["turns"]] == ["stop"] * 5
    assert len(told["rows"]) == 2
    exact(told)


def test_mini_swe_agent_with_a_real_model(tmp_path):
    with serving(tmp_path, "--engine", "smollm2", "--port", 0, "--output", "gw") as gateway:
        session = gateway.open("mini", sampling={"max_tokens": 16, "temperature": 0.7})
        done = mini(tmp_path, session, "-c", "mini.yaml", "-c", "agent.step_limit=3")
        assert "LimitsExceeded" in done.stdout + done.stderr, done.stdout + done.stderr
        told = gateway.shown(session)
    assert len(told["turns"]) == 3
    # The model cannot use tools, so mini drops what it says; each turn is exact, or it is said why it is not.
    assert told["verdicts"]["broken"] == 0
    assert all(turn["reason"] for turn in told["turns"] if turn["verdict"] != "exact")
    exact(told)
    command = [COMMAND[0], "audit", "gw", "--engine", "smollm2"]
    audited = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    print(audited.stdout, file=sys.stderr)
    assert audited.returncode == 0, audited.stdout + audited.stderr
