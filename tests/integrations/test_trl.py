"""TRL's GRPOTrainer learns from our rollouts: its loss gets exactly the captured tokens."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from loopwright.cli import app
from loopwright.core.episode import ROOT, Episode, Node, Span
from loopwright.core.task import Task
from loopwright.engines.inprocess.models import tiny
from loopwright.integrations.branch import SeveralRows, one_row
from loopwright.integrations.trl import TrlRollouts
from loopwright.ledger.ledger import Ledger
from tests.integrations.scenarios import byte_tokenizer

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.timeout(300)  # importing TRL is slow on a busy machine

SCENARIO = """
name = "trl"

[[run]]
name  = "bytes"
agent = {{ type = "collect", trials = 8, group_size = 4, seed = 3 }}

[run.rollout]
tasks  = {{ type = "jsonl", path = "tasks.jsonl" }}
loop   = {loop}
judger = {{ type = "python", function = "judge_trl:{judge}", retries = 0, breaker = 0 }}

[run.engine]
type  = "transformers"
model = "tiny"
seed  = 0
"""
SINGLE = '{ type = "single_turn", sampling = { max_tokens = 6 } }'
JUDGE = """
def share(answer):
    return sum(character < "m" for character in answer) / 6

def odd_only(label):
    if label % 2 == 0:
        raise ValueError("no verdict on this one")
    return 1.0

async def ask_apart(base_url, api_key, instruction):
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for text in (instruction, "Something else."):
            messages = [{"role": "user", "content": text}]
            await client.chat.completions.create(model="policy", messages=messages, max_tokens=4)

async def ask_twice(base_url, api_key, instruction):
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [{"role": "user", "content": instruction}]
        said = await client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
        messages += [{"role": "assistant", "content": said.choices[0].message.content}]
        messages += [{"role": "user", "content": "Once more."}]
        await client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
