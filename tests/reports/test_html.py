"""The report matches the ledgers: the result first, every failure, and no foreign markup."""

import json
import re
import time
from html import unescape
from pathlib import Path
from random import Random

import pytest

from loopwright.core.outcome import Fault, Outcome
from loopwright.reports.page import code, write_report
from loopwright.reports.search.charts import DRAWN
from tests.reports.ledgers import action_of, gflops, logs

HOSTILE = "</script><img src=x onerror=\"document.documentElement.dataset.owned='1'\"><!--'&"


def page(output: Path) -> str:
    return write_report(output).read_text("utf-8")


def words(output: Path, source: str = "") -> str:
    """The visible text, in one line."""
    body = re.search(r"<main>(.*)</main>", source or page(output), re.DOTALL)[1]
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body)))


def chart(output: Path, source: str = "") -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', source or page(output), re.DOTALL)[1])[0]


# -- the answer -----------------------------------------------------------------------------------------------------


def test_the_best_action_comes_first_with_its_gain(begin, tmp_path):
    run = begin(budget=3, agent={"type": "tpe", "start": "first"})
    run.add({"tile": 8, "opt": "-O0"}, 2.0)
    run.add({"tile": 64, "opt": "-O3 -march=native"}, 9.0, metrics={"gflops": 9.0, "seconds": 0.25})
    run.add({"tile": 128, "opt": "-O2"}, 4.0)

    text = words(tmp_path)

    assert "Best gflops 9 GFLOP/s" in text
    assert "4.5 × against the pinned configuration (2 GFLOP/s, trial 1)" in text
    assert "opt -O3 -march=native" in text
    assert "seconds 0.25 s" in text
    assert "finished" in text
    assert "done 3 of 3 ok 3 failed 0 cached 0" in text
    assert text.index("Best gflops 9") < text.index("done 3")


def test_repeats_are_averaged_with_their_interval(begin, tmp_path):
    run = begin(repeats=2, objectives=["−seconds"])
    for group, action, rewards in ((1, {"tile": 8}, (-2.0, -2.0)), (2, {"tile": 16}, (-0.9, -1.1))):
        for repeat, reward in enumerate(rewards):
            run.add(action, reward, group=group, repeat=repeat)

    text = words(tmp_path)

    assert "Best seconds 1 s 95 % interval 0.28066 to 2.2706, 2 measurements" in text
    assert "first ok trial" not in text, "a random first trial is no baseline"
    assert "trials 3, 4" in text
    # The line moves when a group of repeats is complete, never for a single lucky trial.
    assert chart(tmp_path)["lines"][0][0]["steps"] == [[2, 2.0], [4, 1.0], [4, 1.0]]


def test_an_expression_has_no_unit(begin, tmp_path):
    begin(objectives=["goodput - 0.03 * rtt_ms"]).add({"tile": 8}, 9.0)

    assert "Best goodput - 0.03 * rtt_ms 9 measured once The only trial" in words(tmp_path)


def test_several_objectives_give_a_front(begin, tmp_path):
    run = begin(objectives=["tokens_per_s", "−ttft_s"])
    run.add({"tile": 8}, 10.0, -1.0)
    run.add({"tile": 16}, 20.0, -2.0)
    run.add({"tile": 32}, 5.0, -3.0)

    text, data = words(tmp_path), chart(tmp_path)

    assert "2 unbeaten actions" in text
    assert "20 /s 2 s 16 trial 2" in text
    assert data["answer"] == [0, 1]
    assert data["rewards"] == [[10.0, 20.0, 5.0], [1.0, 2.0, 3.0]]
    assert "data-chart='front'" in page(tmp_path)


def test_a_confirmed_front_stands_beside_its_baseline(begin, tmp_path):
    run = begin(objectives=["mb_per_s", "−ttft_s"])
    for tile, speed, wait in ((8, 100_000.5, 3.0), (16, 200_000.5, 2.0)):
        run.add({"tile": tile}, speed, -wait)
    for tile, speed, wait in ((8, 100_000.5, 3.0), (16, 200_000.5, 2.0)) * 2:
        run.add({"tile": tile}, speed, -wait, phase="confirm")

    text = words(tmp_path)

    assert "200 000 MB/s 200 000 to 200 000, 2 measurements 2 s" in text
    assert "3 s 3 to 3, 2 measurements 8 the baseline: trials 3, 5" in text


def test_a_trial_that_was_stopped_early_has_not_failed(begin, tmp_path):
    run = begin()
    run.add({"tile": 4}, outcome=Outcome.STOPPED, reason="asha: loss = nan at step 3")
    assert "No trial has a result. All that ended were stopped early" in words(tmp_path)
    for reward in (1.0, 2.0):
        run.add({"tile": 8}, reward)
    run.add({"tile": 16}, outcome=Outcome.STOPPED, reason="asha: loss = 3 at step 9")

    assert "stopped early" in words(tmp_path)
    assert "<i class='tick'></i>failed" not in page(tmp_path)


