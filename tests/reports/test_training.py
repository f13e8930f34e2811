"""The report of a training run: the verdict, the curves, and episodes before and after."""

import math
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from loopwright.core.episode import ROOT, Episode
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.task import Task
from loopwright.core.trial import Result, Reward, Trial
from loopwright.ledger.groups import Groups
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.rollouts import rollouts
from loopwright.ledger.steps import Step, Steps
from loopwright.reports.kinds import read_run
from loopwright.reports.rollout.export import write_episodes, write_parquet_rows, write_rows, write_verl
from loopwright.reports.rollout.tokens import tokenizer_of
from loopwright.reports.training.digest import TrainingDigest, read_training, training_result, verdict
from loopwright.reports.training.page import chart_data
from tests.reports.test_rollouts import ABOUT, body, node, page

SIZE, TASKS = 4, 6
AGENT = {"type": "grpo", "steps": 20, "prompts_per_step": 1, "group_size": SIZE, "lr": 0.001, "seed": 1}


def episode(task: str, answer: str, reward: float, *, branches: int = 1) -> Episode:
    """An answer; with several branches, several answers to the same question."""
    question = node(0, "2+2=?", role="user")
    answers = [node(1, answer, -0.02 if place % 2 else -3.0) for place in range(branches)]
    return Episode(Task(task, ({"role": "user", "content": "2+2=?"},), "4", "sums"), (ROOT, question, *answers)).judged(
        Reward(reward, {"exact": reward})
    )


class Training:
    """The ledger of a training, as its trainer writes it."""

    def __init__(self, ledger: Ledger, **agent) -> None:
        self.ledger, self.steps, self.groups = ledger, Steps(ledger), Groups(ledger)
        self.trial = self.group = 0
        ledger.set_state("run", {"name": "learn", "rollout": ABOUT, "budget": None, "agent": {**AGENT, **agent}})

    def roll(self, action, episodes, *, evaluated: int | None = None) -> None:
        """A group of rollouts of a prompt."""
        self.group += 1
        trials = [Trial(self.trial + 1 + i, action, "", self.group, i, reserved_at=100.0) for i in range(len(episodes))]
        self.trial += len(episodes)
        if evaluated is None:
            self.groups.open(self.group, action["source"], trials)
        else:
            self.ledger.reserve(trials)
        for trial, one in zip(trials, episodes, strict=True):
            recorded = one if evaluated is None else replace(one, trainable=False, in_baseline=False)
            metrics = {"tokens": float(one.sampled), "turns": 1.0} if one.reward else {}
            result = Result(
                one.outcome, metrics, one.reason, one.fault, {}, reward=one.reward, episode=recorded.to_bytes()
            )
            self.ledger.commit(trial, result)

    def train(self, step: int, reward: float = 0.5, *, branches: int = 1, **numbers) -> None:
        """A step, and its group."""
        rewards = [reward - 0.1, reward + 0.1, reward - 0.2, reward + 0.2]
        answers = [episode(f"sums-{step}", f"train {step} got {r:.2f}", r, branches=branches) for r in rewards]
        self.roll({"source": "sums", "index": step, "task": f"sums-{step}"}, answers)
        self.groups.ready(self.group, step - 1)
        self.groups.take(1, step)
        self.groups.settle(step)
        self.note(step, reward=reward, **numbers)

    def note(self, step: int, **numbers) -> None:
        usual = {"entropy": 5 - step / 10, "grad_norm": 0.1 + step % 3, "kl": 0.0, "skipped": 0.0, "tokens": 100.0}
        times = {"rollout_s": 1.0, "train_s": 1.0}
        values = {name: value for name, value in {**usual, **times, **numbers}.items() if value != "missing"}
        self.steps.add("train", Step(step, 1000.0 + step, values))

    def examine(self, step: int, rewards, *, width: float = 0.125, faults: int = 0) -> None:
        """An evaluation: a rollout per held-out task."""
        for index, reward in enumerate(rewards):
            one = episode(f"held-{index}", f"examined after {step}: {reward:.2f}", reward)
            if index < faults:
                one = one.failed(Outcome.LOST, Fault.INFRA, "the worker is gone")
            action = {"source": "eval:sums", "index": index, "task": f"held-{index}", "evaluated": step}
            self.roll(action, [one], evaluated=step)
        scored = rewards[faults:]
        values = {"tasks": len(rewards), "rollouts": len(scored), "faults": faults}
        if scored:
            mean = sum(scored) / len(scored)
            values |= {"reward": mean, "reward_low": mean - width, "reward_high": mean + width}
            values |= {"pass@1": mean / 2, "pass@1_low": 0.0, "pass@1_high": mean}
        self.steps.add("eval", Step(step, 1000.0 + step, values))