"""


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def scenario(directory: Path, *, loop: str = SINGLE, judge: str = "share") -> Path:
    tasks = [{"id": f"t{n}", "prompt": f"Say {n}.", "label": n} for n in range(6)]
    (directory / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (directory / "judge_trl.py").write_text(JUDGE)
    (directory / "study.toml").write_text(SCENARIO.format(loop=loop, judge=judge))
    return directory / "study.toml"


def trainer_of(rollouts: TrlRollouts, directory: Path, *, steps: int = 3, peft_config=None, model=None, **options):
    """A GRPOTrainer that records the inputs of its loss."""
    config = trl.GRPOConfig(
        output_dir=str(directory / "trl"),
        per_device_train_batch_size=8,
        num_generations=4,
        max_steps=steps,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        **{"save_strategy": "no", **options},
    )
    trainer = trl.GRPOTrainer(
        model=model or tiny(seed=7, attention="sdpa"),
        peft_config=peft_config,
        processing_class=byte_tokenizer(),
        args=config,
        train_dataset=rollouts.dataset(),
        rollout_func=rollouts,
        reward_funcs=rollouts.judged,
    )
    trainer.batches = []
    loss = trainer._compute_loss

    def keeping(model, inputs):
        logprobs, _, _ = trainer._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
            inputs["completion_ids"].size(1),
        )
        trainer.batches.append({**inputs, "own_logprobs": logprobs.detach()})
        return loss(model, inputs)

    trainer._compute_loss = keeping
    return trainer


def rows_seen(trainer) -> list[tuple]:
    """The rows that the loss got, without padding: prompt, completion, mask, logprobs."""
    rows = []
    for inputs in trainer.batches:
        for n in range(len(inputs["prompt_ids"])):
            prompt, there = inputs["prompt_mask"][n].bool(), inputs["completion_mask"][n].bool()
            rows.append(
                (
                    tuple(inputs["prompt_ids"][n][prompt].tolist()),
                    tuple(inputs["completion_ids"][n][there].tolist()),
                    tuple(inputs["tool_mask"][n][there].tolist()),
                    tuple(inputs["sampling_per_token_logps"][n][there].tolist()),
                )
            )
    return rows


def recorded(output: Path) -> dict[int, Episode]:
    """The episodes of a run, by trial."""
    ledger = Ledger.open(output / "bytes" / "ledger.db")
    try:
        numbers = [trial.number for trial in ledger.trials()]
        return {number: Episode.from_bytes(ledger.payload(number, "rollout")) for number in numbers}
    finally:
        ledger.close()


def captured(episodes) -> list[tuple]:
    rows = [row for episode in episodes for row in episode.rows()]
    as_float32 = [tuple(torch.tensor(row.logprobs).tolist()) for row in rows]
    return [(r.prompt_ids, r.response_ids, r.response_mask, p) for r, p in zip(rows, as_float32, strict=True)]


def off_policy(trainer) -> float:
    """The distance between the captured logprobs and those of TRL's model when it computed its loss."""
    offs = [
        (inputs["own_logprobs"] - inputs["sampling_per_token_logps"])[
            (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        ]
        for inputs in trainer.batches
    ]
    return float(torch.cat(offs).abs().max())


def test_trls_loss_gets_exactly_the_captured_tokens(tmp_path):
    with TrlRollouts(scenario(tmp_path), output=tmp_path / "out") as rollouts:
        trainer = trainer_of(rollouts, tmp_path)
        before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
        trainer.train()

    episodes = recorded(tmp_path / "out")
    assert len(episodes) == 3 * 8
    assert sorted(rows_seen(trainer)) == sorted(captured(episodes.values()))
    assert any(not torch.equal(weight, before[name]) for name, weight in trainer.model.state_dict().items())
    # Each step's rollouts use TRL's weights of that step and carry its version.
    assert off_policy(trainer) < 1e-4
    rewards = [episode.reward.value for episode in episodes.values()]
    for step, logged in enumerate(trainer.state.log_history[:3]):
        mine = [e for number, e in episodes.items() if 8 * step < number <= 8 * step + 8]
        assert {v for e in mine for row in e.rows() for v in row.versions} == {step + 1}
        assert logged["rewards/judged/mean"] == pytest.approx(sum(rewards[8 * step : 8 * step + 8]) / 8, abs=1e-5)


def test_prompt_tokens_of_an_agent_behind_the_gateway_are_masked(tmp_path):
    loop = '{ type = "remote", function = "judge_trl:ask_twice" }'
    with TrlRollouts(scenario(tmp_path, loop=loop), output=tmp_path / "out") as rollouts:
        trainer = trainer_of(rollouts, tmp_path, steps=2)
        trainer.train()

    rows = rows_seen(trainer)
    assert sorted(rows) == sorted(captured(recorded(tmp_path / "out").values()))
    assert all(0 in mask and mask[0] == mask[-1] == 1 for _, _, mask, _ in rows)
    assert all(sum(mask) <= 8 for _, _, mask, _ in rows)
    assert off_policy(trainer) < 1e-4


def test_adapters_are_merged_into_the_engines_weights(tmp_path):
    import peft

    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    with TrlRollouts(scenario(tmp_path), output=tmp_path / "out") as rollouts:
        trainer = trainer_of(rollouts, tmp_path, peft_config=lora)
        trainer.train()
    assert any(float(w.detach().abs().sum()) for n, w in trainer.model.named_parameters() if "lora_B" in n)
    assert off_policy(trainer) < 1e-4


def test_a_remote_engine_reads_trls_weights_from_the_runs_directory(tmp_path):
    with TrlRollouts(scenario(tmp_path), output=tmp_path / "out") as rollouts:
        rollouts._source = replace(rollouts._source, in_process=False)
        trainer = trainer_of(rollouts, tmp_path, steps=2)
        trainer.train()
    assert off_policy(trainer) < 1e-4
    assert sorted(path.name for path in (tmp_path / "out" / "bytes" / "weights").iterdir()) == ["0", "1"]


def test_rollouts_without_a_verdict_are_not_trained_on(tmp_path):
    """They do not count as zero: the mean is over judged rollouts, and the others' rows are masked."""
    with TrlRollouts(scenario(tmp_path, judge="odd_only"), output=tmp_path / "out") as rollouts:
        trainer = trainer_of(rollouts, tmp_path)
        trainer.train()

    logged = trainer.state.log_history[:3]
    assert sum(step["loopwright/without_reward"] for step in logged) == 1.5  # three groups of six
    assert {step["rewards/judged/mean"] for step in logged if step["loopwright/without_reward"] < 1} == {1.0}
    assert [mask for _, _, mask, _ in rows_seen(trainer)].count((0,)) == 12
    # They were retried, and every attempt is recorded.
    failed = [e for e in recorded(tmp_path / "out").values() if e.outcome == "judge_failed"]
    assert len(failed) == 36


def test_held_out_tasks_are_evaluated_and_never_trained_on(tmp_path):
    file = scenario(tmp_path)
    (tmp_path / "held.jsonl").write_text(json.dumps({"id": "h0", "prompt": "Say it.", "label": 0}) + "\n")
    file.write_text(file.read_text() + '[run.eval]\ntasks = { type = "jsonl", path = "held.jsonl" }\n')
    with TrlRollouts(file, output=tmp_path / "out") as rollouts:
        trainer = trainer_of(rollouts, tmp_path, per_device_eval_batch_size=4)
        metrics = trainer.evaluate(rollouts.dataset(held_out=True))
    episodes = recorded(tmp_path / "out").values()
    assert [episode.task.id for episode in episodes] == ["h0"] * 4
    assert not any(episode.trainable or episode.in_baseline for episode in episodes)
    mean = sum(episode.reward.value for episode in episodes) / 4
    assert metrics["eval_rewards/judged/mean"] == pytest.approx(mean, abs=1e-5)


def audited(output: Path, *words: str) -> dict:
    result = CliRunner().invoke(app, ["audit", str(output), "--json", *words])
    return {**json.loads(result.stdout.splitlines()[-1]), "exit_code": result.exit_code}


def test_a09_audit_finds_trls_checkpoints_and_their_versions(tmp_path):
    """`checkpoint-N` sampled as version N + 1; the first version is TRL's initial model."""
    base = tmp_path / "base"
    tiny(seed=7, attention="sdpa").save_pretrained(base)
    (base / "byte_tokenizer").write_text("258\n")
    file = scenario(tmp_path)
    file.write_text(file.read_text().replace('model = "tiny"', 'model = "base"'))
    checkpoints = {"save_steps": 1, "save_only_model": True, "save_strategy": "steps"}
    with TrlRollouts(file, output=tmp_path / "out") as rollouts:
        assert rollouts.model_path == str(base)
        trainer = trainer_of(rollouts, tmp_path, model=rollouts.model_path, **checkpoints)
        trainer.train()
    report = audited(tmp_path / "out")
    assert (report["exit_code"], report["left_out"], report["turns"]) == (0, {}, 24)
    (tmp_path / "trl").rename(tmp_path / "moved")
    assert sum(audited(tmp_path / "out")["left_out"].values()) == 16, "only the initial model is known"
    assert audited(tmp_path / "out", "--weights", str(tmp_path / "moved"))["left_out"] == {}


def test_a09_several_branches_mask_the_rollout_and_keep_its_reward(tmp_path):
    loop = '{ type = "remote", function = "judge_trl:ask_apart" }'
    with TrlRollouts(scenario(tmp_path, loop=loop), output=tmp_path / "out") as rollouts:
        trainer = trainer_of(rollouts, tmp_path, steps=1)
        trainer.train()
    assert [mask for _, _, mask, _ in rows_seen(trainer)] == [(0,)] * 8
    logged = trainer.state.log_history[0]
    assert logged["loopwright/tokens_left_out"] > 0
    assert logged["loopwright/without_reward"] == 0


# -- what is refused ------------------------------------------------------------------------------------------------


def twice() -> Episode:
    """Two answers to one prompt; the first was abandoned."""
    question = Node(0, {"role": "user", "content": "?"}, (1, 2), (0.0, 0.0))
    first = Node(1, {"role": "assistant", "content": "a"}, (3,), (-0.1,), (Span(0, 1, 0),), "stop")
    again = Node(1, {"role": "assistant", "content": "bc"}, (4, 5), (-0.2, -0.3), (Span(0, 2, 0),), "stop")
    return Episode(Task("t", ({"role": "user", "content": "?"},)), (ROOT, question, first, again))


def test_no_branch_is_dropped_silently():
    with pytest.raises(SeveralRows, match=r'task .t. has 2 branches.*branches="main"'):
        one_row(twice(), "refuse")
    row, left_out = one_row(twice(), "main")
    assert row is not None
    assert (row.response_ids, left_out) == ((4, 5), 1)


def test_a_temperature_other_than_trls_is_refused(tmp_path):
    loop = '{ type = "single_turn", sampling = { max_tokens = 6, temperature = 0.5 } }'
    with TrlRollouts(scenario(tmp_path, loop=loop)) as rollouts:
        trainer = trainer_of(rollouts, tmp_path)
        with pytest.raises(ValueError, match=r"GRPOConfig\(temperature=0.5\)"):
            trainer.train()


def test_a_prompt_without_a_task_is_refused(tmp_path):
    with TrlRollouts(scenario(tmp_path)) as rollouts:
        trainer = trainer_of(rollouts, tmp_path)
        with pytest.raises(KeyError, match="no task of run 'bytes' has this prompt"):
            rollouts([[{"role": "user", "content": "Who are you?"}]], trainer)


def test_tasks_that_trl_could_not_tell_apart_are_refused(tmp_path):
    file = scenario(tmp_path)
    rows = [{"id": name, "prompt": "Say it.", "label": name} for name in "ab"]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match="'a' and 'b' have the same prompt but different labels"):
        TrlRollouts(file).__enter__()


def test_a_second_process_has_its_own_ledger_and_seeds(tmp_path, monkeypatch):
    answers = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        with TrlRollouts(scenario(tmp_path), output=tmp_path / "out") as rollouts:
            prompts = [row["prompt"] for row in rollouts.dataset()][:1] * 4
            answers.append(rollouts(prompts, trainer_of(rollouts, tmp_path))["completion_ids"])
    assert answers[0] != answers[1]
    assert recorded(tmp_path / "out").keys() == recorded(tmp_path / "out" / "rank-1").keys() == {1, 2, 3, 4}
    with pytest.raises(ValueError, match="use a new output"):
        TrlRollouts(scenario(tmp_path), output=tmp_path / "out")
