"""Contract L14: loop, judger, production and sampling can differ per source of tasks, and evaluation has its judger."""

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import loopwright
from loopwright.core.episode import Episode
from loopwright.core.errors import LedgerError, ScenarioError
from loopwright.engines.scripted import ScriptedConfig
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.rollouts import Rollout, rollouts
from loopwright.rollouts.build import build_judger_client, fingerprint
from loopwright.rollouts.config import RolloutConfig
from loopwright.rollouts.evaluation import EvalConfig
from loopwright.rollouts.judgers import parse_judger
from loopwright.rollouts.loops.worker import RolloutRequest
from loopwright.rollouts.produce_config import ProduceConfig
from loopwright.rollouts.producer import ProductionFailed
from loopwright.rollouts.tasks.mix import TaskMix
from loopwright.scenario.load import load
from loopwright.testing import simulate
from loopwright.testing.judgers import episode
from tests.rollouts.harness import FunctionWorker, World, episode_of, instantly, tasks

PARTS = """
import os
from loopwright import AgentLoop

class Twice(AgentLoop):
    async def run(self, task, session):
        first = await session.turn(task.messages)
        await session.turn([*task.messages, first.message, {"role": "user", "content": "Sure?"}])
        return session.episode(task)

def sums():
    return [{"id": f"sum-{n}", "prompt": f"{n}+1=", "label": "yes"} for n in range(6)]

def held_out():
    return [{"id": f"held-{n}", "prompt": f"{n}*2=", "label": "yes"} for n in range(2)]

def talks():
    return [{"id": f"talk-{n}", "prompt": f"Say {n}.", "label": "no"} for n in range(4)]

def exact(answer, label):
    return float(answer == label)

def process(answer):
    return {"pid": float(os.getpid())}
"""
TALK_LOOP = {"type": "parts:Twice"}
SUMS = {"type": "python", "function": "parts:sums"}
TALKS = {"type": "python", "function": "parts:talks", "loop": TALK_LOOP, "judger": {"type": "length"}}


@pytest.fixture(autouse=True)
def parts(tmp_path):
    (tmp_path / "parts.py").write_text(PARTS)
    yield
    sys.modules.pop("parts", None)


def scenario(sources, directory: Path, **tables):
    rollout = {
        "tasks": sources,
        "loop": {"type": "single_turn", **tables.pop("loop", {})},
        "judger": {"type": "python", "function": "parts:exact"},
    }
    run = {
        "name": "r",
        "agent": {"type": "collect", "trials": 24, "group_size": 2, "batch": 4},
        "rollout": rollout,
        "engine": {"type": "scripted", "slip": 0.0},
    }
    return {"name": "sources", "home": str(directory), "run": [{**run, **tables}]}


def by_source(output: Path) -> dict[str, list[Rollout]]:
    with Ledger.read(output / "r" / "ledger.db") as ledger:
        found: dict[str, list[Rollout]] = {}
        for rollout in rollouts(ledger):
            found.setdefault(ledger.trial(rollout.number).action["source"], []).append(rollout)
        return found


def problems_of(raw) -> str:
    with pytest.raises(ScenarioError) as caught:
        load(raw)
    return str(caught.value)


# -- loop, judger, sampling ---------------------------------------------------------------------------------------


def test_l14_each_source_has_its_own_loop_judger_and_sampling(tmp_path):
    talks = {**TALKS, "sampling": {"max_tokens": 1}, "weight": 0.5}
    loopwright.run(scenario([SUMS, talks], tmp_path), tmp_path / "out", progress=False)
    episodes = by_source(tmp_path / "out")
    assert {name: len(each) for name, each in episodes.items()} == {"sums": 16, "talks": 8}
    assert {r.episode.turns for r in episodes["sums"]} == {1}
    assert {r.episode.turns for r in episodes["talks"]} == {2}
    assert {name for r in episodes["sums"] for name in r.episode.reward.parts} == {"exact"}
    assert {name for r in episodes["talks"] for name in r.episode.reward.parts} == {"length"}
    assert {r.episode.sampled for r in episodes["talks"]} == {2}  # one token in each turn
    assert "settings of single sources" in (tmp_path / "out" / "report.html").read_text()
    assert max(r.episode.sampled for r in episodes["sums"]) > 2


