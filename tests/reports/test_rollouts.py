"""The report of a rollout run: rewards, faults, groups, phases, and samples to read."""

import re
from dataclasses import replace

import pytest

from loopwright.core.episode import ROOT, Attempt, Episode, Node, Span
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.task import Task
from loopwright.core.trial import Result, Reward, Trial
from loopwright.ledger.groups import Groups
from loopwright.ledger.ledger import Ledger
from loopwright.reports.kinds import read_run
from loopwright.reports.page import write_report
from loopwright.reports.rollout.digest import RolloutDigest, read_rollouts, rollout_result
from loopwright.reports.rollout.page import histogram
from loopwright.reports.rollout.tokens import token_texts, tokenizer_of

ABOUT = {
    "tasks": ["arith", "riddles"],
    "loop": {"type": "tools"},
    "judger": {"type": "composed"},
    "produce": {"type": "async"},
    "engine": {"type": "scripted"},
    "group_size": 4,
}
SIZE = 4


def node(parent: int, text: str, logprob: float | None = None, role: str = "assistant") -> Node:
    opening = f"<{role}>".encode() if logprob is not None else b""
    ids = (*opening, *text.encode())
    if logprob is None:
        return Node(parent, {"role": role, "content": text}, ids, (0.0,) * len(ids))
    logprobs = (*(0.0,) * len(opening), *(logprob,) * (len(ids) - len(opening)))
    return Node(parent, {"role": role, "content": text}, ids, logprobs, (Span(len(opening), len(ids), 0),), "stop")


def episode(number: int, source: str, exact: float, answer: str = "It is 4.") -> Episode:
    task = Task(f"{source}-{number % 7}", ({"role": "user", "content": "2+2=?"},), "4", source)
    question, tool = node(0, "2+2=?", role="user"), node(2, answer, role="tool")
    nodes = (ROOT, question, node(1, answer, -0.02), tool, node(3, "four", -6.0))
    rollout = Episode(
        task, nodes, attempts=(Attempt(0.0, {"queue": 0.01, "generate": 0.4, "loop": 0.5, "judge": 0.1}),)
    )
    length = -0.001 * rollout.sampled
    return rollout.judged(Reward(exact + length, {"exact": exact, "length": length}))


def store(ledger: Ledger, groups: Groups, group: int, episodes: list[Episode], first: int) -> None:
    source = episodes[0].task.data_source
    trials = [
        Trial(first + i, {"source": source, "index": group, "task": one.task.id}, "", group, i, reserved_at=100.0)
        for i, one in enumerate(episodes)
    ]
    groups.open(group, source, trials)
    for trial, one in zip(trials, episodes, strict=True):
        usage = {f"{name}_s": seconds for name, seconds in one.attempts[-1].phases_s.items()}
        metrics = {"tokens": float(one.sampled), "turns": float(one.turns)} if one.reward else {}
        result = Result(one.outcome, metrics, one.reason, one.fault, usage, reward=one.reward, episode=one.to_bytes())
        ledger.commit(trial, result)


def failed_episode(
    one: Episode, *, outcome: Outcome = Outcome.LOST, fault: Fault = Fault.INFRA, reason: str = "gone"
) -> Episode:
    return one.failed(outcome, fault, reason)


