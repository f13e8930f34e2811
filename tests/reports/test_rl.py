"""RL in the report: live runs by episode, and a trained policy beside the best static action."""

import io
import time
import tracemalloc
from itertools import pairwise
from random import Random
from types import SimpleNamespace

import pytest

from loopwright.reports.kinds import read_run
from loopwright.reports.live.digest import Episodes, LiveDigest
from loopwright.reports.page import write_report
from loopwright.reports.progress import RunProgress
from tests.reports.ledgers import LIVE, live
from tests.reports.test_html import HOSTILE, assert_drawn, chart, page, with_script, words


def learning(episodes: int, *, seed: int = 1) -> list[dict]:
    """Episodes that get better, under three regimes."""
    random = Random(seed)
    return [
        {
            "return": round(10 * n / episodes - 3 * random.random(), 2),
            "length": 5 + round(60 * n / episodes * random.random()),
            "regime": {"ball_speed": random.choice([1.0, 1.5, 2.0])},
        }
        for n in range(episodes)
    ]


# -- live runs ------------------------------------------------------------------------------------------------------


def test_a_live_run_compares_its_last_hundred_episodes_with_the_first(begin, tmp_path):
    run = begin("paddle", **LIVE, budget=1200)
    live(run.ledger, [{"return": 1.0 if n < 200 else 4.0, "length": 4} for n in range(300)])
    run.ledger.set_state("finished", True)

    text = words(tmp_path)

    assert "Mean return of the last 100 episodes 4 +3 against the first 100 (1)" in text
    assert "episodes 300 steps 1 200 best return 4 (steps 801–804) mean length of the last 100 4 steps" in text
    assert "done 1 200 of 1 200 ok 1 200 failed 0 wall time" in text
    assert "live environment paddle:PaddleServer" in text
    assert "finished" in text
    assert "cached" not in text
    assert "Best" not in text, "a live run has no best configuration"


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        ([5.0], "Return of the last episode 5 One episode so far"),
        ([5.0, 2.0], "Return of the last episode 2 the first: 5. Too few episodes to tell whether it changed."),
        (
            [1.0, 2.0, 3.0, 6.0],
            "Mean return of the last 2 episodes 4.5 No clear change from the first 2 (1.5): +3, 95 % interval",
        ),
        ([2.0] * 4, "Mean return of the last 2 episodes 2 the same as the first 2 (2)"),
    ],
)
def test_few_episodes_are_compared_by_halves(begin, tmp_path, returns, message):
    live(begin("paddle", **LIVE).ledger, [{"return": value, "length": 3} for value in returns])

    assert message in words(tmp_path)


def test_a_run_without_a_finished_episode_says_so(begin, tmp_path):
    begin("empty", **LIVE)
    run = begin("begun", **LIVE)
    live(run.ledger, [{"return": 1.0, "length": 3}])
    with run.ledger.transaction as connection:
        connection.execute("DELETE FROM payloads")

    text = words(tmp_path)

    assert "No step has been taken yet." in text
    assert "No episode has reached its end yet." in text
    assert "no episode has reached its end yet" in text, "in the list of runs"


def test_returns_are_listed_by_regime_in_the_order_of_the_scenario(begin, tmp_path):
    records = [
        {"return": 1.0, "length": 3, "regime": {"ball_speed": 2.0}},
        {"return": 5.0, "length": 7, "regime": {"ball_speed": 1.0}},
        {"return": 3.0, "length": 5, "regime": {"ball_speed": 2.0}},
    ]
    live(begin("paddle", **LIVE).ledger, records)

    text, data = words(tmp_path), chart(tmp_path)

    assert "1.0 1 5 5 5 7 2.0 2 2 1 3 4" in text
    assert data["regimes"] == ["ball_speed = 1.0", "ball_speed = 2.0"]
    assert data["regime"] == [1, 0, 1]
    assert data["titles"][1] == "Episode 2, steps 4–10"


def test_failed_steps_are_listed_as_in_any_run(begin, tmp_path):
    live(begin("paddle", **LIVE).ledger, [{"return": 1.0, "length": 3}] * 4, failed=[2, 3])

    text, data = words(tmp_path), chart(tmp_path)

    assert "metric_missing workload 2 the server gave the reward nan 2 × · trials 6, 9" in text
    assert "ok 10 failed 2" in text
    assert [tick[0] for tick in data["failed"]] == [6, 9]


