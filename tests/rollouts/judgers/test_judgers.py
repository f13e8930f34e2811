"""Each judger's specifics: its inputs, valid verdicts, and refusals."""

import asyncio
import json
import math
import os
import sys
import threading
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopwright.core.trial import Reward
from loopwright.rollouts.judgers import build_judger, parse_judger
from loopwright.rollouts.judgers.base import JudgeFailed, Payload
from loopwright.rollouts.judgers.http import parse_score
from loopwright.rollouts.judgers.ranking import rank
from loopwright.rollouts.judgers.verdict_parsing import add_rewards, apply_weight, as_reward
from loopwright.testing.executors import alive, appears, written_pid
from loopwright.testing.judgers import episode, verdicts
from tests.rollouts.judge_servers import serving

FUNCTIONS = "tests.rollouts.judge_functions"
finite = st.floats(-1e6, 1e6)


def judge_all(table, directory=Path(), *episodes):
    async def main():
        judger = build_judger(parse_judger(table), directory)
        try:
            return await verdicts(judger, *(episodes or (episode(),)))
        finally:
            await judger.close()

    return asyncio.run(main())


def python(function, **settings):
    return {"type": "python", "function": f"{FUNCTIONS}:{function}", "retries": 0, **settings}


def command(script, **settings):
    return {"type": "command", "command": [sys.executable, "-IS", "-c", script], **settings}


# -- what may be returned ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True), Fraction(1)], ids=repr)
def test_numbers_of_any_type_are_rewards(value):
    assert as_reward(value, "mine") == Reward(1.0, {"mine": 1.0})


def test_parts_add_up_and_a_reward_is_unchanged():
    assert judge_all(python("parts")) == [Reward(0.5, {"right": 1.0, "short": -0.5})]
    assert judge_all(python("rewarded")) == [Reward(2.0, {"a": 3.0, "b": -1.0})]


@given(st.dictionaries(st.text("abc", min_size=1), st.tuples(finite, finite), min_size=1))
def test_a_weighted_sum_is_the_sum_of_its_parts(numbers):
    rewards = {name: apply_weight(as_reward(v, name), w, name) for name, (v, w) in numbers.items()}
    total = add_rewards(rewards, "composed")
    assert total.parts == {name: v if w == 1.0 else w * v for name, (v, w) in numbers.items()}
    assert total.value == math.fsum(total.parts.values())


def test_parts_of_parts_keep_both_names():
    table = {"type": "composed", "parts": [python("parts", name="form"), {"type": "length", "weight": -0.25}]}
    assert judge_all(table) == [Reward(0.25, {"form.right": 1.0, "form.short": -0.5, "length": -0.25})]


# -- the LLM's verdict ------------------------------------------------------------------------------------------


@given(
    st.floats(0, 10),
    st.sampled_from(['{{"score": {}}}', "Why not.\nScore: {}\n", "**Score:** {}", '```json\n{{"score": {}}}\n```']),
)
def test_scores_are_parsed(score, form):
    text = f"{score:.3f}"
    assert parse_score(form.format(text), 0, 10) == float(text)


@given(st.text(max_size=200))
def test_any_text_is_a_score_within_bounds_or_no_verdict(text):
    with suppress(JudgeFailed):
        assert 0 <= parse_score(text, 0, 10) <= 10


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ten",
        "I give it 7",
        "Score: 11",
        "Score: -1",
        "Score: 7/10",
        "Score: 1\nScore: 9",
        '{"score": "7"}',
        '{"score": true}',
        '{"score": NaN}',
        '{"score": 1e999}',
        '{"score": 1, "score": 9}',
        '{"verdict": 7}',
        "[7]",
        "7",
        '{"score": 7} Score: 8 or so',
    ],
)
def test_no_verdict_is_invented(text):
    with pytest.raises(JudgeFailed):
        parse_score(text, 0, 10)


def test_reasoning_is_not_a_verdict():
    assert parse_score("<think>Score: 3? No.</think>\nScore: 8", 0, 10) == 8


@pytest.mark.timeout(60)
@pytest.mark.parametrize("reply", ["```{}x", "```{}```", "```json{}{{", "{}Score: 8x", "Score:{}"])
def test_a_reply_of_empty_lines_is_read_at_once(reply):
    """Given 50,000 of them, a pattern that backtracks would take hours."""
    with pytest.raises(JudgeFailed):
        parse_score(reply.format("\n" * 50_000), 0, 10)


