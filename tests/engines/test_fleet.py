"""Several engines as one: sessions are sticky, and a failing engine does not fail a stream."""

import asyncio
from collections import Counter
from contextlib import aclosing
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopwright.engines.base import (
    BadSampling,
    Chunk,
    ContextFull,
    Engine,
    EngineAway,
    EngineConfig,
    EngineError,
    Sampling,
)
from loopwright.engines.fleet import Fleet, FleetConfig, FleetSettings
from loopwright.engines.fleet_member import FleetMember
from loopwright.engines.http.client import EngineGone
from loopwright.engines.scripted import ScriptedConfig
from loopwright.engines.tokenizer import ByteTokenizer, fingerprint
from loopwright.testing import EngineContract, simulate

BYTES = ByteTokenizer()
QUICK = {"rest_s": 0.02, "check_s": 0.05, "wait_s": 5.0}


class TestContract(EngineContract):
    def make_engine(self, directory, *, slow=False):
        replies = ("one two three four five six seven eight nine ten", "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16")
        each = ScriptedConfig(replies=replies, slip=0.1, token_s=0.005 if slow else 0.0)
        return Fleet(FleetConfig(engines=(each, each, each)), directory)


class Counting(Engine):
    """Counts up from the last id, one token per chunk; fails at `fails_at` and freezes at `freezes_at`."""

    def __init__(self, version=0):
        super().__init__(EngineConfig(type="counting"), Path())
        self.tokenizer, self.version = BYTES, version
        self.calls, self.fails_at, self.freezes_at = [], None, None
        self.ill = self.stubborn = False
        self.source = None

    async def generate(self, ids, sampling, *, seed):
        self.calls.append((tuple(ids), sampling, seed))
        for number in range(1, sampling.max_tokens + 1):
            await asyncio.sleep(0)
            token = ids[-1] + number
            if token == self.fails_at:
                raise EngineError("out of memory")
            if token == self.freezes_at:
                await asyncio.sleep(3600)
            finish = "length" if number == sampling.max_tokens else None
            yield Chunk((token,), (-1.0 / token,), self.version, finish)

    async def check(self):
        if self.ill:
            raise EngineError("not well")

    async def pause(self): ...

    async def resume(self): ...

    async def load_weights(self, source, version):
        if self.stubborn:
            raise EngineError("no such file")
        self.source, self.version = source, version


def fleet_of(*members, **settings):
    """A fleet of engines named a, b, c …"""
    fleet = Fleet(FleetSettings(type="any", **{**QUICK, **settings}), Path())
    for name, engine in zip("abcdefghij", members, strict=False):
        fleet.add(name, engine)
    return fleet


async def chunks_from(engine, first=0, most=10, seed="s"):
    stream = engine.generate([first], Sampling(max_tokens=most), seed=seed)
    return [chunk async for chunk in stream]


def key_of(first, *others):
    """A session key that prefers the first of these engines."""
    names = (first, *others)
    members = [FleetMember(name, None) for name in names]
    return next(k for k in map(str, range(99)) if max(members, key=lambda m: m.weight(k)).name == first)


def ids_of(chunks):
    return [token for chunk in chunks for token in chunk.ids]


def run(body):
    return asyncio.run(asyncio.wait_for(body(), 30))


# -- placing -------------------------------------------------------------------------------------------------------


async def engines_of(fleet, keys):
    """The engine that serves each session, asked one turn at a time."""
    homes_by_key = {}
    for key in keys:
        before = {name: len(member.engine.calls) for name, member in fleet._members.items()}
        await chunks_from(fleet.for_session(key), most=1)
        (homes_by_key[key],) = [n for n, m in fleet._members.items() if len(m.engine.calls) > before[n]]
    return homes_by_key


def test_sessions_are_sticky_and_churn_moves_as_few_as_possible():
    async def body():
        keys = [f"session-{n}" for n in range(300)]
        fleet = fleet_of(*(Counting() for _ in range(4)))
        before = await engines_of(fleet, keys)
        assert before == await engines_of(fleet, keys), "sessions are sticky"
        assert min(Counter(before.values()).values()) > 300 / 4 / 2, "all engines are used"
        joined = fleet.add("e", Counting())
        after = await engines_of(fleet, keys)
        moved = {key for key in keys if before[key] != after[key]}
        assert {after[key] for key in moved} == {"e"}, "sessions move only to the new engine"
        assert 300 / 5 / 2 < len(moved) < 300 / 5 * 2
        fleet._leave(joined, "it goes again")
        assert await engines_of(fleet, keys) == before
        await fleet.close()

    run(body)


def test_a_busy_engine_sheds_sessions_and_other_streams_go_to_the_least_busy():
    async def body():
        engines = [Counting() for _ in range(4)]
        for engine in engines:
            engine.freezes_at = 2
        fleet = fleet_of(*engines, check_s=60)
        tasks = [asyncio.create_task(chunks_from(fleet.for_session("one"))) for _ in range(8)]
        await asyncio.sleep(0.05)
        running = [member.running for member in fleet._members.values()]
        assert sum(running) == 8
        assert max(running) <= 3, "a quarter more than the average, rounded up"
        tasks += [asyncio.create_task(chunks_from(fleet)) for _ in range(4)]
        await asyncio.sleep(0.05)
        assert [member.running for member in fleet._members.values()] == [3] * 4
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [member.running for member in fleet._members.values()] == [0] * 4
        await fleet.close()

    run(body)


