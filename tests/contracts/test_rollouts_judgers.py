"""The contracts L02–L06 of judgers, each named after its number."""

import asyncio
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from loopwright.core.errors import MissingExtra
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.trial import Reward
from loopwright.rollouts.judgers import JudgerClient, JudgeWorker, build_judger, parse_judger
from loopwright.rollouts.judgers.base import JudgeFailed, Payload
from loopwright.rollouts.pools.local import LocalPool
from loopwright.testing.judgers import episode, verdicts
from tests.rollouts import judge_functions

FUNCTIONS = "tests.rollouts.judge_functions"
EXACT = {"type": "python", "function": f"{FUNCTIONS}:exact"}
LENGTH = {"type": "length", "weight": -0.01}


def python(function, **settings):
    return {"type": "python", "function": f"{FUNCTIONS}:{function}", "retries": 0, **settings}


def use_judger(table, body, directory=Path()):
    """Run `body` with a client of this judger in a pool."""

    async def main():
        config = parse_judger(table)
        client = JudgerClient(LocalPool(partial(JudgeWorker.build, config, directory)), config)
        await client.start()
        try:
            return await body(client)
        finally:
            await client.close()

    return asyncio.run(main())


# -- L02 --------------------------------------------------------------------------------------------------------


def test_l02_a_judger_has_its_own_cpus_and_memory():
    config = parse_judger({**EXACT, "cpus": 0.5, "memory": "1GiB", "workers": 2})
    assert (config.cpus, config.memory, config.workers) == (0.5, 2**30, 2)


def test_l02_training_and_evaluation_share_one_built_judger():
    async def body(shared):
        training = asyncio.gather(*(shared.judge(episode("4")) for _ in range(20)))
        evaluation = shared.judge_group([episode("5"), episode("4")])
        return await training, await evaluation

    training, evaluation = use_judger(EXACT, body)
    assert [reward.value for reward in training] == [1.0] * 20
    assert [reward.value for reward in evaluation] == [0.0, 1.0]


# -- L03 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"type": "pyton", "function": "a:b"}, "unknown judger 'pyton'. .*Did you mean 'python'"),
        ([EXACT, LENGTH], "2 judgers without a rule for combining them.*composed"),
        ({}, "a table with a `type`"),
        ({"type": "composed"}, "either `parts` or `routes`"),
        ({"type": "composed", "parts": [EXACT], "routes": {"a": EXACT}}, "either `parts` or `routes`"),
        ({"type": "composed", "parts": [EXACT, EXACT]}, "2 parts are called 'exact'; give each a `name`"),
        ({"type": "composed", "parts": [{"type": "lenght"}]}, "unknown judger 'lenght'. .*Did you mean 'length'"),
        ({"type": "composed", "routes": {"a": {"type": "nope"}}}, "unknown judger 'nope'"),
        ({"type": "composed", "routes": {"a": EXACT}, "merge": "a:b"}, "`merge` needs `parts`"),
        ({"type": "composed", "parts": [EXACT, LENGTH], "merge": "a:b"}, "'length' has a weight"),
        ({"type": "composed", "workers": 1, "parts": [{**EXACT, "workers": 2}]}, "set them on one of the two"),
        ({"type": "python", "function": "no colon"}, "function"),
        ({**EXACT, "timeout_s": 0}, "timeout_s: .*greater than 0"),
        (
            {"type": "http", "url": "http://x", "needs": ["answr"]},
            "'answr' is not a fact of an episode. .*Did you mean 'answer'",
        ),
        ({"type": "llm", "base_url": "http://x", "model": "m", "rubric": "r", "low": 5, "high": 5}, "below `high`"),
        ({"type": "ranking"}, "either a `function` or another judger"),
        ({"type": "command", "command": ["true"], "files": ["../x"]}, "must lie in the scenario's directory"),
        ({"type": "command", "command": []}, "command"),
    ],
)
def test_l03_config_errors_are_raised_at_construction(table, message):
    with pytest.raises(ValueError, match=message):
        parse_judger(table)


@pytest.mark.parametrize(
    ("table", "key", "message"),
    [
        ({"type": "python", "function": "no_such_module_at_all:f"}, "function", "No module named"),
        (python("no_such_function"), "function", "no attribute"),
        (python("CALLS"), "function", "CALLS"),
        (python("unknown"), "function", "'lable' is not a fact of an episode. .*Did you mean 'label'"),
        (python("everything"), "function", "name each parameter"),
        ({"type": "composed", "routes": {"sums": python("unknown")}}, "routes.sums.function", "lable"),
        ({"type": "composed", "parts": [EXACT, python("nope")]}, r"parts\[1\].function", "nope"),
        ({"type": "composed", "parts": [EXACT], "merge": f"{FUNCTIONS}:nope"}, "merge", "nope"),
        ({"type": "composed", "parts": [EXACT], "merge": f"{FUNCTIONS}:two"}, "merge", "one argument"),
        ({"type": "ranking", "of": python("unknown")}, "of.function", "lable"),
        ({"type": "ranking", "function": f"{FUNCTIONS}:two"}, "function", "one argument"),
        ({"type": "http", "url": "localhost:8000"}, "url", "is not a URL"),
        ({"type": "command", "command": ["true"], "files": ["nope.py"]}, "files", "'nope.py' does not exist"),
        (
            {"type": "llm", "base_url": "http://x", "model": "m", "rubric": "r", "api_key_env": "NO_SUCH_VARIABLE"},
            "api_key_env",
            "is not set",
        ),
    ],
)
def test_l03_errors_that_depend_on_the_scenario_are_problems_at_load_time(tmp_path, table, key, message):
    (problem,) = parse_judger(table).problems(tmp_path)
    with pytest.raises(AssertionError, match=f"^{key}: .*{message}"):
        raise AssertionError(str(problem))


