"""Rollouts in a scenario: every problem is reported at load time, with its place and the fix."""

import tomllib

import pytest

from loopwright.core.errors import ScenarioError
from loopwright.rollouts.config import RolloutConfig
from loopwright.scenario.load import load

GOOD = {
    "head": 'name = "study"\n[[run]]\nname = "first"',
    "agent": 'agent = { type = "collect", trials = 8, group_size = 4 }',
    "rollout": "[run.rollout]",
    "tasks": 'tasks = { type = "jsonl", path = "sums.jsonl" }',
    "loop": 'loop = { type = "single_turn", memory = "1GiB" }',
    "judger": 'judger = { type = "python", function = "rollout_parts:exact" }',
    "produce": 'produce = { type = "async" }',
    "engine": '[run.engine]\ntype = "scripted"',
    "more": "",
}
PARTS = """
NUMBER = 3
def exact(answer, label): return answer == label
def misspelt(answer, lable): return 1.0
def anything(**facts): return 1.0
def one(): return [{"prompt": "1 of 3", "data_source": "thirds"}]
def none(): return []
def broken(): raise RuntimeError("no disk")
def tool(x: int) -> int: return x
"""
WORKLOAD = '[run.workload]\ntype = "command"\ncommand = "echo {x}"\nmetrics = { y = { regex = "(.*)" } }'
NOT_A_ROLLOUT = dict.fromkeys(("rollout", "tasks", "loop", "judger", "produce"), "")
EVAL = '[run.eval]\ntasks = { type = "jsonl", path = "sums.jsonl" }'
EXACT = '{ type = "python", function = "rollout_parts:exact" }'


