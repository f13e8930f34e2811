"""verl's worker runs our remote agents, in a separate interpreter: `make test-verl` sets it up.

Only its servers, which need a GPU, are replaced: `Servers` answers in their place.
"""

import asyncio
import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.integrations.scenarios import byte_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # the first import takes long on a busy machine
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed here; run: make test-verl"),
]

SCENARIO = """
name = "verl"

[[run]]
name  = "remote"
agent = {{ type = "collect", trials = 8, group_size = 4 }}

[run.rollout]
tasks  = {{ type = "jsonl", path = "tasks.jsonl" }}
loop   = {{ type = "remote", function = "agent_verl:{agent}", sampling = {{ max_tokens = 16 }} }}
judger = {{ type = "python", function = "agent_verl:{judge}", retries = 0 }}

[run.engine]
type   = "scripted"
script = "agent_verl:unused"
"""
AGENT = """
import aiohttp

def unused(messages):
    raise AssertionError("verl's servers are the engine")

async def ask(base_url, api_key, *conversations):
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as client:
        said = None
        for messages in conversations:
            messages = [m if m != "said" else {"role": "assistant", "content": said} for m in messages]
            body = {"model": "policy", "messages": messages}
            async with client.post(f"{base_url}/chat/completions", json=body) as answer:
                said = (await answer.json())["choices"][0]["message"]["content"]

async def twice(base_url, api_key, instruction):
    first = [{"role": "user", "content": instruction}]
    await ask(base_url, api_key, first, [*first, "said", {"role": "user", "content": "Sure?"}])

async def apart(base_url, api_key, instruction):
    await ask(base_url, api_key, [{"role": "user", "content": instruction}], [{"role": "user", "content": "Else?"}])

async def never(instruction):
    return None

def exact(answer, label):
    return {"exact": float(answer == label), "length": 0.25}

def broken(answer):
    raise ValueError("no verdict")

def sometimes(answer, label):
    if label == "lost":
        raise ValueError("no verdict on this one")
    return float(label == "good")
"""


class Servers:
    """Answers as verl's servers do, and records prompts and answers."""

    def __init__(self) -> None:
        self.calls: list[SimpleNamespace] = []

    async def generate(self, request_id, *, prompt_ids, sampling_params, **more):
        from verl.workers.rollout.replica import TokenOutput

        assert not more
        ids = [*f"answer {len(self.calls)}".encode(), 257]
        logprobs = [-0.25 - 0.01 * place for place in range(len(ids))]
        self.calls.append(
            SimpleNamespace(id=request_id, prompt=prompt_ids, params=sampling_params, ids=ids, p=logprobs)
        )
        return TokenOutput(token_ids=ids, log_probs=logprobs, stop_reason="completed", extra_fields={"global_steps": 5})


def worker_of(servers: Servers, **options):
    """verl's worker as it is inside its actor, without its model, which is not used."""
    from omegaconf import OmegaConf
    from verl.experimental.agent_loop import agent_loop
    from verl.utils.dataset.rl_dataset import RLHFDataset

    rollout = {"prompt_length": 64, "response_length": 96, **options.pop("rollout", {})}
    section = options.pop("section", {})
    entry = {"name": "loopwright_remote", "_target_": "loopwright.integrations.verl.RemoteAgentLoop", **options}
    agent_loop._agent_loop_registry["loopwright_remote"] = OmegaConf.create(entry)  # as verl reads them from its YAML
    chat = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    worker = object.__new__(agent_loop.AgentLoopWorker)
    worker.config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}, **section})
    worker.rollout_config = worker.config.actor_rollout_ref.rollout
    worker.llm_client, worker.tokenizer, worker.processor = servers, byte_tokenizer(), None
    worker.tokenizer.chat_template = chat
    worker.hf_model_type, worker.dataset_cls, worker.tools = "qwen2", RLHFDataset, []
    worker.mm_processor_kwargs, worker.distillation_enabled, worker.reward_loop_worker_handles = {}, False, None
    return worker


def rolled(directory: Path, *labels: str, agent: str = "twice", judge: str = "exact", together=False, **options):
    """verl's batch after its worker ran these rows, and the calls to its servers."""
    from loopwright.integrations import verl

    (directory / "tasks.jsonl").write_text(json.dumps({"prompt": "?", "label": ""}) + "\n")
    (directory / "agent_verl.py").write_text(AGENT)
    (directory / "study.toml").write_text(SCENARIO.format(agent=agent, judge=judge))
    servers = Servers()
    worker = worker_of(servers, scenario=str(directory / "study.toml"), **options)

    sampling = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    trajectory = {"step": 5, "sample_index": 0, "rollout_n": 0, "validate": False}

    def roll(index: int, label: str):
        row = {
            "raw_prompt": [{"role": "user", "content": f"Task {index}"}],
            "reward_model": {"style": "rule", "ground_truth": label},
            "data_source": "tests",
            "extra_info": {"index": index},
            "uid": "group" if together else str(index),
        }
        return worker._run_agent_loop(sampling, trajectory, agent_name="loopwright_remote", trace=False, **row)

    async def rows():
        try:
            if together:  # as verl starts them
                batch_rows = await asyncio.gather(*(roll(*each) for each in enumerate(labels)))
            else:
                batch_rows = [await roll(*each) for each in enumerate(labels)]
            return worker._postprocess(batch_rows)
        finally:
            await verl.close()

    return asyncio.run(rows()), servers.calls


