"""The scripted engine keeps the engine contract, and really samples."""

import asyncio
import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopwright.engines.base import EngineError, Sampling
from loopwright.engines.scripted import ScriptedConfig, ScriptedEngine, sample
from loopwright.testing import EngineContract

END = 257


class TestContract(EngineContract):
    def make_engine(self, directory, *, slow=False):
        replies = ("one two three four five six seven eight nine ten", "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16")
        return ScriptedEngine(ScriptedConfig(replies=replies, slip=0.1, token_s=0.005 if slow else 0.0), directory)


class TestThatNeverSlips(EngineContract):
    def make_engine(self, directory, *, slow=False):
        replies = ("one two three four five six seven eight nine ten",)
        return ScriptedEngine(ScriptedConfig(replies=replies, slip=0.0, token_s=0.005 if slow else 0.0), directory)

    def logprobs_of(self, engine, prompt, ids):
        return [0.0] * len(ids)


@pytest.mark.parametrize("intended", [ord("a"), ord(" "), ord("~"), 200, END])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.7), Sampling(temperature=1.6), Sampling(top_k=5), Sampling(top_p=0.8),
     Sampling(min_p=0.001), Sampling(temperature=1.3, top_k=20, top_p=0.9)],
    ids=["plain", "cold", "hot", "top_k", "top_p", "min_p", "all"],
)  # fmt: skip
def test_token_frequencies_match_their_logprobs(intended, sampling):
    random, draws = Random(f"{intended}"), 20_000
    tokens = [sample(intended, 0.6, sampling, random) for _ in range(draws)]
    counts = Counter(token for token, _ in tokens)
    chances = {token: math.exp(logprob) for token, logprob in tokens}
    assert len(chances) == len(set(tokens)), "one token, one logprob"
    assert sum(chances.values()) == pytest.approx(1.0), "the probabilities sum to one"
    for token, chance in chances.items():
        deviation = math.sqrt(draws * chance * (1 - chance)) + 1e-9
        assert abs(counts[token] - draws * chance) < 5 * deviation


@given(
    st.floats(0, 0.9),
    st.floats(0, 1e6) | st.floats(0, 1e-3),
    st.floats(0, 1, exclude_min=True),
    st.integers(0, 300),
    st.integers(0, END),
)
def test_any_settings_give_a_token_and_a_true_logprob(slip, temperature, top_p, top_k, intended):
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    for seed in range(5):
        token, logprob = sample(intended, slip, sampling, Random(seed))
        assert 0 <= token <= END
        assert math.isfinite(logprob)
        assert logprob <= 0


def test_min_p_excludes_unlikely_tokens():
    tokens = {sample(ord("a"), 0.6, Sampling(min_p=0.1), Random(seed)) for seed in range(200)}
    assert tokens == {(ord("a"), 0.0)}


def reply_of(engine, text, seed="0", **sampling):
    async def main():
        opening = [256, *engine.tokenizer.encode(f"user\n{text}"), END, 256, *engine.tokenizer.encode("assistant\n")]
        chunks = [c async for c in engine.generate(opening, Sampling(**sampling), seed=seed)]
        return engine.tokenizer.decode(i for chunk in chunks for i in chunk.ids)

    return asyncio.run(main())


def test_a_script_answers_the_prompt_by_its_seed(tmp_path):
    (tmp_path / "scripts_here.py").write_text(
        "def echo(prompt, random):\n"
        "    return prompt.split('user\\n')[1].split('<')[0].upper() + str(random.randrange(10**9))\n"
    )
    engine = ScriptedEngine(ScriptedConfig(script="scripts_here:echo", slip=0.0), tmp_path)
    first = reply_of(engine, "hello", "a")
    assert first.startswith("HELLO")
    assert first == reply_of(engine, "hello", "a") != reply_of(engine, "hello", "b")


def test_a_script_that_raises_is_an_engine_failure(tmp_path):
    (tmp_path / "scripts_bad.py").write_text("def broken(prompt, random):\n    raise KeyError('x')\n")
    config = ScriptedConfig(script="scripts_bad:broken")
    with pytest.raises(EngineError, match=r"scripts_bad:broken failed: KeyError: 'x'"):
        reply_of(ScriptedEngine(config, tmp_path), "hello")


def test_a_missing_script_is_a_config_problem(tmp_path):
    (problem,) = ScriptedConfig(script="nowhere_at_all:f").problems(tmp_path)
    assert (problem.key, "nowhere_at_all" in problem.message) == ("script", True)


def test_the_fault_rate_is_respected(tmp_path):
    engine = ScriptedEngine(ScriptedConfig(fault_rate=0.3), tmp_path)
    failed = 0
    for seed in range(300):
        try:
            reply_of(engine, "hello", str(seed))
        except EngineError:
            failed += 1
    assert 60 < failed < 120


def test_tokens_carry_the_version_that_sampled_them(tmp_path):
    async def main():
        engine = ScriptedEngine(ScriptedConfig(replies=("x" * 40,), token_s=0.002, slip=0.0), tmp_path)
        stream = engine.generate([1], Sampling(max_tokens=64), seed="0")
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.01)
        await engine.pause()
        await engine.load_weights(None, 5)
        await engine.resume()
        assert (await first).version == 0
        assert (await anext(stream)).finish == "abort"

    asyncio.run(main())