@pytest.mark.parametrize("steps", [True, False])
def test_an_episode_ended_by_a_failed_step_is_in_no_mean(begin, tmp_path, steps):
    records = [{"return": -9.0, "length": 3}] * 4 + [{"return": 0.0, "length": 1}] * 4
    live(begin("paddle", **LIVE).ledger, records, steps=steps, failed=[5, 6, 7, 8])

    text = words(tmp_path)

    assert "Mean return of the last 2 episodes −9 the same as the first 2 (−9)" in text, (
        "a broken server does not improve the policy"
    )
    assert "best return −9" in text
    assert "ended by a failed step 4 episodes, in no mean" in text


def test_without_a_good_episode_there_is_no_return(begin, tmp_path):
    begin("empty", **LIVE)
    live(begin("paddle", **LIVE).ledger, [{"return": 0.0, "length": 1}] * 2, failed=[1, 2])

    text = words(tmp_path)

    assert "No episode has a return: all 2 ended with a failed step." in text
    assert "every episode ended with a failed step" in text, "in the list of runs"


def test_steps_are_counted_also_if_only_episodes_are_recorded(begin, tmp_path):
    live(begin("paddle", **LIVE).ledger, [{"return": 1.0, "length": 50}] * 4, steps=False)

    assert "episodes 4 steps 200" in words(tmp_path)


def test_the_running_mean_is_exact_and_the_points_are_evenly_spaced():
    records = [{"first": n, "last": n, "return": float(n), "length": 1} for n in range(1, 20_001)]

    summary = Episodes.of(records)

    numbers = [episode.number for episode in summary.points]
    assert len(numbers) < 4000
    assert len({b - a for a, b in pairwise(numbers)}) == 1
    assert all(e.mean_reward == pytest.approx(e.number - 49.5) for e in summary.points if e.number >= 100)
    assert (summary.before, summary.after) == (50.5, 19_950.5)


def test_a_million_steps_are_reported_in_seconds_and_in_little_memory(begin, tmp_path):
    run = begin("long", **LIVE)
    row = (1, "1", 1, "{}", "ok", None, "", 1.0, '{"parts":{},"more":[]}', '{"observation":[0.1,0.2]}', 1.0, 2.0)
    for start in range(1, 1_000_001, 50_000):
        episodes = [
            (n, b'{"episode":1,"first":%d,"last":%d,"return":%d,"length":20,"regime":{}}' % (n - 19, n, n // 1000))
            for n in range(start + 19, start + 50_000, 20)
        ]
        run.ledger.append([(n, *row) for n in range(start, start + 50_000)], episodes)

    started = time.perf_counter()
    source = page(tmp_path)
    took_s = time.perf_counter() - started
    tracemalloc.start()
    digest = read_run(tmp_path / "long")
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert took_s < 15, "about 2 s on a laptop"
    assert isinstance(digest, LiveDigest)
    assert peak_bytes < 60e6
    assert len(source) < 1_500_000
    assert "steps 1 000 000" in words(tmp_path, source)
    assert "3 125 of 50 000 complete episodes are drawn" in words(tmp_path, source)


# -- policies -------------------------------------------------------------------------------------------------------


def side(reward: float | None, *trials: int, **action) -> dict:
    return {"action": action, "key": "k", "reward": reward, "trials": list(trials)}


def trained(begin, name: str, *rows: dict):
    run = begin(name, conditions_on_regime=True, parameters={"cc": ["bbr", "cubic"], "streams": [1, 8]})
    for streams, cc in ((1, "bbr"), (8, "cubic")):
        for drop in (0, 5):
            run.add({"cc": cc, "streams": streams, "fixed": 3}, 5.0 + streams, regime={"drop": drop})
    run.ledger.set_state("policy", {"evaluated_at": 1.0, "regimes": list(rows)})
    return run


def both(policy: float | None, static: float | None, drop: int) -> dict:
    return {
        "regime": {"drop": drop},
        "policy": side(policy, 1, cc="bbr", streams=8, fixed=3),
        "static": side(static, 2, cc="cubic", streams=1, fixed=3),
    }


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([both(9.0, 6.0, 0), both(9.1, 6.0, 5)], "The policy wins : 9.05 GFLOP/s against 6 GFLOP/s"),
        ([both(4.0, 6.0, 0), both(4.1, 6.0, 5)], "The best static action wins : 4.05 GFLOP/s against 6 GFLOP/s"),
        ([both(9.0, 6.0, 0), both(5.0, 6.0, 5)], "No clear winner : 7 GFLOP/s against 6 GFLOP/s"),
        ([both(6.0, 6.0, 0), both(6.0, 6.0, 5)], "No clear winner : 6 GFLOP/s against 6 GFLOP/s"),
    ],
)
def test_a_policy_is_compared_with_the_best_static_action(begin, tmp_path, rows, message):
    trained(begin, "tcp", *rows)

    text = words(tmp_path)

    assert message in text
    assert "Mean gflops of the policy over 2 regimes" in text
    assert "the same under every regime: cc = cubic, streams = 1" in text
    assert "drop cc streams policy static trials 0 bbr 8 " in text, "parameters that cannot be chosen are left out"
    assert "The best action under each regime alone" in text
    assert chart(tmp_path)["answer"] == [0], "the policy's own trial"