@pytest.fixture
def training(tmp_path):
    """A training whose ledger stays open until the test ends."""
    (tmp_path / "learn").mkdir()
    with Ledger.create(tmp_path / "learn" / "ledger.db") as ledger:
        yield Training(ledger)


@pytest.fixture
def finished(training):
    """Twenty steps that improve every held-out task."""
    training.examine(0, [0.125] * TASKS)
    for step in range(1, 21):
        training.train(step, 0.2 + step / 40)
        if step % 10 == 0:
            training.examine(step, [0.1 + step / 40 + task / 100 for task in range(TASKS)])
    training.ledger.set_state("finished", True)
    return training


def test_the_page_starts_with_the_verdict(finished, tmp_path):
    text = body(page(tmp_path))
    verdict = re.search(r"<p class='verdict'>(.*?)</p>", text)[1]
    assert verdict.startswith(
        "On 6 held-out tasks the mean reward was 0.125 (95 %: 0 … 0.25) before training and 0.625"
    )
    assert "it got better" in verdict
    order = [text.index(mark) for mark in ("class='verdict'", ">Curves<", ">Episodes<", ">Settings<")]
    assert order == sorted(order)
    assert "pass@1" in text
    assert "chip good" in text


def test_evaluations_are_separate_from_training_rollouts(finished, tmp_path):
    digest = read_run(tmp_path / "learn")
    assert isinstance(digest, TrainingDigest)
    assert digest.rollouts.total.ended == 20 * SIZE
    assert digest.groups.count == 20
    assert list(digest.rollouts.sources) == ["sums"]
    assert [step.step for step in digest.evals] == [0, 10, 20]
    assert sum(digest.outcomes.values()) == 20 * SIZE


def test_evaluations_are_never_exported_as_training_rows(finished, tmp_path):
    import pyarrow.parquet as pq

    with Ledger.read(tmp_path / "learn" / "ledger.db") as ledger:
        examined = {one.number for one in rollouts(ledger) if one.evaluated is not None}
        assert len(examined) == 3 * TASKS
        for write in (write_rows, write_verl):
            lines = write(ledger, tmp_path).read_text().splitlines()
            assert len(lines) == 20 * SIZE
            assert not any("held-" in line for line in lines)
        assert not examined & set(pq.read_table(write_parquet_rows(ledger, tmp_path))["trial"].to_pylist())
        whole = write_episodes(ledger, tmp_path).read_text()
        assert whole.count('"evaluated":20') == TASKS


@pytest.mark.parametrize(
    ("after", "message"),
    [([0.9] * TASKS, "it got better"), ([0.0] * TASKS, "it got worse"), ([0.0, 0.2, 0.1] * 2, "may be chance")],
)
def test_a_change_within_chance_is_marked(training, after, message):
    training.examine(0, [0.1] * TASKS)
    training.examine(5, after)
    assert message in verdict(read_training(training.ledger))


@pytest.mark.parametrize(
    ("tasks", "message"), [(1, "1 task with a reward in both"), (5, "5 tasks with a reward in both"), (6, "got better")]
)
def test_a_few_tasks_prove_nothing(training, tasks, message, tmp_path):
    """Five coins all land alike once in sixteen throws."""
    training.examine(0, [0.0] * tasks)
    training.examine(5, [1.0] * tasks)
    digest = read_training(training.ledger)
    assert message in verdict(digest)
    assert (digest.change is None) == (tasks < 6)
    assert ("too few tasks to tell" in body(page(tmp_path))) == (tasks < 6)


def test_one_newly_solved_task_of_many_may_be_chance(training):
    """Changes of 0 and 1 are not shares, whose interval would exclude zero."""
    training.examine(0, [0.0] * 8)
    training.examine(5, [1.0] + [0.0] * 7)
    assert "may be chance" in verdict(read_training(training.ledger))


def test_only_tasks_that_both_evaluations_scored_are_compared(training):
    training.examine(0, [0.0, 0.0, *[0.5] * 6])
    training.examine(5, [0.0, 0.0, *[0.6] * 6], faults=2)
    digest = read_training(training.ledger)
    assert digest.change == pytest.approx((0.1, 0.1, 0.1))
    assert any(
        "2 rollouts of evaluations ended lost (fault: infra): the worker is gone" in line
        for line in training_result(digest)[1]
    )


