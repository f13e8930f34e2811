"""The audit: captured logprobs agree with a forward pass, and later changes are detected."""

import asyncio
import json
import sqlite3
from array import array
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from loopwright.cli import app
from loopwright.core.errors import LedgerError
from loopwright.engines.base import Sampling
from loopwright.engines.inprocess.engine import TransformersConfig, TransformersEngine
from loopwright.engines.inprocess.forward import difference
from loopwright.engines.inprocess.models import tiny
from loopwright.gateway.audit import gateway_episodes
from loopwright.gateway.gateway import Gateway
from loopwright.gateway.sessions.session_config import SessionConfig
from loopwright.gateway.sessions.store import VERSION
from tests.gateway.harness import Replier, client_of, user

SAMPLINGS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_p": 0.9},
    {"top_k": 20},
    {"min_p": 0.02, "temperature": 1.5},
    {"temperature": 0.0},
]


def audited(*words):
    done = CliRunner().invoke(app, ["audit", *map(str, words)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def reported(*words):
    done = audited(*words, "--json")
    *turns, result = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.exit_code == 0) == result["good"]
    return turns, result


async def talked(engine, output, *, weights=None):
    """Sessions with several turns, branches, choices and an update of the weights."""
    async with Gateway(engine, output=output) as gateway:
        for sampling in SAMPLINGS:
            session = await gateway.open(config=SessionConfig(sampling=Sampling(max_tokens=24, **sampling)))
            async with client_of(session) as client:
                history, ask = [user("one")], client.chat.completions.create
                for more in ("two", "three"):
                    answer = await ask(model="m", messages=history)
                    history = [*history, answer.choices[0].message.model_dump(exclude_none=True), user(more)]
                await ask(model="m", messages=[history[0], user("another way")], n=2)
        if weights is not None:
            await engine.pause()
            await engine.load_weights(weights, 5)
            await engine.resume()
            async with client_of(session) as client:
                await client.chat.completions.create(model="m", messages=[*history, user("after the update")])
    await engine.close()


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """A gateway's output, with a checkpoint of its last weights; tests must not change it."""
    directory = tmp_path_factory.mktemp("audit")
    engine = TransformersEngine(TransformersConfig(model="tiny", threads=1), directory)
    (directory / "weights").mkdir()
    save_file(tiny(seed=9).state_dict(), directory / "weights" / "policy-5.safetensors")
    asyncio.run(talked(engine, directory / "gw", weights=Path("weights/policy-5.safetensors")))
    return directory


def changed(captured, tmp_path, column, change):
    """A copy with one changed number in the longest sampled turn."""
    with closing(sqlite3.connect(captured / "gw" / "gateway.db")) as source:
        (tmp_path / "gw").mkdir()
        with closing(sqlite3.connect(tmp_path / "gw" / "gateway.db")) as copy:
            source.backup(copy)
            query = f"SELECT session, number, {column} FROM nodes WHERE finish IS NOT NULL ORDER BY length(ids) DESC"
            session, number, data = copy.execute(query).fetchone()
            numbers = array("d" if column == "logprobs" else "q", data)
            numbers[-3] = change(numbers[-3])
            values = (numbers.tobytes(), session, number)
            copy.execute(f"UPDATE nodes SET {column} = ? WHERE session = ? AND number = ?", values)
            copy.commit()
    return tmp_path / "gw"


def test_captured_turns_pass_the_audit(captured):
    turns, result = reported(captured / "gw", "--engine", "tiny", "--weights", captured / "weights")
    assert result["turns"] == len(turns) == len(SAMPLINGS) * 4 + 1
    assert result["tokens"] == sum(turn["tokens"] for turn in turns) > 300
    assert {turn["version"] for turn in turns} == {0, 5}
    assert result["mean"] < 1e-5
    assert result["largest"] < 1e-4
    audit = audited(captured / "gw", "--engine", "tiny", "--weights", captured / "weights")
    assert audit.exit_code == 0
    assert "what was captured is what was sampled" in audit.stdout


def test_a_store_of_another_format_is_not_read(captured, tmp_path):
    path = changed(captured, tmp_path, "logprobs", lambda logprob: logprob)
    with closing(sqlite3.connect(path / "gateway.db")) as store:
        store.execute("PRAGMA user_version = 4")
    expected = f"has format 4, and this Loopwright reads {VERSION}. Use the Loopwright that wrote it"
    with pytest.raises(LedgerError, match=expected), gateway_episodes(path / "gateway.db"):
        pass


def test_turns_without_available_weights_are_skipped_and_counted(captured):
    _, result = reported(captured / "gw", "--engine", "tiny")
    assert result["left_out"] == {"5": 1}
    assert result["turns"] == len(SAMPLINGS) * 4
    assert result["good"]
    assert "--weights 5=DIR" in audited(captured / "gw", "--engine", "tiny").stdout


def test_the_weights_of_another_version_are_detected(captured, tmp_path):
    save_file(tiny(seed=4).state_dict(), tmp_path / "other.safetensors")
    _, result = reported(captured / "gw", "--engine", "tiny", "--weights", f"5={tmp_path / 'other.safetensors'}")
    assert not result["good"]
    audit = audited(captured / "gw", "--engine", "tiny", "--weights", tmp_path / "other.safetensors")
    assert audit.exit_code == 2
    assert "write VERSION=" in " ".join(audit.stderr.replace("│", "").split())


@pytest.mark.parametrize("by", [0.01, -0.01, 1.0])
def test_a_changed_logprob_is_detected(captured, tmp_path, by):
    turns, result = reported(changed(captured, tmp_path, "logprobs", lambda old: old + by), "--engine", "tiny")
    assert not result["good"]
    assert len([turn for turn in turns if turn["largest"] > 1e-3]) == 1, "the turn is named"
    assert result["mean"] < 1e-2, "all others are correct"


def test_a_changed_id_is_detected(captured, tmp_path):
    output = changed(captured, tmp_path, "ids", lambda old: (old + 1) % 256)
    done = audited(output, "--engine", "tiny")
    assert done.exit_code == 1
    assert "NOT what was sampled" in done.stdout


def test_an_id_outside_the_vocabulary_is_named(captured, tmp_path):
    done = CliRunner().invoke(app, ["audit", str(changed(captured, tmp_path, "ids", lambda _: 4711)), "-e", "tiny"])
    assert "4711 is not a token of 'tiny'" in str(done.exception)


def test_unreadable_inputs_are_reported(captured, tmp_path):
    assert "set it to tiny" in " ".join(audited(captured / "gw").stderr.replace("│", "").split())
    assert "not a model for a forward pass" in " ".join(audited(captured / "gw", "-e", "scripted").stderr.split())
    asyncio.run(_nobody_came(tmp_path / "empty"))
    done = audited(tmp_path / "empty", "--engine", "tiny")
    assert done.exit_code == 1
    assert "nothing to audit" in done.stdout


async def _nobody_came(output):
    async with Gateway(Replier(), output=output) as gateway:
        await gateway.open()


def test_a_run_is_audited_with_its_own_engine(tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "say something"}\n{"prompt": "say more"}\n')
    (tmp_path / "study.toml").write_text(
        """
name = "study"
[[run]]
name = "roll"
agent = { type = "collect", trials = 8, group_size = 4 }
[run.rollout]
tasks = { type = "jsonl", path = "tasks.jsonl" }
loop = { type = "single_turn", sampling = { temperature = 0.8, top_p = 0.95, max_tokens = 12 } }
judger = { type = "length" }
[run.engine]
type = "transformers"
model = "tiny"
seed = 7
"""
    )
    done = CliRunner().invoke(app, ["run", str(tmp_path / "study.toml"), "-o", str(tmp_path / "out"), "-q"])
    assert done.exit_code == 0, done.output
    turns, result = reported(tmp_path / "out")
    assert [turn["episode"] for turn in turns] == [f"trial {number}" for number in range(1, 9)]
    assert result["largest"] < 1e-4
    assert not reported(tmp_path / "out", "--engine", "tiny")[1]["good"], "another seed has other weights"


TRAINING = """
name = "study"
[[run]]
name = "train"
agent = {{ type = "grpo", steps = 4, prompts_per_step = 2, group_size = 4, lr = 1e-2, seed = 1, {agent} }}
engine = {{ type = "transformers", model = "tiny", threads = 1 }}
eval = {{ every = 4, tasks = {{ type = "jsonl", path = "held.jsonl" }} }}
[run.rollout]
tasks = {{ type = "jsonl", path = "tasks.jsonl" }}
loop = {{ type = "single_turn", sampling = {{ max_tokens = 8 }} }}
judger = {{ type = "python", function = "audited_judge:vowels" }}
"""


@pytest.mark.parametrize(
    ("agent", "left_out"),
    [
        ("keep = 4", []),
        ("keep = 1", ["1", "2", "3"]),
        ("keep = 4, lora = { r = 2 }", []),
    ],
)
def test_a_training_is_audited_version_by_version(tmp_path, agent, left_out):
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "say something"}\n{"prompt": "say more"}\n')
    (tmp_path / "held.jsonl").write_text('{"prompt": "say something else"}\n')
    (tmp_path / "audited_judge.py").write_text(
        "def vowels(answer):\n    return sum(a in 'aeiou' for a in answer) / 8\n"
    )
    (tmp_path / "study.toml").write_text(TRAINING.format(agent=agent))
    done = CliRunner().invoke(app, ["run", str(tmp_path / "study.toml"), "-o", str(tmp_path / "out"), "-q"])
    assert done.exit_code == 0, done.output
    turns, result = reported(tmp_path / "out")
    assert sorted(result["left_out"]) == left_out
    assert {turn["version"] for turn in turns} == {0, 1, 2, 3, 4} - {int(version) for version in left_out}
    assert result["mean"] < 1e-5
    assert result["good"]
    if not left_out:
        _, result = reported(tmp_path / "out", "--weights", f"2={tmp_path / 'out/train/checkpoints/step-000004'}")
        assert not result["good"], "each version is compared with its own weights"


