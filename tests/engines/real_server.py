"""The engine contract for real servers, checked against a forward pass of transformers."""

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from loopwright.engines.base import BadSampling, EngineError, Guide, Sampling, engines
from loopwright.engines.inprocess import smollm2
from loopwright.engines.inprocess.sampler import Draw, reshape, steer
from loopwright.testing import EngineContract
from loopwright.testing.engines import ids_of, logprobs_of

STEERING = [
    {"logit_bias": {"28": 4.0, "198": -50}},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7, "presence_penalty": 0.3, "temperature": 0.8},
]
GUIDES = {
    "json": '{"enum": ["red"]}',
    "choice": '["blue", "green"]',
    "regex": "[ab]{3}",
    "grammar": 'root ::= "yes"',
}
SHAPES = [{"temperature": 0.7}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.1}]


@cache
def reference():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2.directory(), dtype="auto")


def logits_of(model, prompt, ids):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1]


def forward(model, prompt, ids, sampling=None):
    logprobs = reshape(logits_of(model, prompt, ids), [sampling or Sampling()] * len(ids))
    return logprobs.gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()


def gaps(model, prompt, ids):
    """How much lower each id's logit is than the largest at its position."""
    logits = logits_of(model, prompt, ids)
    return (logits.amax(-1) - logits.gather(-1, torch.tensor(ids)[:, None])[:, 0]).tolist()


def engine_at(url, wire, directory=None):
    kind = engines.get(wire)
    return kind(kind.Config(url=url, tokenizer="smollm2"), directory or Path())


class RealServer(EngineContract):
    """Subclass it with `pytestmark = pytest.mark.slow` and a fixture that sets `url`."""

    wire = ""
    url = ""
    penalties_count_the_prompt = False
    deadline_s = 600.0

    def make_engine(self, directory, *, slow=False):
        return engine_at(self.url, self.wire, directory)

    def logprobs_of(self, engine, prompt, ids):
        return forward(reference(), prompt, ids)

    def gaps_of(self, engine, prompt, ids):
        return gaps(reference(), prompt, ids)

    @pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: next(iter(shape)))
    def test_logprobs_belong_to_the_sampled_distribution(self, tmp_path, shape):
        async def body(engine):
            chunks = await self.chunks_of(engine, "x", max_tokens=24, **shape)
            expected = forward(reference(), self.prompt_ids(engine), ids_of(chunks), Sampling(**shape))
            assert logprobs_of(chunks) == pytest.approx(expected, abs=self.tolerance)

        self.use(tmp_path, body)

    @pytest.mark.parametrize("steering", STEERING, ids=lambda steering: next(iter(steering)))
    def test_logprobs_belong_to_the_steered_distribution(self, tmp_path, steering):
        async def body(engine):
            sampling, prompt = Sampling(**steering), self.prompt_ids(engine)
            engine.check_sampling(sampling)
            chunks = await self.chunks_of(engine, "x", max_tokens=24, **steering)
            ids = ids_of(chunks)
            before = len(prompt) if self.penalties_count_the_prompt else 0
            draws = [
                Draw(sampling, "", 0, np.asarray([*prompt, *ids[:index]]), before + index) for index in range(len(ids))
            ]
            logprobs = reshape(steer(logits_of(reference(), prompt, ids), draws), [sampling] * len(ids))
            expected = logprobs.gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()
            assert logprobs_of(chunks) == pytest.approx(expected, abs=self.tolerance)

        self.use(tmp_path, body)

    @pytest.mark.parametrize(("kind", "value"), GUIDES.items())
    def test_guided_turns_match(self, tmp_path, kind, value):
        async def body(engine):
            guide = Guide(kind=kind, value=value)
            if f"guide.{kind}" not in engine.steering:
                with pytest.raises(BadSampling):
                    engine.check_sampling(Sampling(guide=guide))
                return
            chunks = await self.chunks_of(engine, "x", max_tokens=128, temperature=0, guide=guide)
            specials = set(engine.tokenizer.specials.values())
            text = engine.tokenizer.decode(token for token in ids_of(chunks) if token not in specials)
            assert re.fullmatch('"red"|blue|green|[ab]{3}|yes', text), text

        self.use(tmp_path, body)

    def test_multi_token_characters_keep_all_ids_and_logprobs(self, tmp_path):
        async def body(engine):
            specials, encode = engine.tokenizer.specials, engine.tokenizer.encode
            start, end = specials["<|im_start|>"], specials["<|im_end|>"]
            prompt = [
                start,
                *encode("user\nSay it with emoji: 🎉🎉🎉"),
                end,
                *encode("\n"),
                start,
                *encode("assistant\n🎉🎉"),
            ]
            chunks = [c async for c in engine.generate(prompt, Sampling(max_tokens=24), seed="e")]
            ids = ids_of(chunks)
            partial = [token for token in ids if "\ufffd" in engine.tokenizer.decode([token])]
            assert partial, "this prompt should produce partial characters"
            assert logprobs_of(chunks) == pytest.approx(forward(reference(), prompt, ids), abs=self.tolerance)

        self.use(tmp_path, body)

    def test_a_stop_text_ends_a_stream(self, tmp_path):
        async def body(engine):
            whole = ids_of(await self.chunks_of(engine, temperature=0))
            stop = engine.tokenizer.decode(whole[5:8])
            settings = Sampling(temperature=0, max_tokens=64, stop=(stop,))
            chunks = [c async for c in engine.generate(self.prompt_ids(engine), settings, seed="s")]
            assert (chunks[-1].finish, ids_of(chunks)) == ("stop", whole[:8])

        self.use(tmp_path, body)

    def test_invalid_prompts_are_refused(self, tmp_path):
        async def body(engine):
            for ids, kind in (([], ValueError), ([999_999], EngineError)):
                with pytest.raises(kind):
                    [c async for c in engine.generate(ids, Sampling(max_tokens=2), seed="s")]

        self.use(tmp_path, body)