@pytest.fixture
def rolled(tmp_path):
    """Writes the ledger of a rollout run with this many groups, with some failed rollouts."""

    def rolled(groups: int = 12, answer: str = "It is 4.", name: str = "collect"):
        (tmp_path / name).mkdir()
        with Ledger.create(tmp_path / name / "ledger.db") as ledger:
            budget = groups * SIZE
            ledger.set_state("run", {"name": name, "rollout": ABOUT, "budget": budget, "agent": {"type": "collect"}})
            ledger.set_state("finished", True)
            table = Groups(ledger)
            for group in range(1, groups + 1):
                source = ("arith", "riddles")[group % 3 == 0]
                members = [episode(group, source, float((group + i) % 3 == 0), answer) for i in range(SIZE)]
                if group == 2:
                    members[0] = failed_episode(
                        members[0], outcome=Outcome.JUDGE_FAILED, fault=Fault.JUDGE, reason="<i>down</i>"
                    )
                if group == 3:
                    again = Attempt(0.0, {"queue": 0.1}, Outcome.LOST)
                    members[1] = replace(failed_episode(members[1]), attempts=(again, again))
                    members[2] = replace(members[2], attempts=(again, *members[2].attempts))
                if group == 4:
                    members = [episode(group, source, 1.0, answer)] * SIZE
                if group == 5:
                    members[0] = replace(members[0], outcome=Outcome.TRUNCATED, fault=Fault.POLICY, reason="too long")
                store(ledger, table, group, members, 1 + (group - 1) * SIZE)
                if group == 4:
                    table.close(group, "filtered")
                else:
                    table.ready(group, 0)
            table.take(groups - 2, 1)
            table.settle(1)
        return tmp_path

    return rolled


def page(output) -> str:
    return write_report(output).read_text("utf-8")


def body(text: str) -> str:
    return text[text.index("<main>") : text.index("</main>")]


def test_the_digest_matches_the_ledger(rolled):
    digest = read_run(rolled() / "collect")
    assert isinstance(digest, RolloutDigest)
    assert (digest.count, digest.succeeded, digest.unscored) == (48, 46, 2)
    assert dict(digest.rollouts.faults) == {"judge": 1, "infra": 1, "policy": 1}
    assert digest.groups.statuses == {"trained": 10, "filtered": 1, "ready": 1}
    assert (digest.groups.equal, digest.groups.count) == (1, 12)
    assert (digest.retried.first, digest.retried.recovered) == ({"lost": 2}, 1)
    assert digest.complete
    total = digest.rollouts.total
    assert total.mean == pytest.approx(sum(total.part_means.values()))


def test_rollouts_without_a_reward_are_in_no_mean(rolled):
    digest = read_run(rolled() / "collect")
    assert len(digest.rollouts.rewards) == 46
    assert digest.rollouts.total.mean == pytest.approx(sum(digest.rollouts.rewards) / 46)
    assert digest.rollouts.sources["riddles"].ended - digest.rollouts.sources["riddles"].count == 1


def test_the_result_is_described_in_words(rolled):
    with Ledger.read(rolled() / "collect" / "ledger.db") as ledger:
        event, lines = rollout_result(read_rollouts(ledger))
    assert re.fullmatch(
        r"48 rollouts of 12 prompts, mean reward [\d.]+ \(exact [\d.]+, length −[\d.]+\), 2 without a reward", lines[0]
    )
    assert event["without_reward"] == 2
    assert any("judge_failed (fault: judge)" in line for line in lines)


def test_the_page_shows_rewards_faults_groups_phases_and_tasks(rolled):
    text = body(page(rolled()))
    for title in ("Rewards", "Distributions", "Rewards by task source", "Outcomes and faults", "Groups"):
        assert f"<h3>{title}</h3>" in text
    for title in ("Time per phase", "Hardest tasks", "Easiest tasks", "Samples"):
        assert f"<h3>{title}</h3>" in text
    for phrase in ("Mean reward of 46 rollouts", "never a zero", "scored, trained on", "took a second attempt"):
        assert phrase in text
    for phase in ("queue", "generate", "other", "judge"):
        assert f"<b>{phase}</b>" in text
    assert "Best" not in re.sub(r"<b>Best</b>", "", text)
    assert "&lt;i&gt;down&lt;/i&gt;" in text
    assert "<i>down" not in text


def test_samples_shade_tokens_by_probability_and_dim_inserted_ones(rolled):
    text = body(page(rolled()))
    assert text.count("<details class='sample' open>") == 4
    assert "<span class='given'>&lt;assistant&gt;</span>" in text
    assert "<span class='p0' title='logprob −0.02, p 0.98'>I</span>" in text
    assert "<span class='p4' title='logprob −6, p 0.00248'>f</span>" in text


def test_hostile_answers_stay_text(rolled):
    output = rolled(answer="</span><script>alert(1)</script>")
    text = body(page(output))
    assert "<script>" not in text
    assert "<span class='given'>&lt;/span&gt;&lt;script&gt;alert(1)" in text