def test_a09_settings_of_agents_yaml_survive_the_import_of_our_module(tmp_path):
    """verl reads agents.yaml first, and imports the module that it names with the first rollout."""
    for name in [name for name in sys.modules if name.startswith("loopwright.integrations.verl")]:
        del sys.modules[name]
    batch, _ = rolled(tmp_path, "answer 1", "answer 3")
    assert batch.batch["rm_scores"].sum(1).tolist() == [1.25, 1.25]


def test_verls_batch_holds_exactly_the_tokens_of_its_servers(tmp_path):
    batch, calls = rolled(tmp_path, "answer 1", "something else")

    assert len(calls) == 4  # two turns each
    for row in range(2):
        first, second = calls[2 * row : 2 * row + 2]
        prompts, responses = batch.batch["prompts"][row].tolist(), batch.batch["responses"][row].tolist()
        assert prompts[-len(first.prompt) :] == first.prompt
        inserted = second.prompt[len(first.prompt) + len(first.ids) :]
        assert second.prompt == first.prompt + first.ids + inserted
        length = len(first.ids) + len(inserted) + len(second.ids)
        assert responses[:length] == first.ids + inserted + second.ids
        mask = batch.batch["response_mask"][row].tolist()
        assert mask == [1] * len(first.ids) + [0] * len(inserted) + [1] * len(second.ids) + [0] * (96 - length)
        logprobs = batch.batch["rollout_log_probs"][row].tolist()
        assert logprobs[:length] == pytest.approx(first.p + [0.0] * len(inserted) + second.p)
        assert first.id == second.id  # so that verl sends both to one server
    assert calls[0].id != calls[2].id


def test_rewards_versions_and_sampling_are_handed_over(tmp_path):
    batch, calls = rolled(tmp_path, "answer 1", "something else")

    assert batch.batch["rm_scores"].sum(1).tolist() == [1.25, 0.25]
    assert batch.non_tensor_batch["exact"].tolist() == [1.0, 0.0]
    assert batch.non_tensor_batch["min_global_steps"].tolist() == [5, 5]
    assert {call.params["temperature"] for call in calls} == {0.7}
    assert {call.params["max_tokens"] for call in calls} == {16}


def test_a09_several_branches_mask_the_rollout_and_keep_its_reward(tmp_path):
    from loopwright.integrations.branch import SeveralRows

    batch, calls = rolled(tmp_path, "x", agent="apart")
    assert batch.batch["response_mask"].sum().item() == 0
    assert batch.batch["rm_scores"].sum().item() == 0.25
    assert batch.non_tensor_batch["left_out"].tolist() == [sum(len(call.ids) for call in calls)]
    batch, calls = rolled(tmp_path, "x", agent="apart", branches="main")
    assert batch.non_tensor_batch["left_out"].tolist() == [len(calls[1].ids)]
    with pytest.raises(SeveralRows, match='branches="main"'):
        rolled(tmp_path, "x", agent="apart", branches="refuse")


def test_responses_beyond_verls_limit_are_cut_and_counted(tmp_path):
    batch, calls = rolled(tmp_path, "x", rollout={"response_length": 4})
    assert batch.batch["responses"].tolist() == [calls[0].ids[:4]]
    assert [list(versions) for versions in batch.non_tensor_batch["versions"]] == [[5] * 4]
    assert batch.non_tensor_batch["left_out"].tolist() == [len(calls[0].ids) + len(calls[1].ids) - 4]


def test_a09_a_prompt_beyond_verls_limit_masks_the_rollout(tmp_path, caplog):
    batch, calls = rolled(tmp_path, "answer 1", rollout={"prompt_length": 4})
    assert batch.batch["response_mask"].sum().item() == 0
    assert batch.batch["rm_scores"].sum().item() == 1.25
    assert batch.non_tensor_batch["left_out"].tolist() == [sum(len(call.ids) for call in calls)]
    assert "Raise prompt_length" in caplog.text


def test_a09_a_rollout_without_a_verdict_is_masked_and_shifts_no_baseline(tmp_path):
    """Its score is the mean of its group, so that verl's own GRPO gives the others the sign that they deserve."""
    import numpy as np
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    batch, _ = rolled(tmp_path, "lost", "good", "good", "bad", judge="sometimes", together=True)
    scores = batch.batch["rm_scores"].sum(1)
    assert scores.tolist() == pytest.approx([2 / 3, 1.0, 1.0, 0.0])
    assert batch.batch["response_mask"].sum(1).tolist()[0] == 0
    assert "no verdict on this one" in batch.non_tensor_batch["lost"][0]
    assert batch.non_tensor_batch["lost"].tolist()[1:] == ["", "", ""]
    advantages, _ = compute_grpo_outcome_advantage(
        batch.batch["rm_scores"], batch.batch["response_mask"], np.array(["group"] * 4), norm_adv_by_std_in_grpo=False
    )
    first = advantages[:, 0].tolist()
    assert first == pytest.approx([0.0, 1 / 3, 1 / 3, -2 / 3])