def test_the_result_counts_each_reason_of_lost_rollouts(training):
    training.train(1)
    reasons = ["it gave NaN", "it gave NaN", "it gave None"]
    lost = [episode("sums-9", "x", 0.0).failed(Outcome.JUDGE_FAILED, Fault.JUDGE, reason) for reason in reasons]
    cut = replace(episode("sums-9", "x", 0.0), outcome=Outcome.TRUNCATED, fault=Fault.POLICY, reason="out of tokens")
    training.roll({"source": "sums", "index": 9, "task": "sums-9"}, [*lost, cut])
    lines = training_result(read_training(training.ledger))[1]
    [line] = [line for line in lines if "judge_failed" in line]
    assert line == "3 × judge_failed (fault: judge): 2 × it gave NaN; 1 × it gave None"
    assert not any("out of tokens" in line for line in lines), "what the policy does is in its reward"


def test_the_same_tasks_are_shown_before_and_after(finished, tmp_path):
    text = re.sub(r"<[^>]*>", "", body(page(tmp_path)))
    episodes = text[text.index("colour tokens by") : text.index("Training rollouts")]
    for task, reward in ((5, "0.65"), (0, "0.60")):  # the largest gain and the smallest
        first, second = (episodes.index(mark) for mark in (f"held-{task}", f"examined after 20: {reward}"))
        assert first < second
    assert "advantage +0.2, against a group mean of 0.225" in episodes
    assert "advantage −0.2, against a group mean of 0.7" in episodes
    assert "train 20 got 0.90" in episodes


def test_tokens_are_coloured_by_logprob_or_by_advantage(finished, tmp_path, render):
    text = re.sub(r"<meta http-equiv=[^>]*>", "", page(tmp_path))
    probe = """<script>for (const css of ["up2", "down2"]) document.documentElement.dataset[css] =
        getComputedStyle(document.querySelector(`.${css} .said span[title]`)).backgroundColor</script>"""
    by_advantage = text.replace("by-logprob' checked", "by-logprob'").replace("by-advantage'", "by-advantage' checked")
    shades = []
    for each in (text, by_advantage):
        (tmp_path / "probe.html").write_text(each + probe, "utf-8")
        shades.append(re.findall(r'data-(?:up|down)2="([^"]*)"', render(tmp_path / "probe.html").dom))
    (logprob, same), (better, worse) = shades
    assert logprob == same  # both were equally likely
    assert len({logprob, better, worse}) == 3


def test_single_rollouts_of_a_prompt_show_no_advantage(training, tmp_path):
    """As with PPO, whose baseline is a critic."""
    training.examine(0, [0.1] * TASKS)
    training.roll({"source": "sums", "index": 1, "task": "sums-1"}, [episode("sums-1", "alone", 1.0)])
    training.groups.ready(training.group, 0)
    training.groups.take(1, 1)
    training.note(1, reward=1.0)
    training.examine(5, [0.2] * TASKS)
    text = body(page(tmp_path))
    assert "examined after 5" in re.sub(r"<[^>]*>", "", text)
    assert "by-advantage" not in text
    assert "was learned from" not in text


def test_the_browser_draws_every_curve(finished, tmp_path, render):
    page(tmp_path)
    dom = render(tmp_path / "report.html").dom
    assert "data-error" not in dom
    charts = int(re.search(r'data-charts="(\d+)"', dom)[1])
    assert charts >= 5
    assert f'data-rendered="{charts}"' in dom


def test_an_unfinished_run_says_so(training, tmp_path):
    training.examine(0, [0.3] * TASKS)
    training.train(1)
    text = body(page(tmp_path))
    assert "it has not been measured again yet" in text
    assert "1 of 20" in text
    assert "in progress or interrupted" in text
    assert "loopwright resume" in text


def test_a_run_before_its_first_step_has_a_page(training, tmp_path):
    assert "no two steps have a reward yet" in body(page(tmp_path))


def test_without_held_out_tasks_there_is_no_verdict(training, tmp_path):
    for step in range(1, 5):
        training.train(step, step / 10)
    text = body(page(tmp_path))
    assert "went from 0.15 to 0.35 in 4 steps, which says little about other tasks. Add [run.eval] to know." in text


def test_an_evaluation_without_a_reward_is_not_zero(training):
    training.examine(0, [0.5] * 2, faults=2)
    digest = read_training(training.ledger)
    assert digest.measured == []
    assert verdict(digest).startswith("No evaluation has a reward")


def test_skipped_steps_are_reported(training, tmp_path):
    training.train(1)
    training.train(2, skipped=1.0, updates=0.0, grad_norm=None)
    training.note(3, skipped="missing")
    training.note(4, updates=0.0)
    text = body(page(tmp_path))
    assert "1 of 4 steps did not update the policy (non-finite loss or gradient): step 2." in text
    assert "2 of 4 steps had nothing to learn from: steps 3, 4." in text
    assert chart_data(read_training(training.ledger))["skipped"] == [2, 3, 4]


