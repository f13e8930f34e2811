"""`loopwright episodes`, `rejudge` and `export` on rollouts, and what `run` prints for them."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.command_line import run_verb

from loopwright.core.episode import ROOT, Attempt, Episode, Node, Span
from loopwright.core.outcome import Fault, Outcome
from loopwright.core.task import Task
from loopwright.core.trial import Result, Reward, Trial
from loopwright.ledger.ledger import Ledger
from loopwright.ledger.rollouts import rejudgements, rollouts
from loopwright.scenario.dispatch import hold

TASKS = '''
def sums():
    return [{"id": f"sum-{n}", "prompt": f"{n}+1=", "label": str(n + 1)} for n in range(5)]

def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

def policy(prompt, random):
    last = prompt.rsplit("<|im_start|>", 2)[-2]
    if last.startswith("tool"):
        return "It is " + last.removeprefix("tool").split("<|im_end|>")[0].strip()
    n = last.split("\\n")[1].split("+")[0]
    if random.random() < 0.4:
        return "\\x1b[31mno idea\\x1b[0m"
    return '<tool_call>{"name": "add", "arguments": {"a": %s, "b": 1}}</tool_call>' % n

def exact(answer, label):
    return float(answer.endswith(label))

def upside_down(answer, label):
    return 1.0 - answer.endswith(label)

def moody(answer):
    if "idea" in answer:
        raise RuntimeError("no comment")
    return 2.0

def ranks(payloads):
    return [float(len(p.answer)) for p in payloads]
'''
SCENARIO = """
name = "sums"
[[run]]
name = "collect"
agent = { type = "collect", trials = 24, group_size = 4, seed = 3 }
[run.rollout]
tasks = { type = "python", function = "parts:sums" }
loop = { type = "tools", tools = ["parts:add"], max_turns = 4 }
[run.rollout.judger]
type = "composed"
parts = [{ type = "python", function = "parts:exact" }, { type = "length", weight = -0.001 }]
[run.engine]
type = "scripted"
script = "parts:policy"
slip = 0.001
"""


def call(directory: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return run_verb(directory, *words)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A directory with a rollout scenario and its output; tests must not change it."""
    directory = tmp_path_factory.mktemp("sums")
    (directory / "parts.py").write_text(TASKS)
    (directory / "sums.toml").write_text(SCENARIO)
    for name in ("upside_down", "moody"):
        (directory / f"{name}.toml").write_text(f'[judger]\ntype = "python"\nretries = 0\nfunction = "parts:{name}"\n')
    (directory / "ranks.toml").write_text('type = "ranking"\nfunction = "parts:ranks"\nneeds = ["answer"]\n')
    (directory / "same.toml").write_text(
        'type = "composed"\n'
        'parts = [{ type = "python", function = "parts:exact" }, { type = "length", weight = -0.001 }]\n'
    )
    done = call(directory, "run", "sums.toml", "-o", "out")
    assert done.returncode == 0, done.stderr
    (directory / "said").write_text(done.stdout)
    return directory


@pytest.fixture
def copied(finished, tmp_path):
    """A copy that tests may change."""
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def lines_of(done) -> list[dict]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


# -- run ------------------------------------------------------------------------------------------------------------


def test_a_run_reports_rollouts_not_a_best_configuration(finished):
    message = (finished / "said").read_text()
    assert "collect: 24/24 rollouts, mean reward" in message
    assert "collect: 24 rollouts of 6 prompts, mean reward" in message
    assert "(exact " in message
    assert "0 lost" in message
    assert "best" not in message
    assert not (finished / "out" / "collect" / "best.toml").exists()


def test_json_has_the_same_results(finished, tmp_path):
    events = lines_of(call(finished, "run", "sums.toml", "-o", tmp_path / "out", "--json"))
    (result,) = [event for event in events if event["event"] == "result"]
    assert (result["rollouts"], result["prompts"], result["without_reward"]) == (24, 6, 0)
    assert result["mean_reward"] == pytest.approx(sum(result["parts"].values()))


def test_a_dry_run_shows_the_first_prompts(finished):
    done = call(finished, "dry-run", "sums.toml")
    assert done.returncode == 0, done.stderr
    assert "24 rollouts in groups of 4" in done.stdout
    assert "sums: 5 tasks" in done.stdout
    prompts = [line.split(":")[0].strip() for line in done.stdout.splitlines() if line.strip().startswith("sum-")]
    with Ledger.read(finished / "out/collect/ledger.db") as ledger:
        assert prompts == [ledger.group(group)[0].action["task"] for group in (1, 2, 3)]