@pytest.mark.parametrize("conditions", [False, True])
def test_regimes_give_one_action_for_all_or_one_for_each(begin, tmp_path, conditions):
    run = begin(parameters={"tile": [8, 16], "load": ["low", "high"]}, conditions_on_regime=conditions)
    for load, tile, reward in (("high", 8, 5.0), ("high", 16, 4.0), ("low", 8, 6.0), ("low", 16, 9.0)):
        run.add({"tile": tile}, reward, regime={"load": load})

    text, data = words(tmp_path), chart(tmp_path)

    assert data["regimes"] == ["load = low", "load = high"], "in the order of the scenario"
    assert "low 9 GFLOP/s (measured once) 16 trial 4 high 5 GFLOP/s (measured once) 8 trial 1" in text
    if conditions:
        assert "The best action for each of 2 regimes" in text
    else:
        assert "Best action over 2 of 2 regimes: mean gflops 6.5 GFLOP/s" in text
        assert "single trials from 4 to 9" in text


def test_an_action_measured_under_one_regime_of_several_says_so(begin, tmp_path):
    run = begin()
    run.add({"tile": 8}, 1.0, regime={"load": 1})
    run.add({"tile": 16}, 2.0, regime={"load": 2})

    assert "Best gflops, measured only under load = 2; 2 regimes were met 2 GFLOP/s" in words(tmp_path)


def test_a_run_without_success_starts_with_the_commonest_reason(begin, tmp_path):
    run = begin(budget=4)
    run.add({"tile": 8}, outcome=Outcome.TIMEOUT, reason="timed out after 20 s")
    for _ in range(3):
        run.add({"tile": 8}, outcome=Outcome.CRASHED, reason="./bench: not found")

    text = words(tmp_path)

    assert "No trial succeeded. Most often the outcome was crashed (fault: workload; 3 of 4 trials)" in text
    assert text.index("./bench: not found") < text.index("done 4")
    assert "without a result" in text


# -- failures, progress, provenance ---------------------------------------------------------------------------------


def test_failures_are_listed_with_links_to_the_logs_that_exist(begin, tmp_path):
    run = begin("my run #1")
    run.add({"tile": 8}, 1.0)
    run.add({"tile": 8}, outcome=Outcome.CRASHED, reason="exit code 3")
    run.add({"tile": 9}, outcome=Outcome.CRASHED, reason="exit code 3")
    run.add({"tile": 9}, outcome=Outcome.LOST, reason="the node went away", fault=Fault.INFRA)
    logs(tmp_path, "my run #1", 2)

    text, source = words(tmp_path), page(tmp_path)

    assert "crashed workload 2 exit code 3 2 × · trials 2 ( stdout , stderr ), 3" in text
    assert "lost infra 1 the node went away" in text
    links = re.findall(r"href='(\./[^']+)'", source)
    assert links == ["./my%20run%20%231/trials/2/stdout", "./my%20run%20%231/trials/2/stderr"]


def test_an_unfinished_run_says_how_to_continue(begin, tmp_path):
    run = begin(budget=10)
    run.add({"tile": 8}, 1.0)
    run.start({"tile": 16})

    text = words(tmp_path)

    assert f"In progress or interrupted; resume with loopwright resume {tmp_path}" in text
    assert "done 1 of 10" in text
    assert "in flight or aborted 1" in text


def test_a_run_that_raised_shows_the_traceback(begin, tmp_path):
    run = begin()
    run.add({"tile": 8}, 1.0)
    run.ledger.set_state("failure", "Traceback (most recent call last):\n  in select_action\nIndexError: <oops>\n")

    text = words(tmp_path)

    assert "The run ended with an error: IndexError: <oops> Traceback (most recent call last): in select_action" in text
    assert text.index("IndexError") < text.index("Best gflops")


def test_the_provenance_is_shown(begin, tmp_path):
    begin().add({"tile": 8}, 1.0)

    text = words(tmp_path)

    assert "matmul-flags" in text
    for fact in ("git 4f2a91c", "host node17", "memory 64 GiB", "started 2025-06-15 15:06:40 UTC", "tile <= size"):
        assert fact in text


def test_several_runs_are_compared_at_the_top(campaign, begin, tmp_path):
    campaign("one", 10)
    begin("two", budget=2)

    text = words(tmp_path)

    assert text.index("no trial yet") < text.index("Best gflops")
    assert "No trial has been started yet." in text


# -- charts ---------------------------------------------------------------------------------------------------------


