"""Sessions: tool calls, failures of engines, budgets and episodes."""

import asyncio
import json
import math

import pytest

from loopwright.core.outcome import Fault, Outcome
from loopwright.engines.base import BadSampling, Chunk, EngineError, Sampling
from loopwright.engines.tokenizer import ByteTokenizer
from loopwright.gateway.sessions.session import BudgetSpent, SessionLimits
from loopwright.gateway.sessions.template import ChatML
from tests.gateway.sessions.harness import END, TASK, TOOLS, PlannedEngine, check, chunk_of, run, session_of, user

# -- tool calls --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["{", "[1]", '{"name": 3}', '{"name": "f", "arguments": [1]}', "[" * 5000, '{"arguments": {}}',
     '{"arguments": {"x": 1e999}, "name": "f"}', '{"arguments": ' + '{"x": ' * 5000],
)  # fmt: skip
def test_an_unreadable_call_is_named_and_stays_text(text):
    parsed = ChatML(ByteTokenizer()).parser(call_id="c")
    parsed.parse(ByteTokenizer().encode(f'ok <tool_call>{text}</tool_call> <tool_call>{{"name": "g"}}</tool_call>'))
    assert parsed.malformed == (text.strip(),)
    assert parsed.message["content"] == f"ok <tool_call>{text}</tool_call>"
    assert [call["function"]["name"] for call in parsed.message["tool_calls"]] == ["g"]


@pytest.mark.parametrize(
    "arguments",
    ['{"x": 1e999}', '{"x": "\\ud800"}', '{"x": tru}', "{'x': 1}", '{"x": [1, 2}', '{"a": 1,}', '{"a": "b\n"}',
     '{"x": ' * 200 + "1" + "}" * 200],
)  # fmt: skip
def test_t17_arguments_that_nobody_can_read_stay_text(arguments):
    broken = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    parsed = ChatML(ByteTokenizer()).parser(call_id="c")
    parsed.parse(ByteTokenizer().encode(f'ok {broken} <tool_call>{{"name": "g"}}</tool_call>'))
    assert [call["function"]["name"] for call in parsed.message["tool_calls"]] == ["g"]
    assert parsed.message["content"] == f"ok {broken}"
    (malformed,) = parsed.malformed
    assert malformed.startswith('{"name": "f", "arguments": {')


def test_a_call_keeps_numbers_of_any_length():
    text = '<tool_call>{"name": "f", "arguments": {"x": 123456789012345678901234567890, "y": 18446744073709551615}}'

    async def scenario(session, engine):
        turn = await session.turn([user("a")], TOOLS[1])
        assert json.loads(turn.calls[0]["function"]["arguments"])["x"] == 123456789012345678901234567890
        await session.turn([user("a"), turn.message, {"role": "tool", "content": "1"}], TOOLS[1])
        assert len(list(session.episode(TASK).branches())) == 1

    run(scenario, text, "done")


def test_a_history_of_another_model_is_rendered():
    async def scenario(session, engine):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "not json"}}
        await session.turn([user("a"), {"role": "assistant", "content": None, "tool_calls": [call]}])
        assert '{"name": "f", "arguments": "not json"}' in engine.tokenizer.decode(engine.calls[0][0])

    run(scenario, "1")


# -- what engines do ---------------------------------------------------------------------------------------------


def test_t06_a_pause_in_mid_turn_starts_a_span_of_the_next_version():
    async def scenario(session, engine):
        turn = await session.turn([user("a")], sampling=Sampling(max_tokens=9))
        assert (turn.text, turn.finish) == ("abcd", "stop")
        (ids, sampled), (more, _) = engine.calls
        assert more == (*ids, *sampled), "it continues exactly"
        node = session.episode(TASK).nodes[turn.node]
        opening = len(node.ids) - 5
        assert [(s.start - opening, s.stop - opening, s.version) for s in node.spans] == [(0, 2, 0), (2, 5, 1)]

    run(
        scenario,
        [chunk_of(97), chunk_of(98), chunk_of(finish="abort")],
        [chunk_of(99, 100, END, version=1, finish="stop")],
    )


def test_a_pause_before_the_first_token_and_at_the_last_one():
    async def scenario(session, engine):
        turn = await session.turn([user("a")], sampling=Sampling(max_tokens=2))
        assert (turn.sampled_tokens, turn.finish) == (2, "length")

    run(scenario, [chunk_of(finish="abort")], [chunk_of(97, 98, version=1), chunk_of(version=1, finish="abort")])


@pytest.mark.parametrize("chunks", [[chunk_of(97)], []], ids=["with tokens", "with nothing"])
def test_an_engine_without_a_finish_reason_has_failed(chunks):
    async def scenario(session, engine):
        with pytest.raises(EngineError, match="without a finish reason"):
            await session.turn([user("a")])

    run(scenario, chunks)


@pytest.mark.parametrize(
    ("chunk", "words"),
    [(Chunk((1, 2), (-0.5,), 0), "2 ids but 1 logprobs"), (Chunk((1,), (None,), 0), "None as a logprob"),
     (Chunk((1,), (math.nan,), 0), "nan as a logprob"), (Chunk((1,), (-math.inf,), 0), "inf as a logprob")],
)  # fmt: skip
def test_a_missing_logprob_is_an_engine_failure_and_closes_the_stream(chunk, words):
    async def scenario(session, engine):
        with pytest.raises(EngineError, match=words):
            await session.turn([user("a")])
        assert engine.closed == 1
        engine.calls[-1][1][:] = [97]  # the tokens before it
        node = session.episode(TASK).nodes[-1]
        assert (node.finish, node.sampled, node.message["content"]) == ("cut", 1, "a")

    run(scenario, [chunk_of(97), chunk])