# -- episodes -------------------------------------------------------------------------------------------------------


def test_worst_and_best_are_chosen_by_reward(finished):
    worst = lines_of(call(finished, "episodes", "out", "--worst", 3, "--json"))
    best = lines_of(call(finished, "episodes", "out", "--best", 2, "--json"))
    with Ledger.read(finished / "out/collect/ledger.db") as ledger:
        rewards = sorted(trial.reward.value for trial in ledger.trials())
    assert [line["reward"]["value"] for line in worst] == rewards[:3]
    assert [line["reward"]["value"] for line in best] == rewards[:-3:-1]
    assert Episode.from_json(best[0]).sampled > 0


def test_an_episode_shows_task_reward_tools_and_label(finished):
    done = call(finished, "episodes", "out", "--best", 1)
    assert done.returncode == 0, done.stderr
    for part in (
        "trial ",
        "group ",
        "sum-",
        "reward ",
        "exact 1",
        "length −",
        "label: ",
        "add(",
        "tool add",
        "tokens in",
    ):
        assert part in done.stdout
    assert "generate" in done.stdout


def test_control_characters_of_a_model_are_escaped(finished):
    for more in ((), ("--tokens",)):
        done = call(finished, "episodes", "out", "--worst", 24, *more)
        assert "no idea" in done.stdout.replace("\\x1b[31m", "")
        assert "\x1b" not in done.stdout
        assert "\\x1b[31m" in done.stdout


def test_the_latest_episodes_are_the_default(finished):
    done = call(finished, "episodes", "out", "--json")
    assert [line["trial"] for line in lines_of(done)] == [22, 23, 24]


def test_tokens_are_shown_with_a_legend(finished):
    done = call(finished, "episodes", "out", "--trial", 5, "--tokens")
    assert "p ≥ 0.9" in done.stdout
    assert "<|im_end|>" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--trial", 99), "trial 99 does not exist; the last is 24"),
        (("--run", "colect"), "Did you mean 'collect'?"),
    ],
)
def test_missing_things_are_named(finished, words, message):
    done = call(finished, "episodes", "out", *words)
    assert done.returncode == 1
    assert message in done.stderr


def test_conflicting_options_are_refused(finished):
    done = call(finished, "episodes", "out", "--worst", 1, "--best", 1)
    assert done.returncode == 2
    assert "choose one of" in done.stderr


@pytest.mark.parametrize("words", [("episodes",), ("rejudge", "--judger", "same.toml"), ("export", "-f", "verl")])
def test_an_output_without_rollouts_is_an_error(loopwright, scenario, finished, tmp_path, words):
    loopwright("run", scenario(), "-o", "out", "-q")
    done = call(finished, words[0], tmp_path / "out", *words[1:])
    assert done.returncode == 1
    assert "there are no rollouts in" in done.stderr


# -- what a scripted run does not have: faults, attempts, branches --------------------------------------------------


def _node(parent: int, text: str, *, role: str = "assistant", version: int | None = 0) -> Node:
    ids = tuple(text.encode())
    spans = () if version is None else (Span(0, len(ids), version),)
    return Node(parent, {"role": role, "content": text}, ids, (-0.5 if spans else 0.0,) * len(ids), spans)


@pytest.fixture
def odd(tmp_path):
    """A run with an episode of two branches, one that was lost after two attempts, and one that expired."""
    directory = tmp_path / "odd" / "collect"
    directory.mkdir(parents=True)
    question = _node(0, "Why?", role="user", version=None)
    branched = Episode(
        Task("riddle", ({"role": "user", "content": "Why?"},), data_source="riddles"),
        (ROOT, question, _node(1, "Because."), _node(1, "Therefore.", version=1)),
        group=1,
    ).judged(Reward(1.0, {"exact": 1.0}))
    attempts = (Attempt(0.0, {"queue": 0.1}, Outcome.LOST, "node gone"), Attempt(1.0, {"queue": 0.2}, Outcome.LOST))
    lost_episode = Episode(branched.task, group=1, attempts=attempts).failed(
        Outcome.LOST, Fault.INFRA, "the worker died twice"
    )
    with Ledger.create(directory / "ledger.db") as ledger:
        ledger.set_state("run", {"name": "collect", "rollout": {"engine": {"type": "scripted"}}})
        for number, episode in enumerate((branched, lost_episode, branched), 1):
            trial = Trial(number, {"source": "riddles", "index": 0, "task": "riddle"}, "", 1, number - 1)
            ledger.reserve([trial])
            data = episode.to_bytes()
            result = Result(episode.outcome, {}, episode.reason, episode.fault, reward=episode.reward, episode=data)
            ledger.commit(trial, result)
        with ledger.transaction as connection:
            connection.execute("UPDATE trials SET outcome = 'expired' WHERE number = 3")
    return tmp_path