def test_parameters_keep_their_kind_and_fixed_ones_have_no_chart(campaign, tmp_path):
    campaign(trials=60)

    kinds = {axis["name"]: axis["kind"] for axis in chart(tmp_path)["parameters"]}

    assert kinds == {
        "opt": "category",
        "tile": "log",
        "learning_rate": "value",
        "size": "category",
        "OMP_NUM_THREADS": "category",
    }


def test_a_few_terrible_trials_do_not_flatten_the_rest(begin, tmp_path):
    run = begin(objectives=["−seconds"])
    for n in range(40):
        run.add({"tile": n}, -5000.0 if n == 7 else -1.0 - n / 40)

    assert chart(tmp_path)["floors"] == [pytest.approx(2.1, abs=0.1)]
    assert "beyond the axis" in words(tmp_path)


def test_twenty_thousand_trials_are_thinned_but_the_line_is_exact(begin, tmp_path):
    run, random = begin(), Random(1)
    rewards = []
    for _ in range(20_000):
        action = {"tile": random.random()}
        rewards.append(gflops(action_of(random), random))
        run.add(action, rewards[-1])

    started = time.perf_counter()
    source = page(tmp_path)

    assert time.perf_counter() - started < 15, "about 2 s on a laptop"
    data, text = chart(tmp_path, source), words(tmp_path, source)
    best, records = float("-inf"), []
    for number, reward in enumerate(rewards, 1):
        if reward > best:
            best = reward
            records.append([number, reward])
    assert data["lines"][0][0]["steps"] == [*records, [20_000, best]]
    assert {number for number, _ in records} <= set(data["number"])
    assert len(data["number"]) < DRAWN
    assert "3 000 of 20 000 ok trials are drawn" in text
    assert len(source) < 1_500_000


# -- old, damaged and hostile ledgers -------------------------------------------------------------------------------


def test_a_ledger_without_any_state_is_still_reported(begin, tmp_path):
    run = begin("old", state=False)
    run.add({"x": 1.5, "flag": True}, 3.0, 4.0)
    run.add({"x": 2.5, "flag": False}, 2.0, 3.0)

    text = words(tmp_path)

    assert "One action is best in all 2 objectives." in text
    assert "reward objective 2 x flag trial 3 4 1.5 true trial 1" in text


@pytest.mark.parametrize("about", [{"parameters": [1]}, {"objectives": 7}, {"agent": None}, {"budget": "many"}])
def test_malformed_state_does_not_break_the_report(begin, tmp_path, about):
    begin(**about).add({"tile": 8}, 1.0)

    assert "The only trial that succeeded." in words(tmp_path)


def test_damaged_and_missing_ledgers_become_notes_and_hide_nothing(begin, tmp_path):
    begin("good").add({"tile": 8}, 1.0)
    begin("empty")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "ledger.db").write_bytes(b"junk" * 1000)
    (tmp_path / "lost" / "trials").mkdir(parents=True)
    (tmp_path / "unrelated").mkdir()

    text = words(tmp_path)

    assert "torn could not be read:" in text
    assert "is damaged" in text
    assert "lost could not be read: no ledger at" in text
    assert "Best gflops 1" in text
    assert "unrelated" not in text


def test_trials_before_the_damage_are_kept(begin, tmp_path):
    run = begin("half")
    run.add({"tile": 8}, 1.0)
    run.add({"tile": 16}, 2.0)
    with run.ledger.transaction as connection:
        connection.execute("UPDATE trials SET reward_detail = '{' WHERE number = 2")
    begin("whole").add({"tile": 8}, 5.0)

    text = words(tmp_path)

    assert "Only 1 trials could be read" in text
    assert "Best gflops 1" in text
    assert "Best gflops 5" in text


def test_an_inconsistent_ledger_does_not_hide_other_runs(begin, tmp_path):
    run = begin("mixed")
    run.add({"tile": 8}, 1.0)
    run.add({"tile": 8}, 1.0, 2.0)
    begin("whole").add({"tile": 8}, 5.0)

    text = words(tmp_path)

    assert "mixed could not be shown" in text
    assert "Best gflops 5" in text