# -- failures ------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 21), max_size=6), st.integers(1, 20))
def test_engine_failures_do_not_change_a_stream(fails, most):
    """Each token arrives once, in order, with its logprob; the stream ends with a finish reason in its budget."""

    async def body():
        engines = [Counting() for _ in range(len(fails) + 1)]
        for engine, at in zip(engines, fails, strict=False):
            engine.fails_at = at
        fleet = fleet_of(*engines, tries=len(fails) + 1, rest_s=3600)
        chunks = await chunks_from(fleet.for_session("x"), most=most)
        assert ids_of(chunks) == list(range(1, most + 1))
        assert [p for c in chunks for p in c.logprobs] == [-1.0 / token for token in range(1, most + 1)]
        assert [c.finish for c in chunks][-1] == "length"
        assert not any(c.finish for c in chunks[:-1])
        assert {seed for e in engines for _, _, seed in e.calls} == {"s"}
        await fleet.close()

    simulate(body())


def test_a_failed_engine_backs_off_and_returns():
    async def body():
        ill, well = Counting(), Counting()
        fleet = fleet_of(ill, well, rest_s=10.0, check_s=1000)
        key = key_of("a", "b")
        seat = fleet.for_session(key)
        ill.fails_at, before = 4, len(ill.calls)
        assert ids_of(await chunks_from(seat)) == list(range(1, 11))
        assert well.calls[-1][0] == (0, 1, 2, 3)
        assert well.calls[-1][1].max_tokens == 7
        assert fleet.describe()[0]["state"] == "backing off (out of memory)"
        await chunks_from(seat)
        assert len(ill.calls) == before + 1
        ill.fails_at = None
        await asyncio.sleep(10.1)
        await chunks_from(seat)
        assert len(ill.calls) == before + 2
        assert fleet.describe()[0]["state"] == "serving"
        await fleet.close()

    simulate(body())


def test_backoff_grows_with_repeated_failures():
    async def body():
        ill = Counting()
        fleet, clock = fleet_of(ill, rest_s=1.0, tries=5, wait_s=1000, check_s=10_000), asyncio.get_running_loop().time
        ill.fails_at, start = 1, clock()
        with pytest.raises(EngineError, match="out of memory"):
            await chunks_from(fleet)
        assert clock() - start == pytest.approx(1 + 2 + 4 + 8, abs=0.1)
        assert len(ill.calls) == 5
        await fleet.close()

    simulate(body())


def test_a_bad_request_is_not_the_engines_fault():
    class Full(Counting):
        async def generate(self, ids, sampling, *, seed):
            raise ContextFull(5, len(ids))
            yield

    class Picky(Counting):
        async def generate(self, ids, sampling, *, seed):
            raise BadSampling("no top-p here")
            yield

    async def body():
        fleet = fleet_of(Full())
        with pytest.raises(ContextFull):
            await chunks_from(fleet)
        assert fleet.describe()[0]["state"] == "serving"
        picky = fleet_of(Picky())
        with pytest.raises(BadSampling):
            await chunks_from(picky)
        assert picky.describe()[0]["state"] == "serving"
        await picky.close()
        first = Counting()
        first.fails_at = 3
        fleet = fleet_of(first, Full())
        chunks = await chunks_from(fleet.for_session(key_of("a", "b")))
        assert (ids_of(chunks), chunks[-1].finish) == ([1, 2], "length"), "the other context is too small"
        await fleet.close()

    run(body)


def test_a_frozen_engine_loses_its_streams():
    async def body():
        frozen, well = Counting(), Counting()
        fleet = fleet_of(frozen, well)
        key = key_of("a", "b")
        frozen.freezes_at = 5
        stream = asyncio.create_task(chunks_from(fleet.for_session(key)))
        await asyncio.sleep(0.3)
        assert not stream.done(), "a healthy engine may be slow"
        frozen.ill = True
        assert ids_of(await stream) == list(range(1, 11))
        assert well.calls[-1][0] == (0, 1, 2, 3, 4)
        await fleet.close()

    run(body)


def test_a_fleet_is_healthy_while_one_engine_is():
    class Silent(Counting):
        async def check(self):
            await asyncio.sleep(3600)

    async def body():
        ill, well = Counting(), Counting()
        ill.ill = True
        await fleet_of(ill, well, Silent()).check()
        await fleet_of().check()  # a fleet that engines have yet to join
        well.ill = True
        fleet = fleet_of(ill, well)
        with pytest.raises(EngineError, match="a: not well; b: not well"):
            await fleet.check()
        assert [each["state"] for each in fleet.describe()] == ["serving"] * 2, "a check changes no state"

    run(body)