def test_faults_show_reason_and_attempts(odd):
    done = call(odd, "episodes", "odd", "--faults")
    for part in (
        "trial 2",
        "lost, fault: infra",
        "no reward",
        "the worker died twice",
        "attempt 1 ended lost (node gone)",
    ):
        assert part in done.stdout
    assert "neither trained on nor in its group's baseline" in done.stdout
    assert "trial 1" not in done.stdout


def test_branches_show_their_shared_messages_once(odd):
    done = call(odd, "episodes", "odd", "--trial", 1)
    assert "branch 2, after 1 messages" in done.stdout
    assert [done.stdout.count(text) for text in ("Why?", "Because.", "Therefore.")] == [1, 1, 1]


def test_expired_episodes_are_exported_as_not_trainable(odd):
    assert call(odd, "export", "odd", "--format", "jsonl", "--rows").returncode == 0
    rows = [json.loads(line) for line in (odd / "odd/collect/rows.jsonl").read_text().splitlines()]
    assert [(row["trial"], row["trainable"], row["versions"][0]) for row in rows] == [
        (1, True, 0), (1, True, 1), (3, False, 0), (3, False, 1)
    ]  # fmt: skip
    assert {row["outcome"] for row in rows if row["trial"] == 3} == {"expired"}


# -- rejudge --------------------------------------------------------------------------------------------------------


def test_the_same_judger_changes_nothing(finished):
    *verdicts, result = lines_of(call(finished, "rejudge", "out", "--judger", "same.toml", "--json"))
    assert len(verdicts) == 24
    assert all(verdict["before"] == verdict["after"] for verdict in verdicts)
    assert (result["changed"], result["flipped_pairs"], result["flipped_signs"], result["new_best"]) == (0, 0, 0, 0)


def test_another_judger_shows_what_changes_and_writes_nothing(finished):
    before = (finished / "out/collect/ledger.db").read_bytes()
    done = call(finished, "rejudge", "out", "--judger", "upside_down.toml")
    assert done.returncode == 0, done.stderr
    assert "24 episodes of 6 groups judged again" in done.stdout
    assert "24 rewards changed" in done.stdout
    assert "advantages change sign" in done.stdout
    assert "nothing was written" in done.stdout
    *_, result = lines_of(call(finished, "rejudge", "out", "--judger", "upside_down.toml", "--json"))
    assert result["flipped_pairs"] > 0
    assert abs(result["largest"][0]["after"] - result["largest"][0]["before"]) > 0.9
    assert (finished / "out/collect/ledger.db").read_bytes() == before


def test_a_judger_that_fails_gives_no_verdict_and_no_zero(finished):
    *verdicts, result = lines_of(call(finished, "rejudge", "out", "--judger", "moody.toml", "--json"))
    failed = [verdict for verdict in verdicts if verdict["after"] is None]
    assert failed
    assert all("no comment" in verdict["reason"] for verdict in failed)
    assert result["newly_failed"] == len(failed)
    assert result["mean_after"] == 2.0
    assert {verdict["after"] for verdict in verdicts} == {None, 2.0}


def test_a_group_judger_sees_whole_groups(finished):
    *verdicts, _ = lines_of(call(finished, "rejudge", "out", "--judger", "ranks.toml", "--json"))
    by_group: dict[int, list[float]] = {}
    for verdict in verdicts:
        by_group.setdefault(verdict["group"], []).append(verdict["after"])
    assert all(len(rewards) == 4 for rewards in by_group.values())


def test_new_verdicts_are_stored_beside_the_old_ones(finished, copied):
    for name in ("moody", "upside_down"):
        assert call(copied, "rejudge", "out", "--judger", f"{name}.toml", "--write").returncode == 0
    with (
        Ledger.read(copied / "out/collect/ledger.db") as ledger,
        Ledger.read(finished / "out/collect/ledger.db") as original,
    ):
        for rollout in rollouts(ledger):
            later = rejudgements(ledger, rollout.number)
            assert [one.id for one in later] == ["moody-1", "upside_down-2"]
            assert later[1].reward is not None
            assert (
                rollout.episode.reward == original.trial(rollout.number).reward == ledger.trial(rollout.number).reward
            )
        assert list(ledger.state("rejudged")) == ["moody-1", "upside_down-2"]
    assert "judged again (upside_down-2): reward" in call(copied, "episodes", "out", "--best", 1).stdout


