"""Third-party agents with a real model, and as agents of runs: every turn is recorded.

`make test-agents` installs them into separate virtual environments; `tests/clients` has the matrix of all clients.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loopwright.core.outcome import Outcome
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.rollouts import rollouts
from tests.rollouts.harbor import write
from tests.survival.serving import COMMAND, serving

ENVIRONMENTS = Path(__file__).parents[2] / ".venvs"
MINI, APPS = ENVIRONMENTS / "clients-litellm" / "bin" / "mini", ENVIRONMENTS / "clients-sdks" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (MINI.exists() and APPS.exists()), reason="run `make test-agents`"),
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
    """First answers without a tool call, and then solves the task in the format that mini expects."""
    if "calc.py" not in prompt:
        text, command = STEPS[-1]
    elif "Tool call error" not in prompt:
        return "I would add the numbers."
    else:
        text, command = STEPS[prompt.count("<|im_start|>tool")]
    call = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"{text}\\n<tool_call>\\n{call}\\n</tool_call>"
'''


def run_mini(directory, session, *arguments):
    """Run mini-swe-agent, which gets only a URL and a key."""
    env = {
        **{name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ},
        "HOME": str(directory),
        "MSWEA_GLOBAL_CONFIG_DIR": str(directory / "mini"),
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "OPENAI_BASE_URL": session["openai_base_url"],
        "OPENAI_API_KEY": session["key"],
    }
    command = [MINI, "-m", "openai/any", "-t", "fix add in calc.py", "-y", "--exit-immediately", *arguments]
    (directory / "project").mkdir(exist_ok=True)
    return subprocess.run(
        command,
        cwd=directory / "project",
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=800,
    )


def check_exact(record):
    """Check that the parts of each row have equal lengths, and that every sampled token is in exactly one row."""
    for row in record["rows"]:
        parts = ("response_ids", "response_mask", "logprobs", "versions")
        assert len({len(row[part]) for part in parts}) == 1
    sampled = sum(stop - start for node in record["episode"]["nodes"] for start, stop, _ in node["spans"])
    assert (
        sum(sum(row["response_mask"]) for row in record["rows"])
        == sampled
        == sum(turn["sampled_tokens"] for turn in record["turns"])
    )
    assert record["trainable"]


def test_mini_swe_agent_with_a_real_model(tmp_path):
    with serving(tmp_path, "--engine", "smollm2", "--port", 0, "--output", "gw") as gateway:
        session = gateway.open("mini", sampling={"max_tokens": 16, "temperature": 0.7})
        limits = ("-c", "agent.step_limit=3", "-c", "agent.max_consecutive_format_errors=0")
        process = run_mini(tmp_path, session, "-c", "mini.yaml", *limits)
        assert "LimitsExceeded" in process.stdout + process.stderr, process.stdout + process.stderr
        record = gateway.describe(session)
    assert len(record["turns"]) == 3
    # The model cannot use tools, so mini drops its answers; each turn is exact or has a reason.
    assert record["verdicts"]["broken"] == 0
    assert all(turn["reason"] for turn in record["turns"] if turn["verdict"] != "exact")
    check_exact(record)
    command = [COMMAND[0], "audit", "gw", "--engine", "smollm2"]
    audit = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    print(audit.stdout, file=sys.stderr)
    assert audit.returncode == 0, audit.stdout + audit.stderr


# -- as the agent of a run ------------------------------------------------------------------------------------------

SCENARIO = """
name = "study"
[[run]]
name = "work"
agent = {{ type = "collect", trials = 4, group_size = 2, seed = 1 }}
[run.rollout]
tasks = {tasks}
loop = {{ type = "remote", command = {command}, deadline_s = 600, concurrency = 2, env = {env} }}
judger = {judger}
[run.gateway]
type = "embedded"
[run.engine]
type = "scripted"
script = "parts:policy"
slip = 0.0
"""


def episodes_of(directory, **parts):
    """The episodes of a run, by task and in the order of their trials."""
    (directory / "study.toml").write_text(SCENARIO.format(**{"env": "{}", **parts}))
    command = [COMMAND[0], "run", "study.toml", "--output", "out"]
    process = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=800)
    assert process.returncode == 0, process.stdout + process.stderr
    episodes = {}
    with Ledger.read(directory / "out" / "work" / "ledger.db") as ledger:
        assert [trial.number for trial in ledger.trials()] == [1, 2, 3, 4]
        for rollout in rollouts(ledger):
            episodes.setdefault(rollout.episode.task.id, []).append(rollout.episode)
    for episode in (episode for several in episodes.values() for episode in several):
        assert (episode.outcome, episode.fault) == (Outcome.OK, None), (episode.reason, episode.evidence)
        assert episode.trainable
        assert sum(sum(row.response_mask) for row in episode.rows()) == episode.sampled > 0
        assert {row.reward for row in episode.rows()} == {episode.reward.value}
    return episodes


def test_mini_swe_agent_is_the_agent_of_a_run(tmp_path):
    """Two tasks with tests: the policy solves one, and only claims to have solved the other."""
    (tmp_path / "parts.py").write_text(POLICY)
    for name in ("calc", "other"):
        right = f"python3 -c 'import sys; sys.path.append(\".\"); import {name}; print(int({name}.add(20, 3) == 23))'"
        test = f'{right} > "$LOOPWRIGHT_VERIFIER_DIR/reward.txt"'
        files = {f"environment__{name}.py": "def add(a, b):\n    return a - b\n"}
        write(tmp_path / "tasks" / name, instruction=f"fix add in {name}.py", test=test, **files)
    path = f"{MINI.parent}:{os.environ['PATH']}"
    episodes = episodes_of(
        tmp_path,
        tasks='{ type = "harbor", path = "tasks" }',
        command='["mini", "-m", "openai/policy", "-t", "{instruction}", "-y", "--exit-immediately"]',
        env=f'{{ MSWEA_COST_TRACKING = "ignore_errors", MSWEA_CONFIGURED = "true", PATH = "{path}" }}',
        judger='{ type = "verifier" }',
    )
    # The agent drops an answer without a tool call, which becomes a branch.
    summary = {name: [(e.reward.value, e.turns, len(e.rows())) for e in several] for name, several in episodes.items()}
    assert summary == {"calc": [(1.0, 5, 2)] * 2, "other": [(0.0, 1, 1)] * 2}
    assert "23" in json.dumps(episodes["calc"][0].messages()), "the output of its commands is in the episode"


SHOP = '''
import json
import re

ITEMS = ("tea", "cake")

def policy(prompt, random):
    """Hands over if instructed, then requests all prices at once, and adds them up."""
    if "You hand over" in prompt:
        return tool_call("transfer_to_cashier")
    items = [item for item in ITEMS if item in prompt.partition("<|im_start|>user")[2].partition("<|im_end|>")[0]]
    prices = re.findall(r"<\\|im_start\\|>tool\\n(\\d+)", prompt)
    if not prices:
        return "I look it up.\\n" + "\\n".join(tool_call("price", item=item) for item in items)
    return f"That is {sum(map(int, prices))}, for everything you items: " + " and ".join(items) + "."

def tool_call(name, **arguments):
    return "<tool_call>\\n" + json.dumps({"name": name, "arguments": arguments}) + "\\n</tool_call>"

def judge(answer, label):
    return float(f"That is {label}," in answer)
'''


@pytest.mark.parametrize(
    ("app", "turns", "rows"), [("langgraph_app", 2, 1), ("agents_sdk_app", 3, 2)], ids=["langgraph", "agents_sdk"]
)
def test_an_app_with_tools_is_the_agent_of_a_run(tmp_path, app, turns, rows):
    """LangGraph with chat completions, and OpenAI's Agents SDK with Responses, whose second agent starts a branch."""
    (tmp_path / "parts.py").write_text(SHOP)
    tasks = [("both", "What do tea and cake cost?", 7), ("wrong", "What does the cake cost?", 5)]
    lines = [json.dumps({"id": id, "prompt": prompt, "label": label}) for id, prompt, label in tasks]
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines))
    episodes = episodes_of(
        tmp_path,
        tasks='{ type = "jsonl", path = "tasks.jsonl" }',
        command=json.dumps([str(APPS), str(Path(__file__).parent / "apps" / f"{app}.py"), "{instruction}"]),
        judger='{ type = "python", function = "parts:judge" }',
    )
    summary = {name: [(e.reward.value, e.turns, len(e.rows())) for e in several] for name, several in episodes.items()}
    assert summary == {"both": [(1.0, turns, rows)] * 2, "wrong": [(0.0, turns, rows)] * 2}
    text, pieces = episodes["both"][0].evidence["agent"]["stdout"].splitlines()
    assert text == "I look it up." + episodes["both"][0].answer
    assert int(pieces.split()[0]) > 1, "it was streamed"
    results = [message for message in episodes["both"][0].messages() if message["role"] == "tool"]
    assert [message["content"] for message in results][-2:] == ["3", "4"], "two calls in one turn, both answered"