def test_a_failed_run_shows_why(training, tmp_path):
    training.train(1)
    training.ledger.set_state("failure", "3 steps in a row had a loss that is not finite")
    training.ledger.set_state("finished", True)
    text = body(page(tmp_path))
    assert "chip bad" in text
    assert "3 steps in a row" in text


def test_branches_of_an_episode_are_all_shown(training, tmp_path):
    training.train(1, branches=3)
    assert "branch 3 of 3" in body(page(tmp_path))


def test_ten_thousand_steps_make_a_small_page(training, tmp_path):
    training.train(1)
    with training.ledger.transaction.held:
        for step in range(2, 10_001):
            training.note(step, reward=step / 10_000, loss=1.0 / step)
    chart = chart_data(read_training(training.ledger))
    for curve in chart["curves"]:
        for line in curve["lines"]:
            assert len(line["rows"]) <= 240
    reward = chart["curves"][0]["lines"][0]["rows"]
    assert (reward[0][0], reward[-1][4]) == (1, 10_000)
    assert all(low <= mean <= high for _, mean, low, high, _ in reward)
    assert len(page(tmp_path)) < 1_200_000  # 720 kB of which is the chart library


def test_constant_numbers_are_listed_without_a_curve(finished, tmp_path):
    chart = chart_data(read_training(finished.ledger))
    assert chart["level"]["KL"] == 0.0
    assert "KL" not in [curve["title"] for curve in chart["curves"]]
    assert "The same in every step: KL 0" in body(page(tmp_path))


def test_kl_to_the_sampler_and_to_the_reference_have_different_names(training):
    for step in (1, 2):
        training.note(step, reward=0.1, kl="missing", mismatch_kl=0.1 * step)
    curves = {curve["title"]: curve["meaning"] for curve in chart_data(read_training(training.ledger))["curves"]}
    assert "KL" not in curves
    assert "from the sampling policy" in curves["mismatch"]
    assert "rollouts without an advantage" in curves["mismatch"]


def test_an_evaluation_whose_interval_is_unknown_is_drawn(training, tmp_path):
    for step in (0, 5):
        training.examine(step, [0.5], width=math.nan)
    held_out = chart_data(read_training(training.ledger))["curves"][0]["lines"][-1]["rows"]
    assert held_out == [[0, 0.5, 0.5, 0.5, 0], [5, 0.5, 0.5, 0.5, 5]]
    assert "95 %: unknown" in body(page(tmp_path))


def test_custom_numbers_of_a_trainer_have_curves_too(training):
    for step in (1, 2):
        training.note(step, reward=0.1, value_loss=1.0 / step)
    assert "value loss" in [curve["title"] for curve in chart_data(read_training(training.ledger))["curves"]]


def test_text_from_tasks_and_models_is_never_markup(training, tmp_path):
    bad = episode("<script>alert(1)</script>", "<img src=x onerror=alert(1)>", 0.5)
    training.roll({"source": "<b>s", "index": 1, "task": bad.task.id}, [bad, episode("x", "y", 0.1)])
    training.groups.ready(1, 0)
    training.groups.take(1, 1)
    training.note(1, reward=0.3, **{"<i>own</i>": 1.0})
    training.note(2, reward=0.3, **{"<i>own</i>": 2.0})
    text = page(tmp_path)
    assert "<script>alert" not in text
    text = body(text)
    assert "<img src" not in text
    assert "<i>own" not in text


def test_the_result_names_the_policy_and_both_intervals(finished, tmp_path):
    (tmp_path / "learn" / "policy").mkdir()
    event, lines = training_result(read_training(finished.ledger))
    assert lines[0].startswith("20 of 20 steps. On 6 held-out tasks")
    assert "pass@1 0.0625 (95 %: 0 … 0.125) → 0.312 (0 … 0.625)" in lines
    assert lines[-1] == f"policy: {tmp_path / 'learn' / 'policy'}"
    assert [measured["step"] for measured in event["held_out"]] == [0, 20]
    assert event["change"]["low"] > 0


def test_reports_never_import_torch():
    code = "import sys, loopwright.reports.page, loopwright.cli.progress; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_trained_policy_provides_its_tokenizer(tmp_path):
    assert tokenizer_of({"type": "vllm", "model": "someone/large"}, tmp_path) is None
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "byte_tokenizer").write_text("258\n")
    assert tokenizer_of({"type": "vllm", "model": "someone/large"}, tmp_path) is not None
    assert tokenizer_of({"type": "transformers", "model": "tiny"}) is not None
