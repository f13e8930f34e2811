"""What a real server must do as well as the engine in this process: the contract, against a forward pass."""

from functools import cache
from pathlib import Path

import pytest
import torch

from loopwright.engines.base import EngineError, Sampling, engines
from loopwright.engines.inprocess import smollm2
from loopwright.engines.inprocess.sampler import reshape
from loopwright.testing import EngineContract
from loopwright.testing.engines import ids_of, logprobs_of

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
    """How much less likely each of the ids is than the likeliest in its place."""
    logits = logits_of(model, prompt, ids)
    return (logits.amax(-1) - logits.gather(-1, torch.tensor(ids)[:, None])[:, 0]).tolist()


def engine_at(url, wire, home=None):
    kind = engines.get(wire)
    return kind(kind.Config(url=url, tokenizer="smollm2"), home or Path())


class RealServer(EngineContract):
    """Subclass it with `pytestmark = pytest.mark.slow` and a fixture that sets `url`."""

    wire = ""
    url = ""
    deadline_s = 600.0

    def make_engine(self, home, *, slow=False):
        return engine_at(self.url, self.wire, home)

    def logprobs_of(self, engine, prompt, ids):
        return forward(reference(), prompt, ids)

    def gaps_of(self, engine, prompt, ids):
        return gaps(reference(), prompt, ids)

    @pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: next(iter(shape)))
    def test_logprobs_are_those_of_what_was_sampled_from(self, tmp_path, shape):
        async def story(engine):
            chunks = await self.chunks_of(engine, "x", max_tokens=24, **shape)
            expected = forward(reference(), self.prompt_ids(engine), ids_of(chunks), Sampling(**shape))
            assert logprobs_of(chunks) == pytest.approx(expected, abs=self.tolerance)

        self.use(tmp_path, story)

    def test_characters_of_several_tokens_have_all_their_ids_and_logprobs(self, tmp_path):
        async def story(engine):
            specials, encode = engine.tokenizer.specials, engine.tokenizer.encode
            start, end = specials["<|im_start|>"], specials["<|im_end|>"]
            asked = [
                start,
                *encode("user\nSay it with emoji: 🎉🎉🎉"),
                end,
                *encode("\n"),
                start,
                *encode("assistant\n🎉🎉"),
            ]
            chunks = [c async for c in engine.generate(asked, Sampling(max_tokens=24), seed="e")]
            ids = ids_of(chunks)
            cut = [token for token in ids if "\ufffd" in engine.tokenizer.decode([token])]
            assert cut, "this prompt is meant to give some"
            assert logprobs_of(chunks) == pytest.approx(forward(reference(), asked, ids), abs=self.tolerance)

        self.use(tmp_path, story)

    def test_a_stop_text_ends_a_stream(self, tmp_path):
        async def story(engine):
            whole = ids_of(await self.chunks_of(engine, temperature=0))
            stop = engine.tokenizer.decode(whole[5:8])
            settings = Sampling(temperature=0, max_tokens=64, stop=(stop,))
            cut = [c async for c in engine.generate(self.prompt_ids(engine), settings, seed="s")]
            assert (cut[-1].finish, ids_of(cut)) == ("stop", whole[:8])

        self.use(tmp_path, story)

    def test_what_is_no_prompt_is_refused(self, tmp_path):
        async def story(engine):
            for ids, kind in (([], ValueError), ([999_999], EngineError)):
                with pytest.raises(kind):
                    [c async for c in engine.generate(ids, Sampling(max_tokens=2), seed="s")]

        self.use(tmp_path, story)
