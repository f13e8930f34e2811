"""Several engines as one: sessions keep to theirs, and no failure of an engine is a failure of a stream."""

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
    def make_engine(self, home, *, slow=False):
        replies = ("one two three four five six seven eight nine ten", "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16")
        each = ScriptedConfig(replies=replies, slip=0.1, token_s=0.005 if slow else 0.0)
        return Fleet(FleetConfig(engines=(each, each, each)), home)


class Counting(Engine):
    """Counts on from its last id, a token per chunk; fails or freezes where it is told to."""

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
    """A fleet of engines by the names a, b, c …"""
    fleet = Fleet(FleetSettings(type="any", **{**QUICK, **settings}), Path())
    for name, engine in zip("abcdefghij", members, strict=False):
        fleet.add(name, engine)
    return fleet


async def said(engine, first=0, most=10, seed="s"):
    stream = engine.generate([first], Sampling(max_tokens=most), seed=seed)
    return [chunk async for chunk in stream]


def key_of(first, *others):
    """A session that wants the first of these engines most."""
    names = (first, *others)
    members = [FleetMember(name, None) for name in names]
    return next(k for k in map(str, range(99)) if max(members, key=lambda m: m.weight(k)).name == first)


def ids_of(chunks):
    return [token for chunk in chunks for token in chunk.ids]


def run(story):
    return asyncio.run(asyncio.wait_for(story(), 30))


# -- placing -------------------------------------------------------------------------------------------------------


async def homes(fleet, keys):
    """The engine that each session's turn goes to, a turn at a time."""
    found = {}
    for key in keys:
        before = {name: len(member.engine.calls) for name, member in fleet._members.items()}
        await said(fleet.for_session(key), most=1)
        (found[key],) = [n for n, m in fleet._members.items() if len(m.engine.calls) > before[n]]
    return found


def test_a_session_keeps_to_its_engine_and_churn_moves_as_few_as_possible():
    async def story():
        keys = [f"session-{n}" for n in range(300)]
        fleet = fleet_of(*(Counting() for _ in range(4)))
        before = await homes(fleet, keys)
        assert before == await homes(fleet, keys), "the same again"
        assert min(Counter(before.values()).values()) > 300 / 4 / 2, "and all of them are used"
        joined = fleet.add("e", Counting())
        after = await homes(fleet, keys)
        moved = {key for key in keys if before[key] != after[key]}
        assert {after[key] for key in moved} == {"e"}, "only to the new one"
        assert 300 / 5 / 2 < len(moved) < 300 / 5 * 2
        fleet._leave(joined, "it goes again")
        assert await homes(fleet, keys) == before
        await fleet.close()

    run(story)


def test_a_busy_engine_gives_sessions_away_and_streams_without_one_go_where_least_is_done():
    async def story():
        engines = [Counting() for _ in range(4)]
        for engine in engines:
            engine.freezes_at = 2
        fleet = fleet_of(*engines, check_s=60)
        tasks = [asyncio.create_task(said(fleet.for_session("one"))) for _ in range(8)]
        await asyncio.sleep(0.05)
        running = [member.running for member in fleet._members.values()]
        assert sum(running) == 8
        assert max(running) <= 3, "a quarter more than the average, rounded up"
        tasks += [asyncio.create_task(said(fleet)) for _ in range(4)]
        await asyncio.sleep(0.05)
        assert [member.running for member in fleet._members.values()] == [3] * 4
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [member.running for member in fleet._members.values()] == [0] * 4
        await fleet.close()

    run(story)


# -- failures ------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 21), max_size=6), st.integers(1, 20))
def test_whatever_fails_where_a_stream_is_what_it_would_have_been(fails, most):
    """Each token once and in order, with its own logprob, a finish at the end, and the budget kept."""

    async def story():
        engines = [Counting() for _ in range(len(fails) + 1)]
        for engine, at in zip(engines, fails, strict=False):
            engine.fails_at = at
        fleet = fleet_of(*engines, tries=len(fails) + 1, rest_s=3600)
        chunks = await said(fleet.for_session("x"), most=most)
        assert ids_of(chunks) == list(range(1, most + 1))
        assert [p for c in chunks for p in c.logprobs] == [-1.0 / token for token in range(1, most + 1)]
        assert [c.finish for c in chunks][-1] == "length"
        assert not any(c.finish for c in chunks[:-1])
        assert {seed for e in engines for _, _, seed in e.calls} == {"s"}
        await fleet.close()

    simulate(story())