def test_l14_a_loop_inherits_workers_and_sampling_of_the_runs_loop(tmp_path):
    raw = scenario([SUMS, TALKS], tmp_path, loop={"sampling": {"max_tokens": 3}, "concurrency": 5})
    rollout = load(raw).runs[0].rollout
    talks = rollout.settings()["talks"]
    assert talks.loop.sampling.max_tokens == 3
    assert talks.loop.concurrency == 5
    assert talks.loop.type == "parts:Twice"
    (pool,) = rollout.loop_pools().values()
    assert list(pool) == ["", "talks"]  # one worker with one engine for both


def test_l14_evaluation_has_its_own_judger_and_its_sources_theirs(tmp_path):
    held_out = {"type": "python", "function": "parts:held_out"}
    evaluation = {
        "tasks": [held_out, {**held_out, "name": "other", "judger": {"type": "python", "function": "parts:process"}}],
        "judger": {"type": "length"},
        "sampling": {"temperature": 0.0},
    }
    raw = scenario([SUMS], tmp_path, eval=evaluation)
    settings = load(raw).runs[0].rollout.settings(load(raw).runs[0].eval)
    assert {name: each.judger.label() for name, each in settings.items()} == {
        "sums": "exact",
        "eval:held_out": "length",
        "eval:other": "process",
    }

    async def main():
        async with loopwright.Producer(raw, output=tmp_path / "out") as producer:
            env, _ = producer._production
            groups = env.open_evaluation(0, 1)
            await env.roll_all(groups)
            return {g.prompt.source: next(iter(g.episodes.values())) for g in groups}

    episodes = asyncio.run(main())
    assert list(episodes["eval:held_out"].reward.parts) == ["length"]
    assert list(episodes["eval:other"].reward.parts) == ["pid"]
    assert all(node.sampling["temperature"] == 0.0 for e in episodes.values() for node in e.nodes if node.spans)


# -- load time ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sources", "tables", "message"),
    [
        ([SUMS, {**TALKS, "judger": {"type": "lenght"}}], {}, r"tasks[1].judger: unknown judger 'lenght'"),
        ([SUMS, {**TALKS, "loop": {"type": "single_turn", "turns": 2}}], {}, r"tasks[1].loop: unknown key 'turns'"),
        ([SUMS, {**TALKS, "produce": {"filter": "all"}}], {}, r"tasks[1].produce.filter"),
        (
            [SUMS, {**TALKS, "judger": {"type": "python", "function": "parts:exakt"}}],
            {},
            "[run.rollout] tasks, talks, judger.function: 'parts:exakt'",
        ),
        (
            [SUMS, {**TALKS, "loop": {"type": "tools", "tools": ["parts:ad"]}}],
            {},
            "[run.rollout] tasks, talks, loop.tools",
        ),
        (
            [SUMS, {**TALKS, "judger": {"type": "composed", "routes": {"sums": {"type": "length"}}}}],
            {},
            "[run.rollout] tasks, talks, judger.routes: no route for data_source 'talks'",
        ),
        (
            [SUMS, {**TALKS, "judger": {"type": "verifier"}}],
            {},
            "[run.rollout] tasks, talks, judger: needs verifier, which loop type 'parts:Twice' does not record",
        ),
        (
            [SUMS],
            {"eval": {"tasks": {**TALKS, "produce": {"type": "async"}}}},
            "[run.eval] tasks, talks, produce: has no meaning here",
        ),
        (
            [SUMS],
            {"eval": {"tasks": TALKS, "judger": {"type": "python", "function": "parts:nothing"}}},
            "[run.eval] judger.function: 'parts:nothing'",
        ),
    ],
)
def test_l14_errors_at_load_time_name_the_entry(tmp_path, sources, tables, message):
    assert message in problems_of(scenario(sources, tmp_path, **tables))


def test_l14_a_source_that_is_trained_on_is_sampled_at_the_temperature_of_the_policy(tmp_path):
    pytest.importorskip("torch")
    agent = {"type": "grpo", "steps": 1, "trials": 8, "model": "tiny"}
    raw = scenario([SUMS, {**TALKS, "sampling": {"temperature": 0.5}}], tmp_path, agent=agent)
    expected = "[run.rollout] tasks, talks, sampling.temperature: is 0.5, but the policy is trained at 1"
    assert expected in problems_of(raw)