def test_a_run_in_progress_is_not_rejudged(copied):
    with hold(copied / "out"):
        done = call(copied, "rejudge", "out", "--judger", "same.toml", "--write")
    assert done.returncode == 1
    assert "is in use by process" in done.stderr


def test_a_killed_rejudging_keeps_its_name(copied):
    with Ledger.open(copied / "out/collect/ledger.db") as ledger:
        ledger.set_state("rejudged", {"same-1": {"changes": None}})
    assert call(copied, "rejudge", "out", "--judger", "same.toml", "--write").returncode == 0
    with Ledger.read(copied / "out/collect/ledger.db") as ledger:
        assert list(ledger.state("rejudged")) == ["same-1", "same-2"]
        assert [one.id for one in rejudgements(ledger, 1)] == ["same-2"]


def test_a_rejudged_run_still_resumes_and_reports(copied):
    call(copied, "rejudge", "out", "--judger", "same.toml", "--write")
    assert call(copied, "report", "out").returncode == 0
    assert call(copied, "resume", "out", "-q").returncode == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("type = 'pythn'\n", "Did you mean 'python'?"),
        ("type = 'python'\nfunction = 'parts:absent'\n", "absent"),
        ("[[judger]]\ntype = 'length'\n[[judger]]\ntype = 'length'\n", "without a rule for combining"),
        ("type = \n", "is not TOML"),
    ],
)
def test_an_invalid_judger_exits_with_2_and_the_reason(finished, tmp_path, text, message):
    (tmp_path / "new.toml").write_text(text)
    done = call(finished, "rejudge", "out", "--judger", tmp_path / "new.toml")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_judger_file_is_named(finished):
    done = call(finished, "rejudge", "out", "--judger", "nowhere.toml")
    assert done.returncode == 2
    assert "nowhere.toml: cannot be read" in done.stderr


# -- export ---------------------------------------------------------------------------------------------------------


def test_episodes_and_rows_are_exported_token_for_token(copied):
    folder = copied / "out" / "collect"
    for words, name in [
        (("jsonl",), "episodes.jsonl"),
        (("jsonl", "--rows"), "rows.jsonl"),
        (("verl",), "verl.jsonl"),
        (("parquet", "--rows"), "rows.parquet"),
    ]:
        done = call(copied, "export", "out", "--format", *words)
        assert done.stdout.split() == [f"out/collect/{name}"], done.stderr
    episodes, rows, verl = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("episodes", "rows", "verl")
    )
    with Ledger.read(folder / "ledger.db") as ledger:
        recorded = {rollout.number: rollout.episode for rollout in rollouts(ledger)}
    assert {line["trial"]: Episode.from_json(line) for line in episodes} == recorded
    for number, episode in recorded.items():
        expected = episode.rows()
        assert sum(sum(row["response_mask"]) for row in rows if row["trial"] == number) == episode.sampled
        own = [row for row in rows if row["trial"] == number]
        assert [tuple(row["response_ids"]) for row in own] == [row.response_ids for row in expected]
        assert [tuple(row["logprobs"]) for row in own] == [row.logprobs for row in expected]
    assert all(row["reward"] == recorded[row["trial"]].reward.value and row["trainable"] for row in rows)
    assert [row["response_mask"] for row in verl] == [row["response_mask"] for row in rows]
    assert [row["extra_fields"]["trial"] for row in verl] == [row["trial"] for row in rows]
    _same_in_parquet(folder / "rows.parquet", rows)


def _same_in_parquet(path, rows):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(path).to_pylist()
    assert [{**row, "parts": dict(row["parts"])} for row in table] == rows


def test_rows_do_not_fit_into_csv(finished):
    done = call(finished, "export", "out", "--rows")
    assert done.returncode == 2
    assert "do not fit into CSV" in done.stderr


# -- list -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("tasks", ["jsonl", "parquet", "python"]),
        ("loops", ["single_turn", "tools"]),
        ("judgers", ["python", "http", "llm", "command", "length", "composed", "ranking"]),
        ("engines", ["scripted"]),
    ],
)
def test_the_parts_of_rollouts_are_listed(finished, family, names):
    entries = {line.split()[0] for line in call(finished, "list", family).stdout.splitlines() if line.strip()}
    assert set(names) <= entries
