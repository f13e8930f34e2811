"""Contract A09, without verl itself: its servers are an engine for any gateway, and a lost rollout is never a zero."""

import asyncio
import json
import sys
from types import SimpleNamespace

import pytest

from loopwright.core.task import Task
from loopwright.engines.base import Sampling
from loopwright.integrations.verl.rollouts import VerlRollouts, load_run, task_of
from loopwright.rollouts.pools.base import PoolDown
from tests.gateway.relay.harness import TOKEN, relayed
from tests.integrations.scenarios import byte_tokenizer
from tests.rollouts.remote.agents import CHAT
from tests.rollouts.trial_server.serving import serve

SCENARIO = """
name = "verl"
[[run]]
name = "remote"
agent = {{ type = "collect", trials = 8, group_size = 4 }}
[run.rollout]
tasks = {{ type = "jsonl", path = "tasks.jsonl" }}
loop = {{ type = "remote", command = {command}, deadline_s = 60{loop} }}
judger = {{ type = "python", function = "judge_verl:verdict", retries = 0, breaker = 0 }}
{more}
"""
ENGINE = """
[run.engine]
type = "scripted"
replies = ["never"]
"""
JUDGE = """
def verdict(answer, label):
    if label == "lost":
        raise ValueError("no verdict on this one")
    return {"label": float(label), "answer": float(answer.startswith("said"))}
"""


class Servers:
    """Answers as verl's servers do."""

    def __init__(self) -> None:
        self.request_ids: list[str] = []
        self.prompts: list[bytes] = []

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        self.request_ids.append(request_id)
        self.prompts.append(bytes(token for token in prompt_ids if token < 256))
        ids = [*f"said {len(self.prompts)}".encode(), 257]
        return SimpleNamespace(
            token_ids=ids, log_probs=[-0.5] * len(ids), stop_reason="completed", extra_fields={"global_steps": 5}
        )


def write(directory, *, code="chat()", loop="", more=ENGINE):
    (directory / "tasks.jsonl").write_text(json.dumps({"prompt": "?", "label": 0}) + "\n")
    (directory / "judge_verl.py").write_text(JUDGE)
    (directory / "agent.py").write_text(CHAT + "exec(sys.argv[1])")
    command = json.dumps([sys.executable, "{home}/agent.py", code])
    (directory / "study.toml").write_text(SCENARIO.format(command=command, loop=loop, more=more))
    return str(directory / "study.toml")


def roll(scenario, *labels, overrides=(), env=None, servers=None):
    """The rollouts of one group, all started at once, as verl does."""

    async def main():
        loaded, run = load_run(scenario, None, overrides, env or {})
        rollouts = VerlRollouts(run, loaded.directory, servers or Servers(), byte_tokenizer())
        tasks = [Task(str(n), ({"role": "user", "content": "?"},), label) for n, label in enumerate(labels)]
        try:
            return await asyncio.gather(*(rollouts.roll_in_group(task, Sampling(), group="g") for task in tasks))
        finally:
            await rollouts.close()

    return asyncio.run(main())


def test_a09_a_lost_rollout_has_no_tokens_and_the_mean_reward_of_its_siblings(tmp_path):
    lost, good, bad = roll(write(tmp_path), "lost", "1", "0")
    assert (good.reward, bad.reward, lost.reward) == (2.0, 1.0, 1.5)
    assert (lost.episode.rows(), good.failure) == ([], "")
    assert "no verdict on this one" in lost.failure
    assert list(lost.parts) == list(good.parts) == ["label", "answer"], "verl expects the same parts in every row"
    assert good.parts["another"] != good.parts["another"], "NaN"


def test_a09_a_group_that_is_lost_as_a_whole_raises_nothing(tmp_path):
    assert [each.reward for each in roll(write(tmp_path), "lost", "lost")] == [0.0, 0.0]


@pytest.mark.parametrize("overrides", [["run.engine.thinks=true"], {"run": {"engine": {"thinks": True}}}])
def test_a09_overrides_and_the_environment_reach_the_workers(tmp_path, overrides, monkeypatch):
    monkeypatch.setenv("REMOTE_DEADLINE_S", "50")
    monkeypatch.setenv("GIVEN", "")  # put back afterwards
    scenario, servers = write(tmp_path, code="chat(os.environ['GIVEN'])", loop=', pass_env = ["GIVEN"]'), Servers()
    assert load_run(scenario, None, overrides, {})[1].rollout.loop.deadline_s == 50
    [judged] = roll(scenario, "1", overrides=overrides, env={"GIVEN": 17}, servers=servers)
    assert judged.parts == {"label": 1.0, "answer": 0.0}, "it has only thought"
    assert servers.prompts[0].endswith(b"assistant\n<think>\n")
    assert b"17" in servers.prompts[0]


def test_a09_agents_run_at_a_trial_server(tmp_path):
    with serve(tmp_path, "-j", "2") as server:
        (tmp_path / "trial.token").write_text(server.token)
        loop = f', server = "{server.address}", token_file = "trial.token"'
        first, second = roll(write(tmp_path, loop=loop), "1", "0")
    assert (first.reward, second.reward) == (2.0, 1.0)
    assert first.episode.evidence["server"]["url"] == server.address
    assert {version for row in first.episode.rows() for version in row.versions} == {5}


def test_a09_a_relay_gateway_elsewhere_samples_from_verls_servers(tmp_path):
    """Each turn of a session has the request id of the session, by which verl chooses the server."""
    servers = Servers()

    async def main():
        async with relayed() as gateway:
            (tmp_path / "token").write_text(TOKEN)
            more = f'[run.gateway]\ntype = "external"\nurl = "{gateway.address}"\ntoken_file = "token"\n'
            scenario = write(tmp_path, code="chat(); chat('again')", more=more)
            return await asyncio.to_thread(roll, scenario, "1", "0", servers=servers)

    first, second = asyncio.run(main())
    assert (first.reward, second.reward) == (2.0, 1.0)
    assert len(servers.prompts) == 4
    assert len(set(servers.request_ids)) == 2


def test_a09_a_gateway_that_refuses_the_token_is_an_error_at_the_start(tmp_path):
    async def main():
        async with relayed() as gateway:
            (tmp_path / "token").write_text("another-token-than-its-own")
            more = f'[run.gateway]\ntype = "external"\nurl = "{gateway.address}"\ntoken_file = "token"\n'
            await asyncio.to_thread(roll, write(tmp_path, more=more), "1")

    with pytest.raises(PoolDown, match="does not accept this token"):
        asyncio.run(main())


def test_a09_a_gateway_with_engines_that_verl_does_not_train_is_refused(tmp_path):
    more = '[run.gateway]\ntype = "server"\n'
    with pytest.raises(ValueError, match="verl's servers must sample here"):
        roll(write(tmp_path, loop=', server = "http://localhost:8500"', more=more), "1")


def test_a09_a_row_of_verls_dataset_becomes_a_task():
    row = {"raw_prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": 3}}
    task = task_of({**row, "extra_info": {"index": 7, "note": "x"}, "instance_id": "one", "uid": "u"})
    assert (task.id, task.label, task.extra["note"]) == ("one", 3, "x")