def test_an_engine_that_failed_is_left_alone_and_comes_back():
    async def story():
        ill, well = Counting(), Counting()
        fleet = fleet_of(ill, well, rest_s=10.0, check_s=1000)
        key = key_of("a", "b")
        seat = fleet.for_session(key)
        ill.fails_at, before = 4, len(ill.calls)
        assert ids_of(await said(seat)) == list(range(1, 11))
        assert well.calls[-1][0] == (0, 1, 2, 3)
        assert well.calls[-1][1].max_tokens == 7
        assert fleet.describe()[0]["state"] == "backing off (out of memory)"
        await said(seat)
        assert len(ill.calls) == before + 1
        ill.fails_at = None
        await asyncio.sleep(10.1)
        await said(seat)
        assert len(ill.calls) == before + 2
        assert fleet.describe()[0]["state"] == "serving"
        await fleet.close()

    simulate(story())


def test_rests_grow_as_failures_go_on():
    async def story():
        ill = Counting()
        fleet, clock = fleet_of(ill, rest_s=1.0, tries=5, wait_s=1000, check_s=10_000), asyncio.get_running_loop().time
        ill.fails_at, begun = 1, clock()
        with pytest.raises(EngineError, match="out of memory"):
            await said(fleet)
        assert clock() - begun == pytest.approx(1 + 2 + 4 + 8, abs=0.1)
        assert len(ill.calls) == 5
        await fleet.close()

    simulate(story())


def test_what_is_the_request_s_own_fault_is_not_the_engine_s():
    class Full(Counting):
        async def generate(self, ids, sampling, *, seed):
            raise ContextFull(5, len(ids))
            yield

    class Picky(Counting):
        async def generate(self, ids, sampling, *, seed):
            raise BadSampling("no top-p here")
            yield

    async def story():
        fleet = fleet_of(Full())
        with pytest.raises(ContextFull):
            await said(fleet)
        assert fleet.describe()[0]["state"] == "serving"
        picky = fleet_of(Picky())
        with pytest.raises(BadSampling):
            await said(picky)
        assert picky.describe()[0]["state"] == "serving"
        await picky.close()
        first = Counting()
        first.fails_at = 3
        fleet = fleet_of(first, Full())
        chunks = await said(fleet.for_session(key_of("a", "b")))
        assert (ids_of(chunks), chunks[-1].finish) == ([1, 2], "length"), "elsewhere there is no room to go on"
        await fleet.close()

    run(story)


def test_a_frozen_engine_loses_its_streams():
    async def story():
        frozen, well = Counting(), Counting()
        fleet = fleet_of(frozen, well)
        key = key_of("a", "b")
        frozen.freezes_at = 5
        stream = asyncio.create_task(said(fleet.for_session(key)))
        await asyncio.sleep(0.3)
        assert not stream.done(), "an engine that is well may take its time"
        frozen.ill = True
        assert ids_of(await stream) == list(range(1, 11))
        assert well.calls[-1][0] == (0, 1, 2, 3, 4)
        await fleet.close()

    run(story)


def test_a_fleet_is_well_as_long_as_one_of_its_engines_is():
    class Silent(Counting):
        async def check(self):
            await asyncio.sleep(3600)

    async def story():
        ill, well = Counting(), Counting()
        ill.ill = True
        await fleet_of(ill, well, Silent()).check()
        await fleet_of().check()  # one that engines are yet to come to
        well.ill = True
        fleet = fleet_of(ill, well)
        with pytest.raises(EngineError, match="a: not well; b: not well"):
            await fleet.check()
        assert [each["state"] for each in fleet.describe()] == ["serving"] * 2, "to ask changes nothing"

    run(story)


def test_while_there_is_none_requests_wait_and_then_fail_with_the_reason():
    async def story():
        fleet = fleet_of(wait_s=100.0, check_s=1000)
        waiting = asyncio.create_task(said(fleet))
        await asyncio.sleep(99)
        member = fleet.add("a", Counting())
        assert ids_of(await waiting) == list(range(1, 11))
        member.leaving = True
        with pytest.raises(EngineError, match="no engine could serve for 100 s: a is leaving"):
            await said(fleet)
        await fleet.close()

    simulate(story())