def test_l03_a_data_source_without_a_route_is_a_problem_at_load_time():
    config = parse_judger({"type": "composed", "routes": {"sums": EXACT, "riddles": EXACT}})
    assert config.routing_problems(["sums", "riddles"]) == []
    (problem,) = config.routing_problems(["riddle", "sums"])
    assert "'riddle'" in str(problem)
    assert "Did you mean 'riddles'?" in str(problem)
    assert parse_judger({"type": "composed", "routes": {"*": EXACT}}).routing_problems(["anything"]) == []


def test_l03_a_single_named_judger_keeps_its_name_as_the_rewards_part():
    async def body(client):
        return await client.judge(episode("4"))

    assert use_judger({**EXACT, "name": "truth"}, body) == Reward(1.0, {"truth": 1.0})
    assert use_judger(EXACT, body) == Reward(1.0, {"exact": 1.0})
    assert use_judger({"type": "composed", "parts": [{**EXACT, "name": "truth"}]}, body) == Reward(1.0, {"truth": 1.0})
    assert use_judger({"type": "composed", "routes": {"sums": EXACT}}, body).parts == {"exact": 1.0}


def test_l03_a_function_is_imported_from_the_scenarios_directory(tmp_path):
    (tmp_path / "judge_of_this_scenario.py").write_text("def exact(answer, label):\n    return answer == label\n")
    table = {"type": "python", "function": "judge_of_this_scenario:exact"}
    assert parse_judger(table).problems(tmp_path) == []

    async def body(client):
        return await client.judge(episode())

    assert use_judger(table, body, tmp_path).value == 1.0


# -- L04 --------------------------------------------------------------------------------------------------------


def test_l04_a_synchronous_judger_does_not_block_the_event_loop():
    """While the function blocks, another coroutine runs and releases it."""
    judge_functions.RELEASE.clear()
    judge_functions.STARTED.clear()

    async def body(client):
        flight = asyncio.ensure_future(client.judge(episode()))
        while not judge_functions.STARTED.is_set():
            await asyncio.sleep(0)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert not flight.done()
        judge_functions.RELEASE.set()
        return await flight

    assert use_judger(python("blocked"), body).value == 1.0


def test_l04_composed_judgers_weigh_route_and_merge():
    async def body(client):
        return await client.judge_group([episode("4"), episode("5"), episode("12", "12", "long")])

    four, five, _ = use_judger({"type": "composed", "parts": [EXACT, LENGTH]}, body)
    assert four == Reward(0.99, {"exact": 1.0, "length": -0.01})
    assert five == Reward(-0.01, {"exact": 0.0, "length": -0.01})
    routes = {"sums": EXACT, "*": {"type": "length"}}
    assert [v.value for v in use_judger({"type": "composed", "routes": routes}, body)] == [1.0, 0.0, 2.0]
    merged = {"type": "composed", "parts": [EXACT, {"type": "length"}], "merge": f"{FUNCTIONS}:smaller"}
    assert use_judger(merged, body)[2] == Reward(1.0, {"exact": 1.0, "length": 2.0})


def test_l04_parts_inherit_the_limits_that_they_do_not_set():
    parts = [EXACT, {**LENGTH, "timeout_s": 5}, {"type": "command", "command": ["true"]}]
    first, second, third = (
        parse_judger({"type": "composed", "parts": parts, "timeout_s": 30, "retries": 1}).members().values()
    )
    assert [(part.timeout_s, part.retries) for part in (first, second, third)] == [(30, 1), (5, 1), (30, 1)]
    assert third.concurrency == 4


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        ("returns_none", TypeError),
        ("returns_text", TypeError),
        ("returns_text_part", TypeError),
        ("returns_nan", ValueError),
        ("returns_huge", ValueError),
        ("returns_no_parts", ValueError),
    ],
)
def test_l04_return_values_are_checked(function, kind):
    async def body(client):
        with pytest.raises(JudgeFailed) as caught:
            await client.judge(episode())
        return caught.value

    error = use_judger(python(function, retries=3, pause_s=100), body)
    assert isinstance(error, kind)
    assert function in str(error)