def test_a_run_that_has_just_started_is_shown(tmp_path):
    (tmp_path / "collect").mkdir()
    with Ledger.create(tmp_path / "collect" / "ledger.db") as ledger:
        ledger.set_state("run", {"name": "collect", "rollout": ABOUT, "budget": 8})
        ledger.reserve([Trial(1, {"source": "arith", "index": 0, "task": "a"}, "", 1)])
    text = body(page(tmp_path))
    assert "No rollout has ended yet." in text
    assert "could not be shown" not in text


def test_a_run_without_any_reward_says_so(tmp_path):
    (tmp_path / "collect").mkdir()
    with Ledger.create(tmp_path / "collect" / "ledger.db") as ledger:
        ledger.set_state("run", {"name": "collect", "rollout": ABOUT})
        bad = replace(failed_episode(episode(1, "arith", 0.0)), attempts=(Attempt(0.0, {"queue": 0.1}),))
        store(ledger, Groups(ledger), 1, [bad, bad], 1)
    text = body(page(tmp_path))
    assert "No rollout has a reward." in text
    assert "could not be shown" not in text


def test_the_browser_draws_every_chart(rolled, render):
    output = rolled()
    write_report(output)
    dom = render(output / "report.html").dom
    charts = int(re.search(r'data-charts="(\d+)"', dom)[1])
    assert charts == 5
    assert f'data-rendered="{charts}"' in dom
    assert "data-error" not in dom


def test_many_rollouts_are_thinned_and_the_page_stays_small(tmp_path):
    many = 20_000
    (tmp_path / "collect").mkdir()
    with Ledger.create(tmp_path / "collect" / "ledger.db") as ledger:
        ledger.set_state("run", {"name": "collect", "rollout": ABOUT, "budget": many})
        Groups(ledger)
        with ledger.transaction as connection:
            connection.executemany(
                "INSERT INTO trials (number, grp, repeat, action, key, regime, outcome, reward, reward_detail, "
                "metrics, usage, reserved_at, finished_at) "
                "VALUES (?, ?, 0, ?, '', '{}', 'ok', ?, ?, ?, '{\"judge_s\":0.1}', 1, 2)",
                (
                    (n, n // 8, f'{{"source":"s","index":{n % 500},"task":"t{n % 500}"}}', n % 10 / 10,
                     '{"parts":{"exact":0.1},"more":[]}', f'{{"tokens":{n % 300},"turns":{1 + n % 4}}}')
                    for n in range(1, many + 1)
                ),
            )  # fmt: skip
    text = page(tmp_path)
    digest = read_run(tmp_path / "collect")
    assert len(digest.rollouts.points) <= 4000
    assert digest.rollouts.total.count == many
    assert len(text) < 2_000_000


@pytest.mark.parametrize(
    "values", [[1.0], [0.0, 0.0], [-0.2, 0.9, 0.1], [3.0, 500.0, 7.0], [1e-9, 2e-9], [5e12, -5e12]]
)
def test_a_histogram_counts_each_value_once(values):
    bins = histogram(values)
    assert sum(bins["counts"]) == len(values)
    assert len(bins["counts"]) == len(bins["from"]) == len(bins["names"]) <= 70


def test_tokens_without_a_known_tokenizer_are_shown_by_id():
    assert tokenizer_of({"type": "elsewhere"}) is None
    one = node(0, "hi", -0.1)
    assert [piece.text for piece in token_texts(one, None)][1:] == ["⟨104⟩", "⟨105⟩"]
    assert [piece.level for piece in token_texts(one, tokenizer_of({"type": "scripted"}))] == [None, 0, 0]


def test_an_unknown_id_does_not_break_the_sample():
    odd = Node(0, {"role": "assistant", "content": ""}, (999_999,), (-0.1,), (Span(0, 1, 0),))
    (piece,) = token_texts(odd, tokenizer_of({"type": "scripted"}))
    assert (piece.logprob, bool(piece.text)) == (-0.1, True)
