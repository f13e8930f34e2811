"""What every engine promises, as tests.

    class TestMine(EngineContract):
        def make_engine(self, home: Path, *, slow: bool = False) -> Engine:
            return Mine(MineConfig(model="tiny"), home)

An engine that can tell the logprobs of tokens by other means, such as a full forward pass, overrides `logprobs_of`.
"""
# ruff: noqa: S101  These are tests, wherever they stand.

import asyncio
import math
import pickle
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TypeVar

import pytest

from loopwright.core.tagged_config import config_parser
from loopwright.engines.base import Chunk, Engine, Sampling, engines

T = TypeVar("T")
_LONG = 64


class EngineContract(ABC):
    """Subclass it, name the subclass `Test…`, and give it an engine."""

    prompt = "<|im_start|>user\nCount to ten.<|im_end|>\n<|im_start|>assistant\n"
    """What the engine is asked, special tokens by their names; the answer is longer than a few tokens, and ends."""
    tolerance = 1e-3
    """How far logprobs may be off from those of `logprobs_of`."""
    deadline_s = 60.0
    """Seconds that a test may take."""

    @abstractmethod
    def make_engine(self, home: Path, *, slow: bool = False) -> Engine:
        """An engine; a slow one takes a second or more for its answer, and gives it in several chunks."""

    def logprobs_of(self, engine: Engine, prompt: Sequence[int], ids: Sequence[int]) -> Sequence[float] | None:
        """The logprobs of ids after a prompt at temperature 1, found otherwise; None if there is no other way."""
        return None

    def gaps_of(self, engine: Engine, prompt: Sequence[int], ids: Sequence[int]) -> Sequence[float] | None:
        """How much less likely each of the ids is than the likeliest in its place, as a logprob, found otherwise."""
        return None

    def use(self, home: Path, story: Callable[[Engine], Awaitable[T]], *, slow: bool = False) -> T:
        """Run `story` with an engine in an event loop, and close it."""

        async def main() -> T:
            engine = self.make_engine(home, slow=slow)
            try:
                return await asyncio.wait_for(story(engine), self.deadline_s)
            finally:
                await engine.close()

        return asyncio.run(main())

    def asked(self, engine: Engine) -> list[int]:
        """The prompt as ids."""
        specials = engine.tokenizer.specials
        parts = re.split(f"({'|'.join(map(re.escape, specials))})", self.prompt)
        return [
            token
            for part in parts
            for token in ([specials[part]] if part in specials else engine.tokenizer.encode(part))
        ]

    async def said(self, engine: Engine, seed: str = "s", *, ids: Sequence[int] = (), **sampling: float) -> list[Chunk]:
        """The chunks of an answer; every one but the last goes on, and each has a logprob per token."""
        settings = Sampling.model_validate({"max_tokens": _LONG, **sampling})
        stream = engine.generate([*self.asked(engine), *ids], settings, seed=seed)
        chunks = [chunk async for chunk in stream]
        assert [chunk.finish for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].finish in ("stop", "length", "abort")
        assert all(len(chunk.ids) == len(chunk.logprobs) for chunk in chunks)
        return chunks

    def test_the_same_seed_gives_the_same_tokens(self, tmp_path: Path) -> None:
        """So that a rollout can be made again."""

        async def story(engine: Engine) -> None:
            first, again = await self.said(engine), await self.said(engine)
            assert ids_of(first) == ids_of(again)
            assert logprobs_of(first) == pytest.approx(logprobs_of(again), abs=self.tolerance)
            assert {type(token) for token in ids_of(first)} == {int}

        self.use(tmp_path, story)

    def test_logprobs_are_true(self, tmp_path: Path) -> None:
        """Finite, never above 0, and those of the distribution that was sampled from."""

        async def story(engine: Engine) -> None:
            for seed in "abc":
                chunks = await self.said(engine, seed)
                found = logprobs_of(chunks)
                assert all(math.isfinite(logprob) and logprob <= 0 for logprob in found)
                expected = self.logprobs_of(engine, self.asked(engine), ids_of(chunks))
                if expected is not None:
                    assert list(found) == pytest.approx(list(expected), abs=self.tolerance)

        self.use(tmp_path, story)

    def test_greedy_sampling_does_not_depend_on_the_seed(self, tmp_path: Path) -> None:
        """With temperature 0, or one candidate."""

        async def story(engine: Engine) -> None:
            greedy = [await self.said(engine, "a", temperature=0), await self.said(engine, "a", top_k=1)]
            assert ids_of(greedy[0]) == ids_of(greedy[1])
            assert ids_of(greedy[0]) == ids_of(await self.said(engine, "a", temperature=0))

        self.use(tmp_path, story)

    def test_greedy_sampling_takes_the_likeliest_tokens(self, tmp_path: Path) -> None:
        """The same as every other engine with these weights, up to ties."""

        async def story(engine: Engine) -> None:
            chunks = await self.said(engine, temperature=0)
            gaps = self.gaps_of(engine, self.asked(engine), ids_of(chunks))
            assert max(gaps or [0.0]) <= self.tolerance

        self.use(tmp_path, story)

    @pytest.mark.parametrize("count", [1, 3])
    def test_the_budget_ends_a_stream(self, tmp_path: Path, count: int) -> None:
        """With `length`, after exactly so many tokens."""

        async def story(engine: Engine) -> None:
            chunks = await self.said(engine, max_tokens=count)
            assert len(ids_of(chunks)) == count
            assert chunks[-1].finish == "length"

        self.use(tmp_path, story)

    def test_a_stop_token_ends_a_stream_and_is_part_of_it(self, tmp_path: Path) -> None:
        """It was sampled, so it is trained on."""

        async def story(engine: Engine) -> None:
            chunks = await self.said(engine, temperature=0, max_tokens=512)
            assert chunks[-1].finish == "stop"
            specials = set(engine.tokenizer.specials.values())
            assert ids_of(chunks)[-1] in specials
            assert not specials & set(ids_of(chunks)[:-1])

        self.use(tmp_path, story)

    def test_closing_a_stream_aborts_it(self, tmp_path: Path) -> None:
        """And the engine serves the next one."""

        async def story(engine: Engine) -> None:
            for _ in range(3):
                async with aclosing(
                    engine.generate(self.asked(engine), Sampling(max_tokens=_LONG), seed="s")
                ) as stream:
                    async for chunk in stream:
                        assert chunk.ids
                        break
            assert ids_of(await self.said(engine, max_tokens=1))

        self.use(tmp_path, story, slow=True)

    def test_cancelling_whoever_reads_aborts_the_stream(self, tmp_path: Path) -> None:
        """At once."""

        async def story(engine: Engine) -> None:
            reader = asyncio.ensure_future(self.said(engine))
            await asyncio.sleep(0.05)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            assert ids_of(await self.said(engine, max_tokens=1))

        self.use(tmp_path, story, slow=True)

    def test_a_pause_ends_streams_and_holds_new_ones(self, tmp_path: Path) -> None:
        """Until it is over; then whoever was interrupted goes on where it was, under the new version."""

        async def story(engine: Engine) -> None:
            running = asyncio.ensure_future(self.said(engine))
            await asyncio.sleep(0.2)
            await engine.pause()
            begun = await running
            assert begun[-1].finish == "abort"
            assert {chunk.version for chunk in begun} == {0}
            assert len(ids_of(begun)) < _LONG

            held = asyncio.ensure_future(self.said(engine, ids=ids_of(begun)))
            await asyncio.sleep(0.1)
            assert not held.done()
            await engine.load_weights(None, 7)
            assert engine.version == 7
            await engine.resume()
            rest = await held
            assert rest[-1].finish in ("stop", "length")
            assert {chunk.version for chunk in rest} == {7}

        self.use(tmp_path, story, slow=True)

    def test_pausing_and_resuming_twice_is_fine(self, tmp_path: Path) -> None:
        """They say how things are to be, not what changes."""

        async def story(engine: Engine) -> None:
            await engine.resume()
            await engine.pause()
            await engine.pause()
            await engine.resume()
            assert ids_of(await self.said(engine))

        self.use(tmp_path, story)

    def test_many_streams_at_a_time(self, tmp_path: Path) -> None:
        """Each gets what it would have got alone."""

        async def story(engine: Engine) -> None:
            together = await asyncio.gather(*(self.said(engine, str(n), max_tokens=8) for n in range(8)))
            for n, chunks in enumerate(together):
                assert ids_of(chunks) == ids_of(await self.said(engine, str(n), max_tokens=8))

        self.use(tmp_path, story)

    def test_its_config_travels(self, tmp_path: Path) -> None:
        """It survives pickling and JSON, by which it reaches workers and records."""

        async def story(engine: Engine) -> None:
            config = engine.config
            assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301
            assert config_parser(engines)(config.model_dump(mode="json")) == config
            assert config.problems(tmp_path) == []

        self.use(tmp_path, story)


def ids_of(chunks: Sequence[Chunk]) -> tuple[int, ...]:
    """All tokens of a stream."""
    return tuple(token for chunk in chunks for token in chunk.ids)


def logprobs_of(chunks: Sequence[Chunk]) -> tuple[float, ...]:
    """All logprobs of a stream."""
    return tuple(logprob for chunk in chunks for logprob in chunk.logprobs)