def test_the_means_are_over_regimes_where_both_were_measured(begin, tmp_path):
    trained(begin, "tcp", both(9.0, 6.0, 0), both(None, 60.0, 5), both(1.0, None, 9))

    text = words(tmp_path)

    assert (
        "No clear winner : 9 GFLOP/s against 6 GFLOP/s of the best static action. One measurement of each: raise "
        "evaluate to tell chance from a difference. The policy has the higher mean under 1 of 1 regime." in text
    )
    assert "Left out: 2 regimes where one of them failed." in text
    assert "failed 60 GFLOP/s" in text


def test_a_policy_without_a_static_action_is_shown_alone(begin, tmp_path):
    trained(begin, "tcp", {"regime": {}, "policy": side(3.0, 1, cc="bbr")})
    trained(begin, "failed", {"regime": {}, "policy": side(None, 1, cc="bbr")})

    text = words(tmp_path)

    assert "The policy's mean gflops over 1 regime 3 GFLOP/s No static action was measured beside it." in text
    assert "The policy failed under every regime." in text


@pytest.mark.parametrize("state", [None, {}, {"regimes": []}, {"regimes": 3}, 7])
def test_a_policy_that_was_not_evaluated_changes_nothing(begin, tmp_path, state):
    run = trained(begin, "tcp")
    run.ledger.set_state("policy", state)

    assert "The best action for each of 2 regimes" in words(tmp_path)


# -- in a browser ---------------------------------------------------------------------------------------------------


def test_live_and_policy_runs_render_without_errors(begin, tmp_path, render):
    run = begin("paddle", **LIVE, budget=40_000)
    live(run.ledger, learning(400), failed=[50, 60])
    live(begin("plain", **LIVE).ledger, [{**episode, "regime": {}} for episode in learning(30)])
    live(begin("hostile", **LIVE).ledger, [{"return": n, "length": 2, "regime": {HOSTILE: HOSTILE}} for n in range(3)])
    trained(begin, "tcp", both(9.0, 6.0, 0), both(5.0, 6.0, 5))

    source = write_report(tmp_path).read_text("utf-8")
    hover = (
        "setTimeout(() => echarts.getInstanceByDom(document.querySelector('#run-3 .plot, .plot'))"
        ".dispatchAction({type: 'showTip', seriesIndex: 0, dataIndex: 0}), 3000)"
    )
    (tmp_path / "hover.html").write_text(with_script(source, hover), "utf-8")

    for name in ("report.html", "hover.html"):
        dom = render(tmp_path / name)
        assert_drawn(dom.dom, dom.log)
    assert "<b>Episode 1, steps" in dom.dom


def test_the_time_left_of_a_live_run_does_not_count_its_start(begin):
    run = begin("paddle", **LIVE, budget=100, rollout=None)
    book = SimpleNamespace(ledger=run.ledger, name="paddle", budget=100, count_cached=True)
    progress = RunProgress(book, io.StringIO())
    progress.started -= 3600  # the first step waits until the library is imported and the server runs
    progress.after(run.add({}, 1.0))
    assert progress.seconds_left is None
    progress.after(run.add({}, 1.0))
    assert progress.seconds_left < 3600
