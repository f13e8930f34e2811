"""The in-process engine: the contract, and true logprobs whatever else is in the batch."""

import asyncio
import time
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from loopwright.engines.base import ContextFull, EngineError, Sampling
from loopwright.engines.inprocess.engine import TransformersConfig, TransformersEngine
from loopwright.engines.inprocess.kv_cache import Rows
from loopwright.engines.inprocess.models import tiny
from loopwright.gateway.sessions.template import ChatML
from loopwright.testing import EngineContract
from loopwright.testing.engines import ids_of, logprobs_of
from tests.engines.real_server import forward, gaps

WEIGHTS = 5
"""A seed whose model happens to end its greedy answer to the contract's prompt."""


def byte_level():
    """A byte tokenizer in the hub's format."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    return tokenizer


def slowed(engine, delay_s):
    engine.model.register_forward_pre_hook(lambda *_: time.sleep(delay_s))
    return engine


class TestTiny(EngineContract):
    def make_engine(self, directory, *, slow=False):
        engine = TransformersEngine(TransformersConfig(model="tiny", seed=WEIGHTS), directory)
        return slowed(engine, 0.03) if slow else engine

    def logprobs_of(self, engine, prompt, ids):
        return forward(engine.model, prompt, ids)

    def gaps_of(self, engine, prompt, ids):
        return gaps(engine.model, prompt, ids)


@pytest.mark.timeout(900)
class TestSmolLM2(EngineContract):
    pytestmark = pytest.mark.slow  # needs a package of 93 MB: `make test-engines`
    deadline_s = 600.0  # as for real servers: a busy machine generates some tokens per second

    def make_engine(self, directory, *, slow=False):
        return TransformersEngine(TransformersConfig(model="smollm2"), directory)

    def logprobs_of(self, engine, prompt, ids):
        return forward(engine.model, prompt, ids)

    def gaps_of(self, engine, prompt, ids):
        return gaps(engine.model, prompt, ids)

    def test_it_knows_the_capital_of_france(self, tmp_path):
        async def body(engine):
            template = ChatML(engine.tokenizer)
            prompt = template.render(
                {"role": "user", "content": "What is the capital of France?"}, first=True, tools=()
            )
            chunks = await chunks_from(engine, [*prompt, *template.opening()], temperature=0)
            assert "Paris" in engine.tokenizer.decode(ids_of(chunks))

        self.use(tmp_path, body)


def run(body, **config):
    """Run `body` with a tiny engine, which never stops by itself."""

    async def main():
        engine = TransformersEngine(TransformersConfig(model="tiny", **config), Path())
        engine.batch.stop_ids = frozenset()  # a random model must not end by itself
        try:
            return await asyncio.wait_for(body(engine), 60)
        finally:
            await engine.close()

    return asyncio.run(main())


async def chunks_from(engine, prompt, seed="s", **sampling):
    settings = Sampling(**{"max_tokens": 24, **sampling})
    return [chunk async for chunk in engine.generate(prompt, settings, seed=seed)]


def prompt_of(number, length):
    return [(number * 37 + index * 11) % 250 for index in range(length)]


def test_a_stream_does_not_depend_on_the_rest_of_the_batch():
    async def body(engine):
        prompts = [prompt_of(n, length) for n, length in enumerate([3, 90, 17, 40, 200, 1, 64, 33])]
        together = await asyncio.gather(*(chunks_from(engine, prompt, str(n)) for n, prompt in enumerate(prompts)))
        for n, (prompt, chunks) in enumerate(zip(prompts, together, strict=True)):
            alone = await chunks_from(engine, prompt, str(n))
            assert ids_of(chunks) == ids_of(alone)
            assert logprobs_of(chunks) == pytest.approx(logprobs_of(alone), abs=1e-4)
            assert logprobs_of(chunks) == pytest.approx(forward(engine.model, prompt, ids_of(chunks)), abs=1e-4)

    run(body, prefix_bytes=0)


def test_top_logprobs_come_with_each_token_on_request():
    async def body(engine):
        prompt = prompt_of(1, 20)
        detailed, plain = await asyncio.gather(chunks_from(engine, prompt, top_logprobs=4), chunks_from(engine, prompt))
        assert (ids_of(detailed), {chunk.tops for chunk in plain}) == (ids_of(plain), {None})
        for chunk in detailed:
            (tops,) = chunk.tops
            assert len(tops) == 4
            assert [logprob for _, logprob in tops] == sorted((logprob for _, logprob in tops), reverse=True)
            assert dict(tops).get(chunk.ids[0], chunk.logprobs[0]) == pytest.approx(chunk.logprobs[0], abs=1e-6)

    run(body)


def test_streams_join_and_leave_a_running_batch():
    async def body(engine):
        async def later(n):
            await asyncio.sleep(0.02 * n)
            return await chunks_from(engine, prompt_of(n, 10 + 7 * n), str(n), max_tokens=30 - 3 * n)

        streams = await asyncio.gather(*(later(n) for n in range(8)))
        for n, chunks in enumerate(streams):
            assert len(ids_of(chunks)) == 30 - 3 * n
            prompt = prompt_of(n, 10 + 7 * n)
            assert logprobs_of(chunks) == pytest.approx(forward(engine.model, prompt, ids_of(chunks)), abs=1e-4)

    run(lambda engine: body(slowed(engine, 0.005)), seed=3)


def test_streams_beyond_the_batch_size_wait():
    async def body(engine):
        streams = await asyncio.gather(*(chunks_from(engine, prompt_of(n, 5), str(n), max_tokens=6) for n in range(9)))
        assert [len(ids_of(chunks)) for chunks in streams] == [6] * 9

    run(body, max_batch=2)


def test_streams_without_memory_wait():
    async def body(engine):
        running = []
        engine.model.register_forward_pre_hook(
            lambda _, __, kwargs: running.append(kwargs["input_ids"].shape[0]), with_kwargs=True
        )
        streams = await asyncio.gather(
            *(chunks_from(engine, prompt_of(n, 100), str(n), max_tokens=6) for n in range(9))
        )
        assert [len(ids_of(chunks)) for chunks in streams] == [6] * 9
        assert max(running) == 3

    run(body, batch_bytes=3 * 106 * 768)


def test_the_next_turn_of_a_session_computes_only_what_is_new():
    async def body(engine):
        first = prompt_of(1, 300)
        answer = ids_of(await chunks_from(engine, first, max_tokens=40))
        second = [*first, *answer, *prompt_of(2, 20)]
        before = engine.batch.computed_tokens
        reused = await chunks_from(engine, second, "t")
        new = engine.batch.computed_tokens - before
        engine.batch.prefixes.clear()
        afresh = await chunks_from(engine, second, "t")
        assert new == 20 + 1 + len(ids_of(reused)) - 1, "the last sampled token had not been computed"
        assert ids_of(reused) == ids_of(afresh)
        assert logprobs_of(reused) == pytest.approx(logprobs_of(afresh), abs=1e-4)

    run(body)


def test_a_branch_shares_the_common_prefix():
    async def body(engine):
        stem = prompt_of(1, 100)
        await chunks_from(engine, [*stem, *prompt_of(2, 30)], max_tokens=1)
        before = engine.batch.computed_tokens
        chunks = await chunks_from(engine, [*stem, *prompt_of(3, 30)], max_tokens=1)
        assert engine.batch.computed_tokens - before == 30
        expected = forward(engine.model, [*stem, *prompt_of(3, 30)], ids_of(chunks))
        assert logprobs_of(chunks) == pytest.approx(expected, abs=1e-4)

    run(body)


def test_requests_with_one_prompt_share_its_computation():
    async def body(engine):
        prompt = prompt_of(1, 100)
        streams = await asyncio.gather(*(chunks_from(engine, prompt, str(n), max_tokens=1) for n in range(8)))
        assert engine.batch.computed_tokens == 100
        assert len({ids_of(chunks) for chunks in streams}) > 1

    run(body)


def test_memory_of_finished_streams_is_bounded():
    async def body(engine):
        for n in range(40):
            await chunks_from(engine, prompt_of(n, 50), max_tokens=1)
            assert engine.batch.prefixes.size_bytes <= 100_000
        assert len(engine.batch.prefixes) > 1

    run(body, prefix_bytes=100_000)


def test_a_long_prompt_is_prefilled_in_parts_while_others_continue():
    async def body(engine):
        widths = []
        engine.model.register_forward_pre_hook(
            lambda _, __, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        async with aclosing(engine.generate(prompt_of(2, 5), Sampling(max_tokens=100), seed="w")) as running:
            await anext(running)
            chunks = await chunks_from(engine, prompt_of(1, 1500), max_tokens=4)
        parts = [index for index, width in enumerate(widths) if width > 5]
        assert [widths[index] for index in parts] == [512, 512, 476]
        assert all(1 in widths[one:other] for one, other in pairwise(parts)), "the other stream continued in between"
        assert logprobs_of(chunks) == pytest.approx(forward(tiny(), prompt_of(1, 1500), ids_of(chunks)), abs=1e-4)

    run(body)


def test_a_stop_text_ends_a_stream_and_its_ids_stay_complete():
    async def body(engine):
        prompt = prompt_of(1, 20)
        whole = ids_of(await chunks_from(engine, prompt, max_tokens=200))
        text = engine.tokenizer.decode(whole)
        stop = next(pair for pair in map("".join, pairwise(text)) if "\ufffd" not in pair)
        chunks = await chunks_from(engine, prompt, max_tokens=200, stop=("never said", stop))
        assert chunks[-1].finish == "stop"
        assert ids_of(chunks) == whole[: len(ids_of(chunks))]
        assert engine.tokenizer.decode(ids_of(chunks)).endswith(stop)

    run(body)


def test_an_interrupted_stream_continues_unchanged():
    async def body(engine):
        prompt = prompt_of(1, 20)
        whole = ids_of(await chunks_from(engine, prompt))
        beginning = whole[:9]
        assert beginning + ids_of(await chunks_from(engine, [*prompt, *beginning], max_tokens=15)) == whole

    run(body)


def test_the_context_ends_a_stream_and_a_prompt_that_fills_it_is_refused():
    async def body(engine):
        chunks = await chunks_from(engine, prompt_of(1, 60), max_tokens=100)
        assert (len(ids_of(chunks)), chunks[-1].finish) == (4, "length")
        with pytest.raises(ContextFull, match="This model's maximum context length is 64 tokens"):
            await chunks_from(engine, prompt_of(1, 64))

    run(body, max_context=64)


@pytest.mark.parametrize(("ids", "match"), [([], "at least one token"), ([1, 258], "258 is no"), ([-1], "-1 is no")])
def test_invalid_prompts_are_refused(ids, match):
    async def body(engine):
        with pytest.raises(ValueError, match=match):
            await chunks_from(engine, ids)

    run(body)


@pytest.mark.parametrize("kind", ["mapping", "directory", "file"])
def test_new_weights_take_effect(tmp_path, kind):
    other = tiny(9)
    sources = {"mapping": other.state_dict(), "directory": tmp_path, "file": str(tmp_path / "model.safetensors")}
    other.save_pretrained(tmp_path)

    async def body(engine):
        prompt = prompt_of(1, 50)
        before = await chunks_from(engine, prompt)
        await engine.pause()
        await engine.load_weights(sources[kind], 3)
        await engine.resume()
        after = await chunks_from(engine, prompt)
        assert ids_of(after) != ids_of(before)
        assert logprobs_of(after) == pytest.approx(forward(other, prompt, ids_of(after)), abs=1e-4)
        assert {chunk.version for chunk in after} == {3}

    run(body)


def test_weights_that_do_not_fit_change_nothing(tmp_path):
    weights = tiny(9).state_dict()
    name = "model.norm.weight"

    async def body(engine):
        before = await chunks_from(engine, prompt_of(1, 50))
        for bad, match in (
            ({**weights, "more": weights[name]}, "1 unknown, such as 'more'"),
            ({key: value for key, value in weights.items() if key != name}, f"1 missing, such as '{name}'"),
            ({**weights, name: weights[name][:5]}, f"1 of another shape, such as '{name}'"),
            (tmp_path / "nowhere.safetensors", "cannot be read"),
            (tmp_path, "no weights in"),
        ):
            with pytest.raises(EngineError, match=match):
                await engine.load_weights(bad, 3)
        assert engine.version == 0
        engine.batch.prefixes.clear()
        assert ids_of(await chunks_from(engine, prompt_of(1, 50))) == ids_of(before)

    run(body)


def test_weights_do_not_change_under_running_streams():
    async def body(engine):
        async with aclosing(engine.generate([1], Sampling(), seed="s")) as stream:
            await anext(stream)
            with pytest.raises(EngineError, match="pause the engine"):
                await engine.load_weights(None, 1)

    run(body)


def test_a_failing_model_fails_its_streams_and_serves_the_next():
    async def body(engine):
        def fail(*_):
            raise RuntimeError("out of memory")

        hook = engine.model.register_forward_pre_hook(fail)
        for result in await asyncio.gather(*(chunks_from(engine, [n]) for n in range(3)), return_exceptions=True):
            assert isinstance(result, EngineError)
            assert "RuntimeError: out of memory" in str(result)
        hook.remove()
        assert ids_of(await chunks_from(engine, [1]))

    run(body)


def test_a_closed_engine_raises():
    async def main():
        engine = TransformersEngine(TransformersConfig(model="tiny"), Path())
        await engine.pause()
        stream = asyncio.ensure_future(chunks_from(engine, [1]))
        await asyncio.sleep(0.01)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await stream

    asyncio.run(main())


def test_a_model_from_a_directory_is_served_with_its_own_tokenizer(tmp_path):
    tiny(2).save_pretrained(tmp_path / "mine")
    byte_level().save(str(tmp_path / "mine" / "tokenizer.json"))

    async def main():
        engine = TransformersEngine(TransformersConfig(model="mine"), tmp_path)
        chunks = await chunks_from(engine, engine.tokenizer.encode("hello"), max_tokens=3)
        await engine.close()
        assert logprobs_of(chunks) == pytest.approx(
            forward(tiny(2), engine.tokenizer.encode("hello"), ids_of(chunks)), abs=1e-4
        )

    asyncio.run(main())


def test_a_missing_model_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(EngineError, match="model 'empty' cannot be loaded"):
        TransformersEngine(TransformersConfig(model="empty"), tmp_path)


def test_a_model_with_large_logits_is_served(tmp_path):
    model = tiny(2)
    with torch.no_grad():
        model.model.norm.weight.mul_(1e5)
    model.save_pretrained(tmp_path / "steep")
    byte_level().save(str(tmp_path / "steep" / "tokenizer.json"))
    engine = TransformersEngine(TransformersConfig(model="steep"), tmp_path)
    asyncio.run(engine.close())


def test_a_model_whose_cache_is_wrong_is_refused(tmp_path, monkeypatch):
    tiny(2).save_pretrained(tmp_path / "mine")
    byte_level().save(str(tmp_path / "mine" / "tokenizer.json"))
    forward_rows = Rows.forward
    monkeypatch.setattr(Rows, "forward", lambda rows, ids: forward_rows(rows, [[each[0] + 1] for each in ids]))
    with pytest.raises(EngineError, match="model 'mine' cannot be served in process: logprobs are off by"):
        TransformersEngine(TransformersConfig(model="mine"), tmp_path)
