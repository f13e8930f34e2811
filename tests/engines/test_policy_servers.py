"""A trained policy answers the same everywhere (P04): in transformers, our engine, real vLLM and real llama.cpp."""

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
from benchmarks.servers import llamacpp, missing, vllm

from loopwright.engines.base import Engine, Sampling, engines
from loopwright.engines.inprocess import smollm2
from loopwright.testing.engines import ids_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(missing("vllm") is not None, reason=str(missing("vllm"))),
    pytest.mark.skipif(missing("llamacpp") is not None, reason=str(missing("llamacpp"))),
]
SCENARIO = """
name = "letters"
[[run]]
name = "work"
agent = { type = "grpo", steps = 2, prompts_per_step = 2, group_size = 4, lr = 5e-3, seed = 3, lora = { r = 4 } }
[run.engine]
type = "transformers"
model = "smollm2"
[run.rollout]
tasks = { type = "python", function = "letters:tasks" }
loop = { type = "single_turn", sampling = { max_tokens = 16 } }
judger = { type = "python", function = "letters:vowels" }
"""
LETTERS = """
def tasks():
    return [{"prompt": f"Say something about {word}."} for word in ("rain", "bread")]

def vowels(answer):
    return sum(letter in "aeiou" for letter in answer) / 40
"""
QUESTION = [
    {"role": "system", "content": "You answer in one sentence."},
    {"role": "user", "content": "Why is the sky blue? It's 20 km high — isn't it?"},
]
TOKENS, NEAR_TIE = 48, 1e-3


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("policy")
    (directory / "letters.py").write_text(LETTERS)
    (directory / "letters.toml").write_text(SCENARIO)
    for words in (["run", "letters.toml", "--output", "out"], ["export", "out", "--format", "gguf"]):
        command = [sys.executable, "-m", "loopwright", *words]
        result = subprocess.run(command, cwd=directory, capture_output=True, text=True, env={**os.environ}, timeout=900)
        assert result.returncode == 0, result.stderr
    return directory / "out" / "work" / "policy"


class Reference:
    """The policy in transformers: the ids of the question, and of the answer up to the first near tie."""

    def __init__(self, policy: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer, model = AutoTokenizer.from_pretrained(policy), AutoModelForCausalLM.from_pretrained(policy)
        assert model.dtype == torch.float32
        self.prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
        whole = model.generate(torch.tensor([self.prompt]), do_sample=False, temperature=None, max_new_tokens=TOKENS)
        self.answer = self.until_tie(model, whole[0, len(self.prompt) :].tolist())
        base = AutoModelForCausalLM.from_pretrained(smollm2.directory(), dtype=torch.float32)
        import peft

        adapted = peft.PeftModel.from_pretrained(base, policy / "adapter")
        self.from_adapters = adapted.generate(
            input_ids=torch.tensor([self.prompt]), do_sample=False, temperature=None, max_new_tokens=TOKENS
        )[0, len(self.prompt) :].tolist()

    @torch.inference_mode()
    def until_tie(self, model, ids: list[int]) -> list[int]:
        logits = model(input_ids=torch.tensor([[*self.prompt, *ids]])).logits[0, len(self.prompt) - 1 : -1]
        best = logits.topk(2, -1).values
        ties = (best[:, 0] - best[:, 1] < NEAR_TIE).nonzero()
        return ids[: int(ties[0])] if len(ties) else ids


@pytest.fixture(scope="module")
def reference(policy):
    answer = Reference(policy)
    assert len(answer.answer) > 8, "a near tie comes too soon; change the question"
    return answer


def ask(engine: Engine, prompt: list[int]) -> list[int]:
    """The engine's greedy answer."""

    async def main():
        try:
            sampling = Sampling(temperature=0, max_tokens=TOKENS)
            return list(ids_of([chunk async for chunk in engine.generate(prompt, sampling, seed="0")]))
        finally:
            await engine.close()

    return asyncio.run(main())


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.loads(response.read())


def engine_of(kind: str, **settings) -> Engine:
    engine = engines.get(kind)
    return engine(engine.Config(**settings), Path())


def test_p04_our_engine_and_the_adapters_answer_as_transformers_does(policy, reference):
    answer = ask(engine_of("transformers", model=str(policy)), reference.prompt)
    assert answer[: len(reference.answer)] == reference.answer
    assert reference.from_adapters[: len(reference.answer)] == reference.answer
    before = ask(engine_of("transformers", model="smollm2"), reference.prompt)
    assert before[: len(reference.answer)] != reference.answer, "training has changed the answer"


def test_p04_vllm_answers_as_transformers_does(policy, reference):
    with vllm(model=policy) as url:
        asked = post(f"{url}/tokenize", {"model": str(policy), "messages": QUESTION, "add_generation_prompt": True})
        assert asked["tokens"] == reference.prompt, "vLLM reads the policy's own chat template"
        answer = ask(engine_of("vllm", url=url, tokenizer=str(policy)), reference.prompt)
    assert answer[: len(reference.answer)] == reference.answer


def test_p04_llamacpp_answers_as_transformers_does(policy, reference):
    with llamacpp(model=policy / "policy.gguf") as url:
        text = post(f"{url}/apply-template", {"messages": QUESTION})["prompt"]
        asked = post(f"{url}/tokenize", {"content": text, "add_special": False, "parse_special": True})
        assert asked["tokens"] == reference.prompt, "llama.cpp reads the policy's own chat template"
        answer = ask(engine_of("llamacpp", url=url, tokenizer=str(policy)), reference.prompt)
    assert answer[: len(reference.answer)] == reference.answer