# -- fingerprint and keys -----------------------------------------------------------------------------------------


def test_l14_the_fingerprint_has_what_changes_results_and_nothing_else(tmp_path):
    def prints(evaluation=None, **talks):
        raw = scenario([SUMS, {**TALKS, **talks}], tmp_path, **({"eval": evaluation} if evaluation else {}))
        run = load(raw).runs[0]
        mix = TaskMix.load(run.rollout.tasks, 0, tmp_path, run.eval.tasks if run.eval else ())
        return fingerprint(run.rollout, run.engine, mix, tmp_path, run.eval)

    base = prints()
    held_out = {"tasks": {"type": "python", "function": "parts:held_out"}}
    assert prints(judger={"type": "length", "workers": 2, "cpus": 0.5}) == base
    assert prints(produce={"type": "async"}) == base
    assert prints(loop={**TALK_LOOP, "concurrency": 3}) == base
    changed = [
        prints(judger={"type": "length", "weight": 2.0}),
        prints(loop={**TALK_LOOP, "max_turns": 3}),
        prints(sampling={"temperature": 0.5}),
        prints(held_out),
        prints({**held_out, "judger": {"type": "length"}}),
    ]
    assert len({base, *changed}) == 6


def test_l14_parts_of_a_judger_may_move_without_changing_the_fingerprint():
    def print_of(**part):
        parts = [{"type": "length", **part}, {"type": "python", "function": "a:b"}]
        config = {"tasks": SUMS, "loop": {"type": "single_turn"}, "judger": {"type": "composed", "parts": parts}}
        return fingerprint(RolloutConfig.model_validate(config), ScriptedConfig(), TaskMix({"t": tasks(1)}), Path())

    assert print_of() == print_of(workers=2, cpus=0.1, timeout_s=3)
    assert print_of() != print_of(weight=2.0)


def test_l14_a_sources_settings_are_part_of_the_key_of_its_trials_and_of_no_other(tmp_path):
    def keys(name, **talks):
        loopwright.run(scenario([SUMS, {**TALKS, **talks}], tmp_path), tmp_path / name, progress=False)
        with Ledger.read(tmp_path / name / "r" / "ledger.db") as ledger:
            trials = list(ledger.trials())
        return [{t.key for t in trials if t.action["source"] == source} for source in ("sums", "talks")]

    (sums, talks), (same_sums, other_talks) = keys("a"), keys("b", judger={"type": "length", "weight": 2.0})
    assert (len(sums), len(talks)) == (12, 8)  # twelve trials each; two of the four talks came twice
    assert sums == same_sums
    assert not talks & other_talks


def test_l14_a_run_whose_source_has_another_judger_does_not_continue(tmp_path):
    loopwright.run(scenario([SUMS, TALKS], tmp_path), tmp_path / "out", progress=False)
    other = scenario([SUMS, {**TALKS, "judger": {"type": "length", "weight": 2.0}}], tmp_path)
    with pytest.raises(LedgerError, match="inputs of run 'r' have changed"):
        loopwright.run(other, tmp_path / "out", resume=True, progress=False)


# -- production ---------------------------------------------------------------------------------------------------


async def versioned(worker: FunctionWorker, request: RolloutRequest) -> Episode:
    await asyncio.sleep(0.1)
    return episode_of(request.task, worker.version)