def test_without_engines_requests_wait_then_fail_with_the_reason():
    async def body():
        fleet = fleet_of(wait_s=100.0, check_s=1000)
        waiting = asyncio.create_task(chunks_from(fleet))
        await asyncio.sleep(99)
        member = fleet.add("a", Counting())
        assert ids_of(await waiting) == list(range(1, 11))
        member.leaving = True
        with pytest.raises(EngineError, match="no engine could serve for 100 s: a is leaving"):
            await chunks_from(fleet)
        await fleet.close()

    simulate(body())


@pytest.mark.parametrize("error", [EngineAway, EngineGone])
def test_an_absent_engine_is_awaited_and_does_not_count_as_failed(error):
    class Away(Counting):
        away = 7  # more failures than fail a request

        async def generate(self, ids, sampling, *, seed):
            self.away -= 1
            if self.away >= 0:
                raise error("nobody is there")
            async for chunk in super().generate(ids, sampling, seed=seed):
                yield chunk

    async def body():
        engine = Away()
        assert ids_of(await chunks_from(fleet_of(engine), most=3)) == [1, 2, 3]
        engine.away = 10**6
        with pytest.raises(EngineError, match="nobody is there"):
            await chunks_from(fleet_of(engine, wait_s=0.1))

    run(body)


def test_closing_a_stream_frees_its_engine():
    async def body():
        engine = Counting()
        engine.freezes_at = 3
        fleet = fleet_of(engine)
        async with aclosing(fleet.generate([0], Sampling(), seed="")) as stream:
            assert (await anext(stream)).ids == (1,)
            assert fleet.describe()[0]["running"] == 1
        assert fleet.describe()[0]["running"] == 0
        await fleet.close()

    run(body)


# -- versions ------------------------------------------------------------------------------------------------------


def test_an_engine_that_cannot_load_the_weights_is_excluded_until_it_can():
    async def body():
        good, bad = Counting(), Counting()
        fleet = fleet_of(good, bad)
        bad.stubborn = True
        await fleet.pause()
        await fleet.load_weights("w3", 3)
        await fleet.resume()
        assert fleet.version == 3
        assert fleet.describe()[1]["state"] == "excluded: it has version 0, not 3 (no such file)"
        for n in range(8):
            assert {c.version for c in await chunks_from(fleet.for_session(str(n)))} == {3}
        assert not bad.calls
        bad.stubborn = False
        async with asyncio.timeout(5):
            while bad.version != 3:
                await asyncio.sleep(0.01)
        assert bad.source == "w3"
        await asyncio.gather(*(chunks_from(fleet) for _ in range(8)))
        assert bad.calls
        await fleet.close()

    run(body)


def test_an_engine_that_joins_later_gets_version_0_too():
    """Its server may hold the weights of another run, which also look like version 0 to a new client."""

    async def body():
        fleet = fleet_of(Counting())
        await fleet.load_weights("w0", 0)
        late = fleet.add("late", Counting()).engine
        await asyncio.gather(*(chunks_from(fleet.for_session(str(n))) for n in range(8)))
        assert not late.calls
        async with asyncio.timeout(5):
            while late.source != "w0":
                await asyncio.sleep(0.01)
        assert late.version == 0
        await fleet.close()

    run(body)


def test_weights_that_no_engine_can_load_change_nothing():
    async def body():
        engines = [Counting(), Counting()]
        fleet = fleet_of(*engines)
        for engine in engines:
            engine.stubborn = True
        with pytest.raises(EngineError, match="a: no such file; b: no such file"):
            await fleet.load_weights("w", 1)
        assert fleet.version == 0
        assert ids_of(await chunks_from(fleet))
        await fleet.close()

    run(body)


def test_a_stream_never_continues_under_an_older_version():
    async def body():
        old, new = Counting(), Counting(version=2)
        fleet = fleet_of(old, new)
        assert fleet.version == 2, "a joining engine with a newer version was updated before the fleet started"
        new.fails_at = 3
        with pytest.raises(EngineError):
            await chunks_from(fleet, first=2)
        assert not old.calls
        await fleet.close()

    run(body)


# -- what it is made of --------------------------------------------------------------------------------------------


def test_engines_with_different_tokenizers_are_refused():
    class Other(ByteTokenizer):
        specials: ClassVar = {"<|im_start|>": 256, "<|eot|>": 257}

    other = Counting()
    other.tokenizer = Other()
    with pytest.raises(EngineError, match="its tokenizer differs"):
        fleet_of(Counting(), other)
    assert fingerprint(ByteTokenizer()) == fingerprint(ByteTokenizer())


def test_problems_name_the_engine(tmp_path):
    config = FleetConfig(engines=({"type": "scripted"}, {"type": "scripted", "script": "nowhere:f"}))
    (problem,) = config.problems(tmp_path)
    assert problem.key == "engines[1].script"
    with pytest.raises(ValueError, match="Did you mean 'scripted'"):
        FleetConfig(engines=({"type": "scriptd"},))