def test_l04_checks_hold_without_assertions():
    script = (
        "import asyncio, pathlib; from loopwright.rollouts.judgers import build_judger, parse_judger; "
        "from loopwright.rollouts.judgers.base import Payload\n"
        f"judger = build_judger(parse_judger({python('returns_nan')!r}), pathlib.Path())\n"
        "try:\n    print(asyncio.run(judger.judge(Payload({'answer': '4'}))))\n"
        "except ValueError as error:\n    print('refused')"
    )
    done = subprocess.run([sys.executable, "-O", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"


def test_l04_a_hanging_function_does_not_block_the_end_of_the_process():
    script = (
        "import asyncio, pathlib; from loopwright.rollouts.judgers import build_judger, parse_judger; "
        "from loopwright.rollouts.judgers.base import Payload\n"
        "async def main():\n"
        f"    judger = build_judger(parse_judger({python('hang', timeout_s=0.05)!r}), pathlib.Path())\n"
        "    try:\n        await judger.judge(Payload({'answer': '4'}))\n"
        "    except RuntimeError:\n        print('no verdict', flush=True)\n"
        "    await judger.close()\n"
        "asyncio.run(main())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == "no verdict\n"


def test_l04_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)

    async def body(client):
        with pytest.raises(JudgeFailed, match=r"pip install 'loopwright\[rollouts\]'") as caught:
            await client.judge(episode())
        return caught.value

    error = use_judger({"type": "http", "url": "http://127.0.0.1:1", "retries": 0}, body)
    assert isinstance(error.__cause__, MissingExtra)


# -- L05 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [python("fail"), python("hang", timeout_s=0.05)], ids=["fails", "hangs"])
def test_l05_a_failed_verdict_gives_no_reward_and_never_zero(table):
    async def body(client):
        with pytest.raises(JudgeFailed) as caught:
            await client.judge(episode())
        assert caught.value.__cause__ is not None
        return str(caught.value)

    reason = use_judger(table, body)
    failed = episode().failed(Outcome.JUDGE_FAILED, Fault.JUDGE, reason)
    assert (failed.reward, failed.trainable, failed.in_baseline) == (None, False, False)


def test_l05_a_failed_part_fails_the_whole_verdict():
    async def body(client):
        return await client.judge_group([episode()])

    for merge in ({}, {"merge": f"{FUNCTIONS}:smaller"}):
        table = {"type": "composed", "parts": [python("fail"), {"type": "length"}], **merge}
        (verdict,) = use_judger(table, body)
        assert isinstance(verdict, JudgeFailed)
        assert "'fail'" in str(verdict)


def test_l05_a_failure_in_a_group_does_not_affect_the_others():
    async def body(client):
        return await client.judge_group([episode("4"), episode("4", data_source="other"), episode("5")])

    table = {"type": "composed", "routes": {"sums": EXACT}}
    first, second, third = use_judger({"type": "ranking", "of": table}, body)
    assert (first.value, third.value) == (1.0, 0.0)
    assert isinstance(second, JudgeFailed)
    assert "no route for data_source 'other'" in str(second)


def test_l05_a_lost_worker_gives_no_verdict():
    class Lost(LocalPool):
        async def call(self, request, *, timeout_s=None):
            raise ConnectionError("the actor died")

    async def main():
        config = parse_judger(EXACT)
        client = JudgerClient(Lost(partial(JudgeWorker.build, config, Path())), config)
        await client.start()
        with pytest.raises(JudgeFailed, match="the actor died") as caught:
            await client.judge(episode())
        assert isinstance(caught.value.__cause__, ConnectionError)
        await client.close()

    asyncio.run(main())


# -- L06 --------------------------------------------------------------------------------------------------------


def test_l06_only_what_a_judger_needs_crosses_a_process_boundary():
    """Every request is pickled; one with only the answer has the same size for an episode a thousand times as long."""
    sizes = []

    class Counting(LocalPool):
        async def call(self, request, *, timeout_s=None):
            message = pickle.dumps(request)
            sizes.append(len(message))
            return pickle.loads(pickle.dumps(await super().call(pickle.loads(message), timeout_s=timeout_s)))

    async def main():
        config = parse_judger(EXACT)
        client = JudgerClient(Counting(partial(JudgeWorker.build, config, Path())), config)
        await client.start()
        assert client.needs == ("answer", "label")
        short = episode("4")
        long_ = type(short)(short.task, (*short.nodes[:2], *[short.nodes[1]] * 1000, short.nodes[2]))
        rewards = [await client.judge(short), await client.judge(long_)]
        await client.close()
        return rewards

    assert asyncio.run(main()) == [Reward(1.0, {"exact": 1.0})] * 2
    assert sizes[0] == sizes[1] < 300


def test_l06_a_part_gets_only_its_own_needs():
    async def main():
        table = {"type": "composed", "parts": [EXACT, {"type": "length"}], "merge": f"{FUNCTIONS}:smaller"}
        judger = build_judger(parse_judger(table), Path())
        results = await verdicts(judger, episode())
        await judger.close()
        return set(judger.needs), results

    needs, results = asyncio.run(main())
    assert needs == {"answer", "label", "tokens"}
    assert isinstance(results[0], Reward)


def test_l06_other_facts_are_not_in_the_payload():
    payload = Payload.of(episode(), ("answer",))
    with pytest.raises(AttributeError, match="did not ask for 'label'"):
        payload.label  # noqa: B018