def two_sources(tmp_path, roll=instantly, *, b: ProduceConfig, weights=None, **options):
    sources = {"a": tasks(50, "a"), "b": tasks(50, "b")}
    return World(tmp_path, roll, sources=sources, weights=weights, source_produce={"b": b}, **options)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_l14_sources_that_are_produced_differently_share_each_batch_by_weight(tmp_path, kind):
    async def main():
        weights = {"a": 3.0, "b": 1.0}
        b = ProduceConfig(type="async")
        worker = FunctionWorker(lambda request: versioned(worker, request))
        async with two_sources(tmp_path, b=b, weights=weights, type=kind, worker=worker) as world:
            counts = Counter[str]()
            for step in range(1, 11):
                batch = Counter(group.prompt.source for group in await world.producer.batch(6, step))
                assert batch["b"] in (1, 2)
                counts += batch
                await world.producer.update(step)
            assert counts == {"a": 45, "b": 15}

    simulate(main())


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_l14_sources_share_a_budget_below_one_batch_by_weight(tmp_path, kind):
    async def main():
        b = ProduceConfig(type="async", over_sample=1.0)
        options = {"b": b, "weights": {"a": 3.0, "b": 1.0}, "type": kind, "budget": 48}
        async with two_sources(tmp_path, **options) as world:
            groups = [group for step in (1, 2) for group in await world.producer.batch(16, step)]
            assert Counter(group.prompt.source for group in groups) == {"a": 9, "b": 3}

    simulate(main())


def test_l14_only_an_asynchronous_source_works_ahead(tmp_path):
    async def roll(request: RolloutRequest) -> Episode:
        await asyncio.sleep(1)
        return episode_of(request.task, 0)

    async def main():
        async with two_sources(tmp_path, roll, b=ProduceConfig(type="async")) as world:
            await world.producer.batch(4, 1)
            opened = Counter(world.ledger.trial(n).action["source"] for n in range(1, world.env.book.step + 1))
            assert opened["a"] == 8  # two groups of four
            assert opened["b"] > 8
            assert world.producer.in_flight == opened["b"] - 12  # three were ready when the batch was

    simulate(main())


def test_l14_a_source_filters_its_own_groups_only(tmp_path):
    async def main():
        b = ProduceConfig(filter="equal_rewards")
        async with two_sources(tmp_path, verdict=lambda _: 1.0, b=b) as world:
            with pytest.raises(ProductionFailed, match="20 groups of b in a row gave nothing to train on"):
                await world.producer.batch(4, 1)
            counts = world.env.buffer.counts()
            assert counts["filtered"] == 20
            assert counts["ready"] == 2  # those of a

    simulate(main())


def test_l14_a_source_has_its_own_staleness(tmp_path):
    async def main():
        b = ProduceConfig(max_staleness=5)
        worker = FunctionWorker(lambda request: versioned(worker, request))
        options = {"max_staleness": 1, "over_sample": 1.0, "type": "async", "worker": worker}
        async with two_sources(tmp_path, b=b, **options) as world:
            await world.producer.batch(4, 1)
            await asyncio.sleep(1)  # one batch is ready, for the next version
            for version in range(1, 4):
                await world.producer.update(version)
            groups = await world.producer.batch(4, 2)
            assert Counter(group.prompt.source for group in groups) == {"a": 2, "b": 2}
            with world.ledger.transaction as connection:
                expired = dict(
                    connection.execute("SELECT source, count(*) FROM groups WHERE status = 'expired' GROUP BY source")
                )
            assert set(expired) == {"a"}

    simulate(main())


def test_l14_only_rollouts_that_may_not_continue_start_again_at_an_update(tmp_path):
    attempts = Counter[str]()

    async def roll(request: RolloutRequest) -> Episode:
        attempts[request.task.id[0]] += 1
        await asyncio.sleep(10)
        return episode_of(request.task, 0)

    async def main():
        b = ProduceConfig(partial=False, drain_s=0)
        async with two_sources(tmp_path, roll, b=b, group_size=1, type="async", over_sample=0) as world:
            batch = asyncio.ensure_future(world.producer.batch(2, 1))
            await asyncio.sleep(1)
            await world.producer.update(1)
            await batch
            assert attempts["b"] == attempts["a"] + 1

    simulate(main())


def test_l14_a_crash_loses_no_share_of_any_source(tmp_path):
    async def life(steps: range) -> Counter[str]:
        weights = {"a": 2.0, "b": 1.0}
        async with two_sources(tmp_path, b=ProduceConfig(type="async"), weights=weights) as world:
            world.producer.restore(steps.start)
            counts = Counter[str]()
            for step in steps:
                counts.update(group.prompt.source for group in await world.producer.batch(2, step + 1))
                world.env.buffer.settle(step + 1)
            return counts

    counts = simulate(life(range(5))) + simulate(life(range(5, 12)))
    assert counts == {"a": 16, "b": 8}