@pytest.mark.parametrize("error", [EngineAway, EngineGone])
def test_an_engine_that_is_away_has_failed_nothing_and_is_waited_for(error):
    class Away(Counting):
        away = 7  # more than may fail a request

        async def generate(self, ids, sampling, *, seed):
            self.away -= 1
            if self.away >= 0:
                raise error("nobody is there")
            async for chunk in super().generate(ids, sampling, seed=seed):
                yield chunk

    async def story():
        engine = Away()
        assert ids_of(await said(fleet_of(engine), most=3)) == [1, 2, 3]
        engine.away = 10**6
        with pytest.raises(EngineError, match="nobody is there"):
            await said(fleet_of(engine, wait_s=0.1))

    run(story)


def test_closing_a_stream_frees_its_engine():
    async def story():
        engine = Counting()
        engine.freezes_at = 3
        fleet = fleet_of(engine)
        async with aclosing(fleet.generate([0], Sampling(), seed="")) as stream:
            assert (await anext(stream)).ids == (1,)
            assert fleet.describe()[0]["running"] == 1
        assert fleet.describe()[0]["running"] == 0
        await fleet.close()

    run(story)


# -- versions ------------------------------------------------------------------------------------------------------


def test_all_engines_get_the_weights_and_one_that_cannot_is_left_out_until_it_can():
    async def story():
        good, bad = Counting(), Counting()
        fleet = fleet_of(good, bad)
        bad.stubborn = True
        await fleet.pause()
        await fleet.load_weights("w3", 3)
        await fleet.resume()
        assert fleet.version == 3
        assert fleet.describe()[1]["state"] == "excluded: it has version 0, not 3 (no such file)"
        for n in range(8):
            assert {c.version for c in await said(fleet.for_session(str(n)))} == {3}
        assert not bad.calls
        bad.stubborn = False
        async with asyncio.timeout(5):
            while bad.version != 3:
                await asyncio.sleep(0.01)
        assert bad.source == "w3"
        await asyncio.gather(*(said(fleet) for _ in range(8)))
        assert bad.calls
        await fleet.close()

    run(story)


def test_an_engine_that_comes_later_gets_the_weights_of_the_beginning_too():
    """Its server may hold what another run has taught it, under a version that is 0 for whoever has just connected."""

    async def story():
        fleet = fleet_of(Counting())
        await fleet.load_weights("w0", 0)
        late = fleet.add("late", Counting()).engine
        await asyncio.gather(*(said(fleet.for_session(str(n))) for n in range(8)))
        assert not late.calls
        async with asyncio.timeout(5):
            while late.source != "w0":
                await asyncio.sleep(0.01)
        assert late.version == 0
        await fleet.close()

    run(story)


def test_weights_that_no_engine_takes_change_nothing():
    async def story():
        engines = [Counting(), Counting()]
        fleet = fleet_of(*engines)
        for engine in engines:
            engine.stubborn = True
        with pytest.raises(EngineError, match="a: no such file; b: no such file"):
            await fleet.load_weights("w", 1)
        assert fleet.version == 0
        assert ids_of(await said(fleet))
        await fleet.close()

    run(story)


def test_a_stream_goes_on_under_the_fleet_s_version_never_under_an_older_one():
    async def story():
        old, new = Counting(), Counting(version=2)
        fleet = fleet_of(old, new)
        assert fleet.version == 2, "who joins with more than we know of was updated before we began"
        new.fails_at = 3
        with pytest.raises(EngineError):
            await said(fleet, first=2)
        assert not old.calls
        await fleet.close()

    run(story)


# -- what it is made of --------------------------------------------------------------------------------------------


def test_engines_of_different_tokens_are_refused():
    class Other(ByteTokenizer):
        specials: ClassVar = {"<|im_start|>": 256, "<|eot|>": 257}

    other = Counting()
    other.tokenizer = Other()
    with pytest.raises(EngineError, match="its tokenizer differs"):
        fleet_of(Counting(), other)
    assert fingerprint(ByteTokenizer()) == fingerprint(ByteTokenizer())


def test_problems_say_which_engine_has_them(tmp_path):
    config = FleetConfig(engines=({"type": "scripted"}, {"type": "scripted", "script": "nowhere:f"}))
    (problem,) = config.problems(tmp_path)
    assert problem.key == "engines[1].script"
    with pytest.raises(ValueError, match="Did you mean 'scripted'"):
        FleetConfig(engines=({"type": "scriptd"},))