def test_tokens_before_an_engine_failure_are_kept_as_a_dead_branch():
    async def scenario(session, engine):
        with pytest.raises(EngineError, match="gone"):
            await session.turn([user("a")])
        turn = await session.turn([user("a")])
        episode = session.episode(TASK)
        assert [node.finish for node in episode.nodes[2:]] == ["cut", "stop"]
        assert episode.path(turn.node) == (1, 3)
        assert (len(episode.rows()), len(episode.rows(with_abandoned=True))) == (1, 2)

    run(scenario, [chunk_of(97, 98), EngineError("gone")], "fine")


def test_t02_refused_sampling_settings_break_nothing():
    async def scenario(session, engine):
        with pytest.raises(BadSampling, match="no true logprobs"):
            await session.turn([user("a")], sampling=Sampling(temperature=0.2))
        await session.turn([user("a")])
        assert [verdict.kind for verdict in session.verdicts.values()] == ["exact", "exact"]

    run(scenario, [BadSampling("no true logprobs")], "fine")


def test_a_cancelled_turn_is_kept_and_its_stream_is_closed():
    async def scenario(session, engine):
        turn = asyncio.ensure_future(session.turn([user("a")]))
        await asyncio.sleep(0.01)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        assert engine.closed == 1
        assert session.interrupted is not None
        assert session.interrupted[0] == "generate"
        node = session.episode(TASK).nodes[-1]
        assert (node.finish, node.sampled) == ("cut", 2)

    run(scenario, [chunk_of(97, 98), ...])


def test_an_unfinished_turn_is_in_the_episode_with_its_tokens_so_far():
    async def scenario(session, engine):
        turn = asyncio.ensure_future(session.turn([user("a")]))
        await asyncio.sleep(0.01)
        episode = session.episode(TASK)
        check(episode, engine)
        assert (episode.nodes[-1].finish, episode.nodes[-1].message["content"]) == ("cut", "ab")
        turn.cancel()

    run(scenario, [chunk_of(97, 98), ...])


def test_a_turn_that_finishes_later_keeps_its_place():
    async def scenario(session, engine):
        gate = engine.plans[0][0]
        slow = asyncio.ensure_future(session.turn([user("a")]))
        await asyncio.sleep(0)
        quick = await session.turn([user("a")])
        gate.set()
        assert ((await slow).node, quick.node) == (2, 3)
        assert quick.text == "quick"

    async def main():
        engine = PlannedEngine([asyncio.Event(), chunk_of(97, END, finish="stop")], "quick")
        session = session_of(engine)
        await scenario(session, engine)
        check(session.episode(TASK), engine)

    asyncio.run(main())


# -- budgets -----------------------------------------------------------------------------------------------------


def test_turns_are_counted():
    async def scenario(session, engine):
        await session.turn([user("a")])
        with pytest.raises(BudgetSpent, match="all 1 turns are used up"):
            await session.turn([user("b")])

    run(scenario, "x", limits=SessionLimits(turns=1))


def test_tokens_are_counted_over_all_turns():
    async def scenario(session, engine):
        first = await session.turn([user("a")])
        second = await session.turn([user("b")])
        assert (first.sampled_tokens, second.sampled_tokens, second.finish) == (3, 2, "length")
        with pytest.raises(BudgetSpent, match="all 5 tokens are used up"):
            await session.turn([user("c")])

    run(scenario, "xy", "longer", limits=SessionLimits(tokens=5))


def test_parallel_turns_do_not_share_their_token_budget():
    async def scenario(session, engine):
        turns = [session.turn([user(text)], sampling=Sampling(max_tokens=4)) for text in "abc"]
        done = await asyncio.gather(*turns, return_exceptions=True)
        assert [getattr(turn, "sampled_tokens", None) for turn in done] == [4, 2, None]
        assert isinstance(done[2], BudgetSpent)

    run(scenario, "abcdefg", "abcdefg", limits=SessionLimits(tokens=6))


# -- episodes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "fault"),
    [
        (Outcome.OK, None),
        (Outcome.TRUNCATED, Fault.POLICY),
        (Outcome.LOST, Fault.INFRA),
        (Outcome.CRASHED, Fault.WORKLOAD),
    ],
)
def test_an_episode_has_the_fault_of_its_outcome(outcome, fault):
    async def scenario(session, engine):
        episode = session.episode(TASK, outcome, reason="half \ud800 a pair")
        assert (episode.outcome, episode.fault, episode.reason) == (outcome, fault, "half ? a pair")
        assert episode.to_bytes()
        assert not (episode.trainable)
        assert not (episode.in_baseline)

    run(scenario)


def test_phases_are_timed():
    async def scenario(session, engine):
        await session.turn([user("a")])
        with session.phase("tools"):
            await asyncio.sleep(0.01)
        phases = session.episode(TASK).attempts[0].phases_s
        assert phases["tools"] > 0.005
        assert phases["generate"] >= 0

    run(scenario, "x")