def test_an_empty_output_directory_has_a_page(tmp_path):
    assert "no run was found here" in words(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def hostile(begin, tmp_path: Path) -> None:
    run = begin(
        "a" + HOSTILE.replace("/", "∕"), objectives=[HOSTILE], parameters={HOSTILE: [HOSTILE, "b"], "c": [1, 2]}
    )
    for n in range(6):
        action, regime = {HOSTILE: HOSTILE if n % 2 else "b", "c": 1 + n % 2}, {"r" + HOSTILE: HOSTILE + str(n % 3)}
        run.add(action, float(n), regime=regime, metrics={HOSTILE: 1.0}, usage={"wall_s": 1.0})
    logs(tmp_path, run.ledger.path.parent.name, 7)
    run.add({HOSTILE: "b"}, outcome=Outcome.CRASHED, reason=HOSTILE)
    run.ledger.set_state("failure", HOSTILE)
    run.ledger.set_state("provenance", {"scenario": HOSTILE, "git": HOSTILE, "host": HOSTILE})


def test_foreign_text_never_becomes_markup(begin, tmp_path):
    hostile(begin, tmp_path)

    source = page(tmp_path)

    assert "<img" not in source.replace(Path(__file__).name, "").split("<script>")[0]
    assert source.count("</script>") == 3
    assert HOSTILE in words(tmp_path)
    assert chart(tmp_path)["labels"] == [HOSTILE]


# -- in a browser ---------------------------------------------------------------------------------------------------


def assert_drawn(dom: str, log: str) -> None:
    root = re.search(r"<html[^>]*>", dom)[0]
    assert "data-error" not in root, root
    assert "data-owned" not in root, "foreign text was executed"
    assert "CONSOLE" not in log, log
    rendered, charts = (int(re.search(rf'data-{name}="(\d+)"', root)[1]) for name in ("rendered", "charts"))
    assert rendered == charts == dom.count("<svg") > 0


def test_it_renders_in_a_browser_without_errors(campaign, begin, tmp_path, render):
    campaign("single", 60)
    run, random = begin("several", objectives=["tokens_per_s", "−ttft_s", "−cost"]), Random(2)
    for n in range(40):
        run.add(action_of(random), random.random(), -random.random(), -random.random() * 1e6 ** (n % 20 == 0))
    run = begin("regimes", repeats=2)
    for n in range(40):
        run.add(action_of(random), random.random(), regime={"load": n % 4}, group=n // 2 + 1, repeat=n % 2)
    begin("one").add({"tile": 8}, 1.0)
    hostile(begin, tmp_path)

    dom = render(write_report(tmp_path))

    assert_drawn(dom.dom, dom.log)


def with_script(source: str, script: str) -> str:
    """The page with one more script, which its content policy would block."""
    head, _, tail = re.sub(r"<meta http-equiv[^>]*>", "", source).rpartition("</body>")
    return f"{head}<script>{script}</script></body>{tail}"


def test_hovering_shows_the_action_as_text(begin, tmp_path, render):
    hostile(begin, tmp_path)
    hover = "echarts.getInstanceByDom(document.querySelector('.plot')).dispatchAction({0})"
    script = hover.format("{type: 'showTip', seriesIndex: 0, dataIndex: 0}")
    (tmp_path / "hover.html").write_text(with_script(page(tmp_path), f"setTimeout(() => {script}, 3000)"), "utf-8")

    dom = render(tmp_path / "hover.html")

    assert_drawn(dom.dom, dom.log)
    tip = re.search(r'<div class="tip">(.*?)</div>', dom.dom, re.DOTALL)[1]
    assert "<b>Trial 1</b>" in tip
    assert "<dt>c</dt><dd>1</dd>" in tip
    assert "&lt;img src=x" in tip
    assert "<img" not in tip


@pytest.mark.parametrize("width", [400, 1200])
def test_the_page_is_never_wider_than_the_window(campaign, begin, tmp_path, render, width):
    campaign("a-name-without-any-place-to-break-" * 4, 40)
    hostile(begin, tmp_path)
    report = "setTimeout(() => parent.postMessage(document.documentElement.scrollWidth, '*'), 5000)"
    (tmp_path / "copy.html").write_text(with_script(page(tmp_path), report), "utf-8")
    # A window has a minimum width, a frame has not.
    (tmp_path / "frame.html").write_text(
        f"<iframe src='copy.html' style='width: {width}px; height: 2000px; border: 0'></iframe>"
        "<script>onmessage = (event) => { document.body.dataset.width = event.data }</script>"
    )

    dom = render(tmp_path / "frame.html")

    assert int(re.search(r'data-width="(\d+)"', dom.dom)[1]) <= width


def test_a_script_error_is_detected(campaign, tmp_path, render):
    campaign(trials=5)
    source = re.sub(r"script-src [^\"]*", "script-src 'unsafe-inline'", page(tmp_path))
    (tmp_path / "broken.html").write_text(source.replace("drawAll(figures);", "drawAll(nothing);"), "utf-8")

    with pytest.raises(AssertionError):
        assert_drawn(*vars(render(tmp_path / "broken.html")).values())


def test_names_between_backticks_are_code_and_everything_else_is_escaped():
    assert code("read `loopwright episodes <x>`, or `not & this") == (
        "read <code>loopwright episodes &lt;x&gt;</code>, or `not &amp; this"
    )
