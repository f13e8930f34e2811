"""The contract of every engine, as tests.

    class TestMine(EngineContract):
        def make_engine(self, scenario_dir: Path, *, slow: bool = False) -> Engine:
            return Mine(MineConfig(model="tiny"), scenario_dir)

If the logprobs of an engine can be computed in another way, such as a full forward pass, override `logprobs_of`.
"""
# ruff: noqa: S101  These are tests.

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

from loopwright.core.registry import config_parser
from loopwright.engines.base import Chunk, Engine, Sampling, engines
from loopwright.testing.executors import use_and_close

T = TypeVar("T")
_LONG = 64


class EngineContract(ABC):
    """Subclass it, name the subclass `Test…`, and give it an engine."""

    prompt = "<|im_start|>user\nCount to ten.<|im_end|>\n<|im_start|>assistant\n"
    """The prompt, special tokens by their names; the answer must be longer than a few tokens, and must end."""
    tolerance = 1e-3
    """The largest allowed difference to the logprobs of `logprobs_of`."""
    deadline_s = 60.0
    """Time limit of a test."""

    @abstractmethod
    def make_engine(self, scenario_dir: Path, *, slow: bool = False) -> Engine:
        """An engine; a slow one takes at least a second for its answer, in several chunks."""

    def logprobs_of(self, engine: Engine, prompt: Sequence[int], ids: Sequence[int]) -> Sequence[float] | None:
        """The logprobs of ids after a prompt at temperature 1, computed in another way; None if the engine has none."""
        return None

    def gaps_of(self, engine: Engine, prompt: Sequence[int], ids: Sequence[int]) -> Sequence[float] | None:
        """How far each id's logprob is below the likeliest at its position, computed in another way."""
        return None

    def use(self, scenario_dir: Path, scenario: Callable[[Engine], Awaitable[T]], *, slow: bool = False) -> T:
        """Run `scenario` with an engine in an event loop, and close the engine."""
        return use_and_close(lambda: self.make_engine(scenario_dir, slow=slow), scenario, self.deadline_s)

    def prompt_ids(self, engine: Engine) -> list[int]:
        """The prompt as ids."""
        specials = engine.tokenizer.specials
        parts = re.split(f"({'|'.join(map(re.escape, specials))})", self.prompt)
        return [
            token
            for part in parts
            for token in ([specials[part]] if part in specials else engine.tokenizer.encode(part))
        ]

    async def chunks_of(
        self, engine: Engine, seed: str = "s", *, ids: Sequence[int] = (), **sampling: float
    ) -> list[Chunk]:
        """The chunks of an answer: only the last has a finish reason, and each has a logprob per token."""
        settings = Sampling.model_validate({"max_tokens": _LONG, **sampling})
        stream = engine.generate([*self.prompt_ids(engine), *ids], settings, seed=seed)
        chunks = [chunk async for chunk in stream]
        assert [chunk.finish for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].finish in ("stop", "length", "abort")
        assert all(len(chunk.ids) == len(chunk.logprobs) for chunk in chunks)
        return chunks

    def test_the_same_seed_gives_the_same_tokens(self, tmp_path: Path) -> None:
        """A rollout can be reproduced."""

        async def scenario(engine: Engine) -> None:
            first, again = await self.chunks_of(engine), await self.chunks_of(engine)
            assert ids_of(first) == ids_of(again)
            assert logprobs_of(first) == pytest.approx(logprobs_of(again), abs=self.tolerance)
            assert {type(token) for token in ids_of(first)} == {int}

        self.use(tmp_path, scenario)

    def test_logprobs_are_true(self, tmp_path: Path) -> None:
        """Finite, never above 0, and those of the distribution that was sampled from."""

        async def scenario(engine: Engine) -> None:
            for seed in "abc":
                chunks = await self.chunks_of(engine, seed)
                logprobs = logprobs_of(chunks)
                assert all(math.isfinite(logprob) and logprob <= 0 for logprob in logprobs)
                expected = self.logprobs_of(engine, self.prompt_ids(engine), ids_of(chunks))
                if expected is not None:
                    assert list(logprobs) == pytest.approx(list(expected), abs=self.tolerance)

        self.use(tmp_path, scenario)

    def test_greedy_sampling_does_not_depend_on_the_seed(self, tmp_path: Path) -> None:
        """With temperature 0, or one candidate."""

        async def scenario(engine: Engine) -> None:
            greedy = [await self.chunks_of(engine, "a", temperature=0), await self.chunks_of(engine, "a", top_k=1)]
            assert ids_of(greedy[0]) == ids_of(greedy[1])
            assert ids_of(greedy[0]) == ids_of(await self.chunks_of(engine, "a", temperature=0))

        self.use(tmp_path, scenario)

    def test_greedy_sampling_takes_the_likeliest_tokens(self, tmp_path: Path) -> None:
        """The same as every other engine with these weights, up to ties."""

        async def scenario(engine: Engine) -> None:
            chunks = await self.chunks_of(engine, temperature=0)
            gaps = self.gaps_of(engine, self.prompt_ids(engine), ids_of(chunks))
            assert max(gaps or [0.0]) <= self.tolerance

        self.use(tmp_path, scenario)

    @pytest.mark.parametrize("count", [1, 3])
    def test_the_token_limit_ends_a_stream(self, tmp_path: Path, count: int) -> None:
        """With `length`, after exactly this number of tokens."""

        async def scenario(engine: Engine) -> None:
            chunks = await self.chunks_of(engine, max_tokens=count)
            assert len(ids_of(chunks)) == count
            assert chunks[-1].finish == "length"

        self.use(tmp_path, scenario)

    def test_a_stop_token_ends_a_stream_and_is_part_of_it(self, tmp_path: Path) -> None:
        """It was sampled, so it is trained on."""

        async def scenario(engine: Engine) -> None:
            chunks = await self.chunks_of(engine, temperature=0, max_tokens=512)
            assert chunks[-1].finish == "stop"
            specials = set(engine.tokenizer.specials.values())
            assert ids_of(chunks)[-1] in specials
            assert not specials & set(ids_of(chunks)[:-1])

        self.use(tmp_path, scenario)

    def test_closing_a_stream_aborts_it(self, tmp_path: Path) -> None:
        """And the engine serves the next one."""

        async def scenario(engine: Engine) -> None:
            for _ in range(3):
                async with aclosing(
                    engine.generate(self.prompt_ids(engine), Sampling(max_tokens=_LONG), seed="s")
                ) as stream:
                    async for chunk in stream:
                        assert chunk.ids
                        break
            assert ids_of(await self.chunks_of(engine, max_tokens=1))

        self.use(tmp_path, scenario, slow=True)

    def test_cancelling_the_reader_aborts_the_stream(self, tmp_path: Path) -> None:
        """At once."""

        async def scenario(engine: Engine) -> None:
            reader = asyncio.ensure_future(self.chunks_of(engine))
            await asyncio.sleep(0.05)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            assert ids_of(await self.chunks_of(engine, max_tokens=1))

        self.use(tmp_path, scenario, slow=True)

    def test_a_pause_ends_streams_and_holds_new_ones(self, tmp_path: Path) -> None:
        """After it, an interrupted stream continues where it was, with the new version."""

        async def scenario(engine: Engine) -> None:
            running = asyncio.ensure_future(self.chunks_of(engine))
            await asyncio.sleep(0.2)
            await engine.pause()
            first = await running
            assert first[-1].finish == "abort"
            assert {chunk.version for chunk in first} == {0}
            assert len(ids_of(first)) < _LONG

            waiting = asyncio.ensure_future(self.chunks_of(engine, ids=ids_of(first)))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            await engine.load_weights(None, 7)
            assert engine.version == 7
            await engine.resume()
            rest = await waiting
            assert rest[-1].finish in ("stop", "length")
            assert {chunk.version for chunk in rest} == {7}

        self.use(tmp_path, scenario, slow=True)

    def test_pausing_and_resuming_twice_is_fine(self, tmp_path: Path) -> None:
        """Both are idempotent."""

        async def scenario(engine: Engine) -> None:
            await engine.resume()
            await engine.pause()
            await engine.pause()
            await engine.resume()
            assert ids_of(await self.chunks_of(engine))

        self.use(tmp_path, scenario)

    def test_many_streams_run_at_a_time(self, tmp_path: Path) -> None:
        """Each gets the tokens that it would get alone."""

        async def scenario(engine: Engine) -> None:
            together = await asyncio.gather(*(self.chunks_of(engine, str(n), max_tokens=8) for n in range(8)))
            for n, chunks in enumerate(together):
                assert ids_of(chunks) == ids_of(await self.chunks_of(engine, str(n), max_tokens=8))

        self.use(tmp_path, scenario)

    def test_its_config_survives_pickling_and_json(self, tmp_path: Path) -> None:
        """This is how it reaches workers and ledgers."""

        async def scenario(engine: Engine) -> None:
            config = engine.config
            assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301
            assert config_parser(engines)(config.model_dump(mode="json")) == config
            assert config.problems(tmp_path) == []

        self.use(tmp_path, scenario)


def ids_of(chunks: Sequence[Chunk]) -> tuple[int, ...]:
    """All tokens of a stream."""
    return tuple(token for chunk in chunks for token in chunk.ids)


def logprobs_of(chunks: Sequence[Chunk]) -> tuple[float, ...]:
    """All logprobs of a stream."""
    return tuple(logprob for chunk in chunks for logprob in chunk.logprobs)