def test_a09_a_judger_that_always_fails_masks_every_rollout(tmp_path):
    batch, _ = rolled(tmp_path, "x", "y", judge="broken", together=True)
    assert batch.batch["response_mask"].sum().item() == 0
    assert all("no reward after 3 attempts" in reason for reason in batch.non_tensor_batch["lost"])


def test_a09_settings_of_agents_yaml_and_of_verls_command_line_reach_the_rollouts(tmp_path, monkeypatch):
    monkeypatch.setenv("REMOTE_DEADLINE_S", "50")
    settings = {"set": ["run.engine.thinks=true"], "env": {"REMOTE_CONCURRENCY": 3}, "run": "remote"}
    section = {"loopwright": {"set": {"loop": {"sampling": {"max_tokens": 9}}}}}
    _, calls = rolled(tmp_path, "x", **settings)
    assert all(call.prompt[-8:] == [*b"<think>\n"] for call in calls)
    _, calls = rolled(tmp_path, "x", section=section, **{**settings, "set": {}})
    assert {call.params["max_tokens"] for call in calls} == {9}
    with pytest.raises(Exception, match=r"loopwright\.scenrio is unknown\. .*Did you mean 'scenario'"):
        rolled(tmp_path, "x", section={"loopwright": {"scenrio": "x"}})


def test_an_agent_without_calls_is_scored_and_masked(tmp_path):
    batch, calls = rolled(tmp_path, "", agent="never")
    assert calls == []
    assert batch.batch["response_mask"].sum().item() == 0
    assert batch.batch["rm_scores"].sum().item() == 1.25


# -- examples/verl ---------------------------------------------------------------------------------------------------

EXAMPLE = Path(__file__).parents[2] / "examples" / "verl"


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The example's configuration as verl's own entry point reads it, and its data as `tasks scan` writes them."""
    from omegaconf import OmegaConf

    directory = tmp_path_factory.mktemp("example")
    for name in ("train", "val"):
        words = ["tasks", "scan", EXAMPLE / name, "-o", directory / f"{name}.parquet"]
        subprocess.run([sys.executable, "-m", "loopwright", *words], check=True, capture_output=True, timeout=100)
    overrides = [f"data.{name}_files={directory}/{name}.parquet" for name in ("train", "val")]
    overrides += ["+loopwright.set.loop.sampling.max_tokens=10", "+loopwright.env.REMOTE_DEADLINE_S=90"]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-dir", EXAMPLE, "--config-name", "trainer"]
    command += [*overrides, "--cfg", "job", "--resolve"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=EXAMPLE.parents[1])
    assert printed.returncode == 0, printed.stderr
    return OmegaConf.create(printed.stdout[printed.stdout.index("actor_rollout_ref:") :])


def test_a09_the_examples_configuration_is_valid_for_verl(example):
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    validate_config(example, use_reference_policy=need_reference_policy(example), use_critic=need_critic(example))
    rollout = omega_conf_to_dataclass(example.actor_rollout_ref.rollout)
    assert (rollout.agent.default_agent_loop, rollout.n, rollout.mode) == ("loopwright_remote", 8, "async")


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
def test_a09_the_examples_rows_are_rolled_out_by_verls_worker(example, monkeypatch):
    """Rows of verl's own dataset, and agents.yaml as its worker reads it."""
    from omegaconf import OmegaConf
    from verl.experimental.agent_loop import agent_loop
    from verl.utils.dataset.rl_dataset import RLHFDataset

    from loopwright.integrations import verl

    monkeypatch.chdir(EXAMPLE.parents[1])
    monkeypatch.setenv("REMOTE_DEADLINE_S", "")  # set by the example, and put back afterwards
    servers = Servers()
    worker = worker_of(servers)
    worker.config, worker.rollout_config = example, example.actor_rollout_ref.rollout
    [entry] = OmegaConf.load(agent_loop.resolve_config_path(worker.rollout_config.agent.agent_loop_config_path))
    agent_loop._agent_loop_registry[entry.name] = entry
    sizes = {}
    for name in ("train", "val"):
        dataset = RLHFDataset(example.data[f"{name}_files"], worker.tokenizer, example.data)
        sizes[name], row = len(dataset), dataset[0]
    assert sizes == {"train": 12, "val": 8}

    async def main():
        trajectory = {"step": 0, "sample_index": 0, "rollout_n": 0, "validate": True}
        row_fields = {key: value for key, value in row.items() if not hasattr(value, "dtype")}
        try:
            return await worker._run_agent_loop(
                {"temperature": 1.0}, trajectory, agent_name=entry.name, trace=False, **row_fields
            )
        finally:
            await verl.close()

    output = asyncio.run(main())
    assert output.extra_fields["lost"] == ""
    assert output.reward_score == 0.0, "no shell knows the command `answer`"
    assert {call.params["max_tokens"] for call in servers.calls} == {10}, "from verl's command line"