def test_off_by_allows_for_rounding_at_the_edge_of_top_p():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    at_edge = Sampling(top_p=0.8 + 1e-6)
    within = float(torch.log(torch.tensor(0.5 / 0.8)))
    assert difference(logits, 0, within, Sampling(top_p=0.8 - 1e-6)) < 1e-6
    assert difference(logits, 0, within, at_edge) < 1e-6, "rounding could have left the third token out"
    assert difference(logits, 0, within, Sampling(top_p=0.9)) > 0.1
    assert difference(logits, 3, -1.0, Sampling(top_k=2)) > 1.0, "it could not have been sampled"
    assert difference(logits, 0, 0.0, Sampling(temperature=0.0)) == 0.0
    assert difference(logits, 1, 0.0, Sampling(temperature=0.0)) > 0.5


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_smollm2_is_captured_to_within_a_thousandth(tmp_path):
    engine = TransformersEngine(TransformersConfig(model="smollm2"), tmp_path)
    asyncio.run(talked(engine, tmp_path / "gw"))
    turns, result = reported(tmp_path / "gw", "--engine", "smollm2")
    print(result)
    assert len(turns) == len(SAMPLINGS) * 4
    assert result["mean"] <= 1e-3
    assert result["good"]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.0)])
def test_nan_is_never_within_a_tolerance(sampling):
    logits = torch.tensor([1.0, 2.0, float("nan")])
    assert difference(logits[:2], 1, float("nan"), sampling) == float("inf")
    assert difference(logits, 2, 0.0, sampling) == float("inf")