# -- Ray ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_l14_loops_judgers_and_parts_of_judgers_have_their_own_workers_on_ray(tmp_path):
    """In a process of its own: the run connects to Ray and ends it."""
    part = {"type": "python", "function": "parts:process", "workers": 1, "cpus": 0.1}
    judger = {"type": "composed", "parts": [part, {"type": "length", "weight": 0.0}]}
    talks = {**TALKS, "loop": {**TALK_LOOP, "workers": 1, "cpus": 0.2}, "judger": judger}
    raw = scenario([SUMS, talks], tmp_path, loop={"workers": 1, "cpus": 0.1})
    (tmp_path / "run.py").write_text(
        f"import json, os, loopwright\nloopwright.run(json.loads({json.dumps(raw)!r}), 'out', progress=False)\n"
        "print(os.getpid())\n"
    )
    rollout = load(raw).runs[0].rollout
    assert [str(request) for request in rollout.resource_requests()] == [
        "'loop' requests 1 worker of 0.1 CPUs",
        "'loop of talks' requests 1 worker of 0.2 CPUs",
        "'judger of talks parts[0]' requests 1 worker of 0.1 CPUs",
    ]
    process = subprocess.run(
        [sys.executable, "run.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert process.returncode == 0, process.stderr
    episodes = by_source(tmp_path / "out")
    assert {name: len(each) for name, each in episodes.items()} == {"sums": 12, "talks": 12}
    assert {r.episode.turns for r in episodes["talks"]} == {2}
    pids = {int(r.episode.reward.parts["process"]) for r in episodes["talks"]}
    assert len(pids) == 1
    assert int(process.stdout.split()[-1]) not in pids
    assert all("length" in r.episode.reward.parts for r in episodes["talks"])


def test_l14_a_part_without_workers_stays_in_this_process():
    part = {"type": "python", "function": "tests.rollouts.judge_functions:exact"}

    async def main():
        client = build_judger_client(parse_judger({"type": "composed", "parts": [part, {"type": "length"}]}), Path())
        await client.start()
        try:
            return await client.judge(episode("4"))
        finally:
            await client.close()

    assert set(asyncio.run(main()).parts) == {"exact", "length"}


# -- what is shown ------------------------------------------------------------------------------------------------


def test_l14_dry_run_and_verify_show_each_source(tmp_path):
    (tmp_path / "sources.toml").write_text(
        """
name = "sources"
[[run]]
name = "r"
agent = { type = "collect", trials = 8, group_size = 2 }
engine = { type = "scripted" }
[run.rollout]
loop = { type = "single_turn" }
judger = { type = "python", function = "parts:exact" }
[[run.rollout.tasks]]
type = "python"
function = "parts:sums"
[[run.rollout.tasks]]
type = "python"
function = "parts:talks"
loop = { type = "parts:Twice" }
judger = { type = "length" }
sampling = { max_tokens = 9 }
produce = { type = "async" }
[run.eval]
tasks = { type = "python", function = "parts:held_out" }
judger = { type = "length" }
"""
    )
    command = [str(Path(sys.executable).with_name("loopwright"))]
    env = {**os.environ, "COLUMNS": "200"}
    shown = subprocess.run([*command, "dry-run", "sources.toml"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert "talks: 4 tasks, weight 1; loop parts:Twice; judger length; produce type async; sampling max_tokens 9" in (
        shown.stdout
    )
    assert "eval:held_out: 2 tasks; judger length" in shown.stdout
    checked = subprocess.run([*command, "verify", "sources.toml"], cwd=tmp_path, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_l14_equal_settings_are_one_loop_and_one_judger():
    config = RolloutConfig.model_validate(
        {
            "tasks": [{**SUMS, "name": name, "judger": {"type": "length"}} for name in ("a", "b")],
            "loop": {"type": "single_turn", "workers": 1},
            "judger": {"type": "length", "workers": 1},
        }
    )
    assert [str(request) for request in config.resource_requests()] == ["'loop' requests 1 worker of 1 CPU"]
    assert EvalConfig.model_validate({"tasks": SUMS}).judger is None
