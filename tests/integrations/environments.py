"""Runs of environments of other frameworks, for tests in the frameworks' own interpreters."""

import tomli_w

import loopwright
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.rollouts import rollouts

POLICY = '''
import re

def policy(prompt, random):
    """Adds by the tool if there is one; is wrong if the first number is a multiple of 3."""
    last = prompt.rsplit("<|im_start|>", 2)[-2]
    if last.startswith("tool"):
        return f"It is {last.removeprefix('tool').split('<|im_end|>')[0].strip()}"
    a, b = re.findall(r"\\d+", last)[-2:]
    if int(a) % 3 == 0:
        return "It is 0"
    if '"add"' in prompt:
        return f'<tool_call>{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'
    return f"It is {int(a) + int(b)}"
'''


def write_scenario(directory, tasks, **rollout):
    """A run that attempts each of eight tasks once."""
    (directory / "foreign_policy.py").write_text(POLICY)
    agent = {"type": "collect", "trials": 8, "group_size": 1, "seed": 1}
    engine = {"type": "scripted", "script": "foreign_policy:policy", "slip": 0.0}
    run = {"name": "collect", "agent": agent, "rollout": {"tasks": tasks, **rollout}, "engine": engine}
    (directory / "study.toml").write_text(tomli_w.dumps({"name": "foreign", "run": [run]}))
    return directory / "study.toml"


def episodes_of(directory, tasks, **rollout):
    """The recorded episodes of such a run, by the index of the task."""
    loopwright.run(write_scenario(directory, tasks, **rollout), directory / "out")
    with Ledger.read(directory / "out" / "collect" / "ledger.db") as ledger:
        episodes = [each.episode for each in rollouts(ledger)]
    return {episode.task.extra["environment"]["index"]: episode for episode in episodes}
