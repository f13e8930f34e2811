"""Penalties and biases: in the sampler, in the engine in this process, and on the wire."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from loopwright.engines.base import BadSampling, Guide, Sampling
from loopwright.engines.fleet import Fleet, FleetSettings
from loopwright.engines.http.llamacpp import _body, _steer
from loopwright.engines.http.vllm import _steering
from loopwright.engines.inprocess.engine import TransformersConfig, TransformersEngine
from loopwright.engines.inprocess.sampler import Draw, sample, steer
from loopwright.engines.scripted import ScriptedConfig, ScriptedEngine


def draw(given, sampled=0, **sampling):
    return Draw(Sampling(**sampling), "s", len(given), np.asarray(given, dtype=np.int64), sampled)


def test_bias_and_penalties_change_logits_as_in_vllm():
    logits = torch.tensor([[2.0, -1.0, 0.5, 0.0], [1.0, 1.0, 1.0, 1.0]])
    plain = Draw(Sampling(), "s", 0)
    penalties = draw([0, 1, 1, 2, 2], 3, frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=2.0)
    steered = steer(logits, [penalties, plain])
    # Repetition counts prompt and turn; frequency and presence count the turn [1, 2, 2] alone.
    assert steered[0].tolist() == pytest.approx([1.0, -2.0 - 0.75, 0.25 - 1.25, 0.0])
    assert steered[1].tolist() == [1.0] * 4
    assert logits[0, 0] == 2.0, "the logits themselves stay"
    biased = steer(logits, [draw([3], logit_bias={"3": 4.5}), plain])
    assert biased[0].tolist() == [2.0, -1.0, 0.5, 4.5]


def test_logprobs_are_those_of_the_steered_distribution():
    logits = torch.zeros(1, 4)
    row = draw([3], logit_bias={"0": -100, "1": -100, "2": -100})
    ((token, logprob),) = sample(steer(logits, [row]), [row])
    assert (token, logprob) == (3, pytest.approx(0.0, abs=1e-6))


async def generate(engine, sampling, ids=(1, 2, 3), *, cut=None):
    """The tokens of a stream; with `cut`, interrupted after so many and continued."""
    sampled, rest = [], sampling
    async for chunk in engine.generate([*ids], rest, seed="s"):
        sampled += chunk.ids
        if len(sampled) == cut:
            break
    if cut is not None:
        async for chunk in engine.generate([*ids, *sampled], sampling.after(cut), seed="s"):
            sampled += chunk.ids
    return sampled


def test_the_engine_applies_them_also_after_an_interruption():
    async def main():
        engine = TransformersEngine(TransformersConfig(model="tiny"), Path())
        try:
            plain = await generate(engine, Sampling(temperature=0, max_tokens=12))
            banned = {str(plain[0]): -100}
            assert plain[0] not in await generate(engine, Sampling(temperature=0, max_tokens=12, logit_bias=banned))
            penalised = Sampling(temperature=0, max_tokens=12, frequency_penalty=2, presence_penalty=2)
            whole = await generate(engine, penalised)
            assert whole != plain
            assert await generate(engine, penalised, cut=5) == whole
            with pytest.raises(ValueError, match="not a token"):
                await generate(engine, Sampling(logit_bias={"100000": 1}))
        finally:
            await engine.close()

    asyncio.run(main())


def test_an_engine_refuses_what_it_cannot_apply_by_name():
    engine = ScriptedEngine(ScriptedConfig(replies=["a"]), Path())
    engine.check_sampling(Sampling(temperature=0.5, repetition_penalty=1.0))
    guide = Guide(kind="json", value="{}", source="guided_json")
    for sampling, name in ((Sampling(presence_penalty=1), "presence_penalty"), (Sampling(guide=guide), "guided_json")):
        with pytest.raises(BadSampling, match=name) as refused:
            engine.check_sampling(sampling)
        assert refused.value.param == name


def test_a_fleet_applies_what_all_members_apply():
    class Able(ScriptedEngine):
        steering = frozenset({"logit_bias", "guide.json"})

    async def main():
        fleet = Fleet(FleetSettings(type="fleet"), Path())
        assert "logit_bias" in fleet.steering, "nobody is there yet to refuse it"
        fleet.add("a", Able(ScriptedConfig(replies=["a"]), Path()))
        fleet.for_session("s").check_sampling(Sampling(logit_bias={"1": 1}))
        fleet.add("b", ScriptedEngine(ScriptedConfig(replies=["a"]), Path()))
        with pytest.raises(BadSampling, match="logit_bias"):
            fleet.for_session("s").check_sampling(Sampling(logit_bias={"1": 1}))
        await fleet.close()

    asyncio.run(main())


def test_the_fields_of_the_servers():
    sampling = Sampling(logit_bias={"7": 1.5}, repetition_penalty=1.1, frequency_penalty=0.5, presence_penalty=0.25)
    choice = Sampling(guide=Guide(kind="choice", value='["a\\"b", "c"]'))
    schema = Sampling(guide=Guide(kind="json", value='{"type": "object"}'))
    assert _steering(sampling) == {"logit_bias": {"7": 1.5}}
    assert _steering(schema) == {"structured_outputs": {"json": {"type": "object"}}}
    assert _steering(choice) == {"structured_outputs": {"choice": ['a"b', "c"]}}
    body = _body([1], 1, sampling, 0)
    assert [body[name] for name in ("repeat_penalty", "frequency_penalty", "presence_penalty")] == [1.1, 0.5, 0.25]
    assert (body["logit_bias"], body["repeat_last_n"]) == (((7, 1.5),), 2)
    assert _body([1], 1, schema, 0)["json_schema"] == {"type": "object"}
    assert _body([1], 1, choice, 0)["grammar"] == 'root ::= "a\\"b" | "c"'
    assert "grammar" not in _body([1], 1, Sampling(), 0)
    # Where llama.cpp reports no logprob, it is computed from the model's own.
    steered = _steer({5: -0.1, 7: -3.0, 9: -4.0}, [5, 5], sampling)
    assert list(steered) == [5, 7, 9]
    assert list(steered.values()) == pytest.approx([-0.1 - 1.25, -1.5, -4.0])


def test_sampling_survives_the_store_and_the_relay():
    sampling = Sampling(logit_bias={"7": 1.5}, guide=Guide(kind="regex", value="a+"), presence_penalty=1)
    assert Sampling.model_validate_json(sampling.model_dump_json()) == sampling
    assert Sampling.model_validate_json(sampling.model_dump_json(exclude_defaults=True)) == sampling
    assert hash(sampling) == hash(sampling.model_copy())
