"""The real vLLM server, weight updates included, in a separate virtual environment: `make test-engines`."""

import asyncio
import shutil

import pytest
from benchmarks.servers import missing, vllm

from loopwright.engines.base import ContextFull, Sampling
from loopwright.engines.inprocess import smollm2
from loopwright.testing.engines import ids_of, logprobs_of
from tests.engines.real_server import RealServer, engine_at, forward
from tests.gateway.test_audit import reported, talked

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(missing("vllm") is not None, reason=str(missing("vllm"))),
]


@pytest.fixture(scope="module")
def url():
    with vllm() as url:
        yield url


class TestVllm(RealServer):
    wire = "vllm"

    @pytest.fixture(autouse=True)
    def _url(self, url):
        self.url = url

    def test_a_prompt_that_is_too_long_is_refused(self, tmp_path):
        async def body(engine):
            for length in (4096, 5000):
                with pytest.raises(ContextFull, match="maximum context length is 4096 tokens"):
                    [c async for c in engine.generate([5] * length, Sampling(max_tokens=1), seed="s")]

        self.use(tmp_path, body)

    def test_t06_new_weights_under_a_running_stream(self, tmp_path):
        """Pause, load, resume: earlier tokens carry the old version, later ones the new version, and the
        logprobs are those of the weights that sampled."""
        changed = other_weights(tmp_path / "changed")

        async def body(engine):
            prompt = self.prompt_ids(engine)
            beginning = []

            async def listen():
                # A seed with a long answer: it must not end before the pause.
                async for chunk in engine.generate(prompt, Sampling(max_tokens=512), seed="u"):
                    beginning.append(chunk)  # noqa: PERF401  one by one: somebody waits for them

            running = asyncio.ensure_future(listen())
            while len(beginning) < 4:
                await asyncio.sleep(0.05)
            await engine.pause()
            await running
            assert beginning[-1].finish == "abort"
            stream = asyncio.ensure_future(self.chunks_of(engine, ids=ids_of(beginning), max_tokens=12))
            await engine.load_weights(changed.name_or_path, 1)
            assert not stream.done()
            await engine.resume()
            rest = await stream
            assert {chunk.version for chunk in beginning} == {0}
            assert {chunk.version for chunk in rest} == {1}
            assert logprobs_of(beginning) == pytest.approx(
                self.logprobs_of(engine, prompt, ids_of(beginning)), abs=1e-3
            )
            whole = [*prompt, *ids_of(beginning)]
            assert logprobs_of(rest) == pytest.approx(forward(changed, whole, ids_of(rest)), abs=1e-3)
            before = self.logprobs_of(engine, whole, ids_of(rest))
            assert logprobs_of(rest) != pytest.approx(before, abs=0.01), "the weights differ"

            await engine.pause()
            await engine.load_weights(smollm2.directory(), 2)
            await engine.resume()
            again = await self.chunks_of(engine, max_tokens=12)
            assert logprobs_of(again) == pytest.approx(self.logprobs_of(engine, prompt, ids_of(again)), abs=1e-3)

        self.use(tmp_path, body)


def test_captured_tokens_pass_the_audit(url, tmp_path):
    asyncio.run(talked(engine_at(url, "vllm"), tmp_path / "gw"))
    turns, result = reported(tmp_path / "gw", "--engine", "smollm2")
    print(result)
    assert turns
    assert result["mean"] <= 1e-3


def other_weights(directory):
    """SmolLM2 with slightly changed weights, as after some training."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2.directory(), dtype="auto")
    with torch.no_grad():
        for layer in model.model.layers[-4:]:
            layer.mlp.down_proj.weight.mul_(1.1)
    model.save_pretrained(directory)
    shutil.copy(smollm2.directory() / "tokenizer.json", directory)
    model.name_or_path = str(directory)
    return model
