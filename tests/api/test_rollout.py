"""`loopwright.rollout`: judged episodes from Python objects."""

import re

import pytest

import loopwright as lw
from loopwright.rollouts.judgers import GroupJudger

TASKS = [{"prompt": f"What is {a} + 1?", "label": str(a + 1)} for a in range(3)]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Twice(lw.AgentLoop):
    async def run(self, task, session):
        first = await session.turn(task.messages)
        await session.turn([*task.messages, first.message, {"role": "user", "content": "Are you sure?"}])
        return session.episode(task)


class Half(lw.Judger):
    async def judge(self, payload):
        return lw.Reward(0.5)


class First(GroupJudger):
    async def judge_group(self, payloads):
        return [lw.Reward(float(payload is payloads[0])) for payload in payloads]


def test_a_function_judges_the_episodes_of_a_named_loop_and_engine():
    payloads = []

    def exact(answer, label):
        payloads.append(label)
        return 1.0

    episodes = lw.rollout(TASKS, "single_turn", exact, engine="scripted", samples=2)

    assert [episode.task.id for episode in episodes] == ["0", "0", "1", "1", "2", "2"]
    assert [episode.reward.value for episode in episodes] == [1.0] * 6
    assert sorted(payloads) == ["1", "1", "2", "2", "3", "3"]
    assert episodes[0].rewards == {"exact": 1.0}


@pytest.mark.parametrize(
    ("judger", "part"),
    [(Half, "Half"), (Half(), "Half"), (First, "First"), ({"type": "length"}, "length"), (None, "length")],
)
def test_loops_and_judgers_may_be_classes_objects_names_or_tables(judger, part):
    episodes = lw.rollout(
        ["hello", lw.Task("b", ({"role": "user", "content": "hi"},))], Twice, judger, engine="scripted"
    )

    assert [(episode.task.id, episode.turns) for episode in episodes] == [("0", 2), ("b", 2)]
    assert all(list(episode.rewards) == [part] for episode in episodes)


def test_tasks_are_a_list_or_a_generator_but_not_one_task():
    assert len(lw.rollout((prompt for prompt in ("a", "b")), engine="scripted")) == 2
    with pytest.raises(TypeError, match="tasks must be a list of tasks, not 'hello'"):
        lw.rollout("hello", engine="scripted")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tasks": [1]}, 'a task is a prompt, a row such as {"prompt": "…"}, or a Task, not 1'),
        ({"loop": len}, "the loop must be a name, a class, an object of one, or a table"),
        ({"engine": None}, "the engine must be a name, a class, an object of one, or a table"),
    ],
)
def test_an_argument_of_the_wrong_type_is_named(arguments, words):
    with pytest.raises(TypeError, match=re.escape(words)):
        lw.rollout(**{"tasks": ["a"], "engine": "scripted"} | arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"loop": "single_trun"}, "rollout: loop: unknown agent loop 'single_trun'."),
        ({"judger": lambda foo: foo}, "rollout: judger.function: 'lambda': 'foo' is not a fact of an episode."),
        ({"engine": {"type": "scripted", "slipp": 1}}, "rollout: engine: unknown key 'slipp'"),
        ({"samples": 0}, "rollout: samples: must be greater than"),
        ({"tasks": [{"label": "1"}]}, "rollout: tasks"),
    ],
)
def test_a_wrong_argument_is_named(arguments, words):
    with pytest.raises(lw.ScenarioError, match=re.escape(words)):
        lw.rollout(**{"tasks": ["a"], "engine": "scripted"} | arguments)


def test_an_engine_object_and_sampling_are_used():
    engine = lw.engine_of("scripted")

    (episode,) = lw.rollout(["hello"], engine=engine, sampling=lw.Sampling(max_tokens=3), output="out")

    assert episode.sampled <= 3
    assert lw.Study.read("out").trials()[0].number == 1


def test_an_empty_task_list_is_refused():
    with pytest.raises(ValueError, match="at least one task"):
        lw.rollout([], engine="scripted")