@pytest.fixture
def write(tmp_path):
    (tmp_path / "rollout_parts.py").write_text(PARTS)
    (tmp_path / "sums.jsonl").write_text('{"prompt": "2 + 2?", "label": "4"}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "odd.jsonl").write_text('{"prompt": "2 + 2?"}\n{"question": "?"}\n')

    def write(**parts):
        path = tmp_path / "study.toml"
        path.write_text("\n".join({**GOOD, **parts}.values()))
        return path

    return write


def problems(path):
    with pytest.raises(ScenarioError) as raised:
        load(path)
    return [str(problem) for problem in raised.value.problems]


def judger(text):
    return {"judger": f"judger = {text}"}


def loop(text):
    return {"loop": f"loop = {text}"}


def tasks(text):
    return {"tasks": f"tasks = {text}"}


def agent(text):
    return {"agent": f"agent = {text}"}


def produce(text):
    return {"produce": f"produce = {text}"}


def engine(text):
    return {"engine": f"[run.engine]\n{text}"}


def test_a_good_rollout_is_loaded_completely(write):
    (run,) = load(write()).scenario.run
    assert (run.agent.type, run.agent.group_size, run.engine.type) == ("collect", 4, "scripted")
    assert [source.label() for source in run.rollout.tasks] == ["sums"]
    assert (run.rollout.loop.memory, run.rollout.judger.label(), run.rollout.produce.type) == (2**30, "exact", "async")
    assert RolloutConfig.model_validate(run.rollout.model_dump(mode="json")) == run.rollout


R = "[run.rollout]"


@pytest.mark.parametrize(
    ("parts", "key", "words"),
    [
        # judgers
        ({"judger": ""}, f"{R} judger", 'is missing; for example judger = { type = "python", function'),
        (judger('{ type = "pyton" }'), f"{R} judger", "unknown judger 'pyton'. Known: python, http"),
        (judger('{ type = "pyton" }'), f"{R} judger", "Did you mean 'python'?"),
        (judger('"python"'), f"{R} judger", "a table with a `type`. Known: python, http"),
        (judger(f"[{EXACT}, {EXACT}]"), f"{R} judger", "2 judgers without a rule"),
        (judger(f"[{EXACT}, {EXACT}]"), f"{R} judger", 'Write { type = "composed", parts = [...] }'),
        (judger('{ type = "python" }'), f"{R} judger.function", "is missing"),
        (judger('{ type = "python", function = "exact" }'), f"{R} judger.function", "write it as module:function"),
        (
            judger('{ type = "python", function = "no_such:exact" }'),
            f"{R} judger.function",
            "No module named 'no_such'",
        ),
        (judger('{ type = "python", function = "rollout_parts:gone" }'), f"{R} judger.function", "no attribute 'gone'"),
        (judger('{ type = "python", function = "rollout_parts:NUMBER" }'), f"{R} judger.function", "NUMBER"),
        (
            judger('{ type = "python", function = "rollout_parts:misspelt" }'),
            f"{R} judger.function",
            "'lable' is not a fact",
        ),
        (judger('{ type = "python", function = "rollout_parts:misspelt" }'), f"{R} judger.function", "mean 'label'?"),
        (judger('{ type = "python", function = "rollout_parts:anything" }'), f"{R} judger.function", "name each param"),
        (judger('{ type = "length", wieght = 2 }'), f"{R} judger", "unknown key 'wieght'."),
        (judger('{ type = "length", wieght = 2 }'), f"{R} judger", "Did you mean 'weight'?"),
        (judger('{ type = "length", memory = "1 apple" }'), f"{R} judger.memory", "write for example '512MiB'"),
        (judger('{ type = "length", cpus = 0 }'), f"{R} judger.cpus", "greater than 0, not 0"),
        (judger('{ type = "composed", parts = [{ type = "lenght" }] }'), f"{R} judger.parts[0]", "mean 'length'?"),
        (
            judger('{ type = "composed", parts = [{ type = "length" }, { type = "length", name = "b", cpu = 1 }] }'),
            f"{R} judger.parts[1]",
            "Did you mean 'cpus'?",
        ),
        (
            judger('{ type = "composed", routes = { sum = { type = "length" } } }'),
            f"{R} judger.routes",
            "no route for data_source 'sums'. Known: sum. Did you mean 'sum'?",
        ),
        (
            judger('{ type = "ranking", of = { type = "composed", routes = { sum = { type = "length" } } } }'),
            f"{R} judger.of.routes",
            "no route for data_source 'sums'",
        ),
        # loops
        ({"loop": ""}, f"{R} loop", 'is missing; for example loop = { type = "single_turn" }'),
        (loop('{ type = "tool" }'), f"{R} loop", "unknown agent loop 'tool'. Known: "),
        (loop('{ type = "tool" }'), f"{R} loop", "Did you mean 'tools'?"),
        (loop('"tools"'), f"{R} loop", "must be a table with a `type`. Known: "),
        (loop('{ type = "single_turn", max_turn = 1 }'), f"{R} loop", "Did you mean 'max_turns'?"),
        (loop('{ type = "single_turn", memory = "much" }'), f"{R} loop.memory", "write for example '512MiB'"),
        (loop('{ type = "single_turn", sampling = { temprature = 1 } }'), f"{R} loop.sampling", "mean 'temperature'?"),
        (loop('{ type = "single_turn", sampling = 1 }'), f"{R} loop.sampling", "must be a table, not 1"),
        (loop('{ type = "single_turn", workers = -1 }'), f"{R} loop.workers", "greater than or equal to 0, not -1"),
        (loop('{ type = "tools" }'), f"{R} loop.tools", "is missing"),
        (loop('{ type = "tools", tools = [] }'), f"{R} loop.tools", "at least 1"),
        (loop('{ type = "tools", tools = ["rollout_parts:gone"] }'), f"{R} loop.tools[0]", "no attribute 'gone'"),
        # tasks
        ({"tasks": ""}, f"{R} tasks", 'is missing; for example tasks = { type = "jsonl"'),
        (tasks("[]"), f"{R} tasks", "is empty; name at least one source of tasks"),
        (
            tasks('{ type = "json", path = "s.jsonl" }'),
            f"{R} tasks",
            "unknown task source 'json'. Known: ",
        ),
        (tasks('"sums.jsonl"'), f"{R} tasks", "must be a table with a `type`. Known: "),
        (tasks('{ type = "jsonl" }'), f"{R} tasks.path", "is missing"),
        (tasks('{ type = "jsonl", path = "gone.jsonl" }'), f"{R} tasks, gone", "relative to the scenario?"),
        (tasks('{ type = "jsonl", path = "empty.jsonl" }'), f"{R} tasks, empty", "it has no tasks"),
        (
            tasks('{ type = "jsonl", path = "odd.jsonl" }'),
            f"{R} tasks, odd",
            "line 2 has neither `prompt` nor `messages`",
        ),
        (tasks('{ type = "jsonl", path = "sums.jsonl", weight = 0 }'), f"{R} tasks.weight", "greater than 0, not 0"),
        (tasks('[{ type = "jsonl", path = "sums.jsonl", wait = 1 }]'), f"{R} tasks[0]", "Did you mean 'weight'?"),
        (
            tasks('[{ type = "jsonl", path = "sums.jsonl" }, { type = "jsonl", path = "sums.jsonl" }]'),
            f"{R} tasks",
            "two sources are called 'sums'; give each its own `name`",
        ),
        (tasks('{ type = "python", function = "one" }'), f"{R} tasks.function", "write it as module:function"),
        (tasks('{ type = "python", function = "rollout_parts:none" }'), f"{R} tasks, none", "it has no tasks"),
        (
            tasks('{ type = "python", function = "rollout_parts:broken" }'),
            f"{R} tasks, broken",
            "RuntimeError: no disk",
        ),
        # production, engine, agent
        (produce('{ type = "asynk" }'), f"{R} produce.type", "'sync' or 'async', not 'asynk'"),
        (produce("{ over_sampel = 1 }"), f"{R} produce", "Did you mean 'over_sample'?"),
        (produce('"async"'), f"{R} produce", "must be a table, not 'async'"),
        ({"rollout": f"{R}\njuger = 1"}, R, "Did you mean 'judger'?"),
        ({**NOT_A_ROLLOUT, "rollout": "rollout = 5"}, R, "must be a table, not 5"),
        ({"engine": ""}, "[run.engine]", "is missing; it says what the policy runs on"),
        (engine(""), "[run.engine] type", "is missing. Known: scripted"),
        (engine('type = "scriptd"'), "[run.engine] type", "Did you mean 'scripted'?"),
        (engine('type = "scripted"\nreplys = ["a"]'), "[run.engine]", "Did you mean 'replies'?"),
        (engine('type = "scripted"\nscript = "no_such:f"'), "[run.engine] script", "No module named 'no_such'"),
        ({"agent": ""}, "[run.agent] type", "an agent that works on rollouts: "),
        (
            agent('{ type = "random", trials = 4 }'),
            "[run.agent] type",
            "needs an agent that works on rollouts: collect, grpo, rloo, ppo",
        ),
        (agent('{ type = "colect", trials = 4 }'), "[run.agent] type", "Did you mean 'collect'?"),
        (agent('{ type = "collect" }'), "[run.agent] trials", "is missing"),
        (agent('{ type = "collect", trials = 4, group_sice = 2 }'), "[run.agent]", "Did you mean 'group_size'?"),
        # conflicting settings
        ({"more": WORKLOAD}, "[[run]] workload", "give the workload its own [[run]]"),
        ({"more": '[run.live]\nenv_class = "a:B"'}, "[[run]] live", "give the live environment its own [[run]]"),
        ({"more": "[run.rewards]\nmetric_failure = -1"}, "[[run]] rewards", "is left out, not penalised"),
        ({"more": "[run.env_params.x]"}, "[[run]] env_params", "what differs between rollouts is in their tasks"),
        (
            {"head": f'{GOOD["head"]}\nreward = {{ type = "identity", metrics = ["y"] }}'},
            "[[run]] reward",
            "the judger gives the reward",
        ),
        ({"head": f"{GOOD['head']}\nrepeats = 2"}, "[[run]] repeats", "`group_size` says how often"),
        ({"head": f'{GOOD["head"]}\ncache = "off"'}, "[[run]] cache", "never answered from a cache"),
        ({**NOT_A_ROLLOUT, "engine": ""}, R, "is missing; agent 'collect' works on rollouts"),
        ({**NOT_A_ROLLOUT, "engine": "", "more": WORKLOAD}, R, "is missing; agent 'collect' works on rollouts"),
        (
            {**NOT_A_ROLLOUT, **agent('{ type = "random", trials = 4 }'), "more": WORKLOAD},
            "[run.engine]",
            "has no meaning without [run.rollout]",
        ),
        (
            {**agent('{ type = "random", trials = 4 }'), **NOT_A_ROLLOUT, "more": f"{WORKLOAD}\n{EVAL}"},
            "[run.eval]",
            "has no meaning without [run.rollout]",
        ),
    ],
)
def test_a_problem_names_its_place_and_the_fix(write, parts, key, words):
    messages = problems(write(**parts))
    assert any(line.startswith(f"{key}: ") and words in line for line in messages), messages
    assert all(line.endswith((".", "?")) and not line.endswith(("..", "?.")) for line in messages)


def test_l03_one_broken_part_does_not_hide_the_next(write):
    messages = problems(
        write(
            tasks='tasks = [{ type = "jsonl" }, { type = "jsom" }]',
            loop='loop = { type = "single_turn", memory = "much", cpus = 0 }',
            judger='judger = { type = "composed", parts = [{ type = "python" }, { type = "lenght" }] }',
            engine='[run.engine]\ntype = "scriptd"',
            agent='agent = { type = "colect" }',
        )
    )
    assert sorted(line.split(":")[0] for line in messages) == [
        "[run.agent] type",
        "[run.engine] type",
        "[run.rollout] judger.parts[0].function",
        "[run.rollout] judger.parts[1]",
        "[run.rollout] loop.cpus",
        "[run.rollout] loop.memory",
        "[run.rollout] tasks[0].path",
        "[run.rollout] tasks[1]",
    ]


@pytest.mark.parametrize(("text", "size"), [('"1GiB"', 2**30), ('"512 MiB"', 2**29), ("1000", 1000)])
def test_l02_memory_is_read_with_its_unit(text, size):
    table = tomllib.loads(
        f'tasks = {{ type = "jsonl", path = "x" }}\nloop = {{ type = "single_turn", memory = {text} }}\n'
        f'judger = {{ type = "length", memory = {text} }}'
    )
    config = RolloutConfig.model_validate(table)
    assert config.loop.memory == config.judger.memory == size


def test_a_route_for_every_data_source_is_enough(write):
    both = '[{ type = "jsonl", path = "sums.jsonl" }, { type = "python", function = "rollout_parts:one" }]'
    judger = 'judger = { type = "composed", routes = { sums = { type = "length" }, thirds = { type = "length" } } }'
    assert load(write(tasks=f"tasks = {both}", judger=judger)).scenario.run[0].rollout is not None
    messages = problems(write(tasks=f"tasks = {both}", judger=judger.replace("thirds", "third")))
    assert messages == [
        "[run.rollout] judger.routes: no route for data_source 'thirds'. Known: sums, third. Did you mean 'third'?"
    ]