def test_the_llm_gets_rubric_and_needs_and_its_score_is_scaled(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with serving() as server:
        table = {"type": "llm", "base_url": f"{server.url}/chat/exact", "model": "m", "rubric": "Be {strict}."}
        results = judge_all({**table, "api_key_env": "JUDGE_KEY"}, Path(), episode("4"), episode("</answer>5"))
        headers, body = server.requests[1]
    assert [verdict.value for verdict in results] == [1.0, 0.5]
    assert headers["Authorization"] == "Bearer secret"
    assert "Be {strict}." in body["messages"][0]["content"]
    assert body["messages"][1]["content"].count("</answer>") == 1
    assert (body["model"], body["temperature"]) == ("m", 0.0)


def test_the_llm_is_asked_again_when_its_verdict_cannot_be_read():
    with serving() as server:
        table = {"type": "llm", "base_url": f"{server.url}/chat/no idea", "model": "m", "rubric": "?", "pause_s": 0}
        (verdict,) = judge_all({**table, "retries": 2})
        assert len(server.requests) == 3
    assert isinstance(verdict, JudgeFailed)


# -- HTTP -------------------------------------------------------------------------------------------------------


def test_http_sends_its_needs_over_one_session():
    with serving() as server:
        results = judge_all({"type": "http", "url": f"{server.url}/judge", "concurrency": 1}, Path(), *[episode()] * 5)
        assert [body for _, body in server.requests] == [{"answer": "4", "label": "4"}] * 5
        assert len(server.connections) == 1
    assert results == [Reward(1.0, {"http": 1.0})] * 5


def test_http_retries():
    with serving() as server:
        server.broken = 2
        assert judge_all({"type": "http", "url": f"{server.url}/judge", "pause_s": 0})[0].value == 1.0
        assert len(server.requests) == 3


@pytest.mark.parametrize(
    "answer",
    [
        "text=<html>",
        "text={}",
        "text=[1]",
        'text={"reward":"1"}',
        'text={"reward":null}',
        'text={"rewards":1}',
        'text={"rewards":{}}',
        'text={"reward":1,"rewards":{"a":1}}',
        'text={"reward":{"a":1}}',
        'text={"reward":1}&status=201',
    ],
)
def test_any_other_response_gives_no_verdict(answer):
    with serving() as server:
        (verdict,) = judge_all({"type": "http", "url": f"{server.url}/answer?{answer}", "retries": 0})
    assert isinstance(verdict, JudgeFailed)


def test_an_unreachable_server_gives_no_verdict():
    (verdict,) = judge_all({"type": "http", "url": "http://127.0.0.1:1/judge", "retries": 0})
    assert isinstance(verdict, JudgeFailed)
    assert isinstance(verdict.__cause__.__cause__, OSError)


# -- commands ---------------------------------------------------------------------------------------------------


def test_a_command_gets_answer_payload_and_files_in_a_temporary_directory(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "case.txt").write_text("case")
    record = tmp_path / "seen"
    script = (
        "import os, json, pathlib as p; d = p.Path.cwd(); "
        "json.dump({'cwd': str(d), 'answer': (d/'answer.txt').read_text(), "
        "'payload': json.loads((d/'payload.json').read_text()), 'case': (d/'tests/case.txt').read_text(), "
        f"'home': os.environ['LOOPWRIGHT_HOME'], 'names': list(os.environ)}}, open({str(record)!r}, 'w'))"
    )
    os.environ["LOOPWRIGHT_TEST_SECRET"] = "x"
    try:
        assert judge_all(command(script, files=["tests"]), tmp_path) == [Reward(1.0, {"command": 1.0})]
    finally:
        del os.environ["LOOPWRIGHT_TEST_SECRET"]
    contents = json.loads(record.read_text())
    assert (contents["answer"], contents["payload"], contents["case"]) == ("4", {"answer": "4", "label": "4"}, "case")
    assert contents["home"] == str(tmp_path)
    assert "LOOPWRIGHT_TEST_SECRET" not in contents["names"]
    assert not Path(contents["cwd"]).exists()


@pytest.mark.parametrize(
    ("script", "how", "expected"),
    [
        ("raise SystemExit(3)", "exit_code", 0.0),
        ("open('reward.txt', 'w').write(' 0.25\\n'); raise SystemExit(1)", "file", 0.25),
        ("open('reward.json', 'w').write('{\"a\": 1, \"b\": 0.5}')", "file", 1.5),
        ("open('reward.json', 'w').write('{\"reward\": 0.5}')", "file", 0.5),
        ("print('passed:', 0.75)", "stdout", 0.75),
    ],
)
def test_a_command_gives_its_reward(script, how, expected):
    assert judge_all(command(script, reward=how))[0].value == expected


@pytest.mark.parametrize(
    ("script", "how"),
    [
        ("pass", "file"),
        ("open('reward.txt', 'w').write('nan')", "file"),
        ("open('reward.txt', 'w').write('good')", "file"),
        ("open('reward.json', 'w').write('[1')", "file"),
        ("print()", "stdout"),
        ("import os; os.kill(os.getpid(), 9)", "exit_code"),
        ("import time; time.sleep(1000)", "exit_code"),
    ],
)
def test_a_command_without_a_number_gives_no_verdict(script, how):
    assert isinstance(judge_all(command(script, reward=how, timeout_s=0.5))[0], JudgeFailed)


def test_a_command_that_cannot_start_gives_no_verdict():
    (verdict,) = judge_all({"type": "command", "command": ["/no/such/program"]})
    assert isinstance(verdict, JudgeFailed)
    assert "/no/such/program" in str(verdict)


def test_a_failure_caused_by_the_answer_can_get_a_reward():
    for script in ("import os; os.kill(os.getpid(), 9)", "import time; time.sleep(1000)"):
        assert judge_all(command(script, broken=-1.0, timeout_s=0.3))[0].value == -1.0


def test_a_cancelled_command_leaves_neither_process_nor_directory(tmp_path):
    pid = tmp_path / "pid"
    script = (
        "import os, time, subprocess; s = subprocess.Popen(['sleep', '1000']); "
        f"open({str(pid)!r}, 'w').write(f'{{s.pid}}\\n'); time.sleep(1000)"
    )

    async def main():
        judger = build_judger(parse_judger(command(script)), tmp_path)
        flight = asyncio.ensure_future(verdicts(judger, episode()))
        await appears(pid)
        flight.cancel()
        with pytest.raises(asyncio.CancelledError):
            await flight
        assert not alive(written_pid(pid))
        await judger.close()

    asyncio.run(main())


# -- groups -----------------------------------------------------------------------------------------------------


@given(st.lists(st.one_of(finite, st.none()), min_size=1, max_size=12))
def test_ranks_keep_the_order_and_leave_out_failures(values):
    rewards = [JudgeFailed("none") if value is None else Reward(value) for value in values]
    results = rank(rewards)
    assert [isinstance(f, JudgeFailed) for f in results] == [value is None for value in values]
    pairs = [(value, f.value) for value, f in zip(values, results, strict=True) if isinstance(f, Reward)]
    assert all(0 <= rank <= 1 for _, rank in pairs)
    assert all((a < b) == (x < y) for a, x in pairs for b, y in pairs)
    if pairs:
        assert sum(rank for _, rank in pairs) == pytest.approx(len(pairs) / 2)


def test_a_group_is_ranked():
    table = {"type": "ranking", "of": {"type": "length", "weight": -1.0}}
    results = judge_all(table, Path(), episode("four"), episode("4"), episode("vier"))
    assert [verdict.value for verdict in results] == [0.25, 1.0, 0.25]
    assert results[0].parts == {"ranking": 0.25}
    table = {"type": "ranking", "function": f"{FUNCTIONS}:shortest"}
    assert judge_all(table, Path(), episode("four"), episode("4"))[1] == Reward(-1.0, {"shortest": -1.0})


def test_a_group_function_must_answer_for_each():
    results = judge_all({"type": "ranking", "function": f"{FUNCTIONS}:too_few"}, Path(), episode(), episode())
    assert all(isinstance(verdict, ValueError) for verdict in results)


def test_a_single_episode_has_no_rank():
    async def main():
        judger = build_judger(parse_judger({"type": "ranking", "of": {"type": "length"}}), Path())
        with pytest.raises(JudgeFailed, match="compares a group"):
            await judger.judge(Payload.of(episode(), judger.needs))

    asyncio.run(main())


# -- handlers ---------------------------------------------------------------------------------------------------


def test_a_function_that_exits_loses_only_its_own_verdict():
    (verdict,) = judge_all(python("leave"))
    assert isinstance(verdict, JudgeFailed)
    assert "SystemExit" in str(verdict)


def test_hanging_functions_do_not_use_up_the_threads():
    async def main():
        hanging = build_judger(parse_judger(python("hang", concurrency=2, timeout_s=0.05)), Path())
        results = await verdicts(hanging, *[episode()] * 8)
        await hanging.close()
        return results

    results = asyncio.run(main())
    assert all("longer than" in str(verdict) for verdict in results)
    # All eight were called: a hanging thread gives its slot to the next.
    assert sum(thread.name == "loopwright-judge" and thread.daemon for thread in threading.enumerate()) >= 8


def test_a_function_that_never_returns_is_eventually_not_called_again(monkeypatch):
    monkeypatch.setattr("loopwright.rollouts.threads.MAX_HANGING_CALLS", 2)
    results = judge_all(python("hang", concurrency=1, timeout_s=0.05, breaker=0), Path(), *[episode()] * 3)
    assert "never returned" in str(results[2])
