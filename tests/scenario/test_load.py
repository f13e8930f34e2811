"""Loading reports every problem before anything runs, with its key and the fix."""

import numpy as np
import pytest

from loopwright.core.config import size_bytes
from loopwright.core.errors import ScenarioError
from loopwright.scenario.load import load


def problems(path) -> list[str]:
    with pytest.raises(ScenarioError) as raised:
        load(path)
    return [str(problem) for problem in raised.value.problems]


W = '[run.workload]\ntype = "command"\n'
Y = 'metrics = { y = { regex = "y=(.*)" } }\n'


def args(text: str) -> dict[str, str]:
    return {"args": f"[run.workload.args]\n{text}"}


def test_a_good_scenario_is_loaded_completely(loaded):
    scenario = loaded().scenario
    assert (scenario.name, scenario.system.parallel) == ("study", 2)
    (run,) = scenario.run
    assert (run.name, run.agent.type, run.agent.trials, run.workload.type) == ("first", "random", 4, "command")


@pytest.mark.parametrize(
    ("parts", "key", "words"),
    [
        ({"head": 'nmae = "x"'}, "", "unknown key 'nmae'. Known: name, home, system, run. Did you mean 'name'?"),
        ({"head": ""}, "name", "is missing; give the scenario a name, in quotes."),
        ({"head": 'name = "x"\n[system]\nparalel = 2'}, "[system]", "Did you mean 'parallel'?"),
        ({"head": 'name = "x"\n[system]\nparallel = 0'}, "[system] parallel", "greater than or equal to 1, not 0"),
        ({"head": 'name = "x"\n[system]\ntype = "slum"'}, "[system] type", "unknown system 'slum'"),
        ({"head": 'name = "x"\n[system]\nmemory = "2 apples"'}, "[system] memory", "write for example '512MiB'"),
        ({"head": 'name = "x"\nsystem = "local"'}, "[system]", "must be a table"),
        ({"run": '[[run]]\nname = "a/b"'}, "[[run]] name", "not 'a/b'"),
        ({"run": "[[run]]"}, "[[run]] name", "is missing"),
        ({"run": '[[run]]\nname = "a"\nrepeat = 2'}, "[[run]]", "Did you mean 'repeats'?"),
        ({"run": '[[run]]\nname = "a"\nrepeats = 3'}, "[run.agent] trials", "4 is not a multiple of repeats = 3"),
        ({"run": '[[run]]\nname = "a"\nconfirm = { shar = 1 }'}, "[[run]] confirm:", "Did you mean 'share'?"),
        ({"run": '[[run]]\nname = "a"\nconfirm = { share = 2 }'}, "[[run]] confirm.share", "not 2"),
        ({"run": '[[run]]\nname = "a"\nconfirm = 3'}, "[[run]] confirm", "must be true, false or a table, not 3"),
        ({"run": '[[run]]\nname = "a"\nnoise = { seed = 3 }'}, "[[run]] noise.seed", "must be a list, not 3"),
        ({"run": '[[run]]\nname = "a"\ncache = "of"'}, "[[run]] cache", "not 'of'"),
        ({"run": '[[run]]\nname = "a"\nobservers = ["x"]'}, "[[run]] observers", "write it as module:name"),
        ({"run": '[[run]]\nname = "a"\nobservers = ["nox:Y"]'}, "[[run]] observers", "No module named 'nox'"),
        ({"agent": 'agent = { type = "tpee", trials = 4 }'}, "[run.agent] type", "Did you mean 'tpe'?"),
        ({"agent": 'agent = "tpe"'}, "[run.agent] type", "is missing. Known: grid, random"),
        ({"agent": "agent = { trials = 4 }"}, "[run.agent] type", "is missing. Known: grid, random"),
        ({"agent": 'agent = { type = "random" }'}, "[run.agent] trials", "is missing"),
        ({"agent": 'agent = { type = "random", trials = 0 }'}, "[run.agent] trials", "not 0"),
        ({"agent": 'agent = { type = "random", trails = 4, trials = 4 }'}, "[run.agent]", "Did you mean 'trials'?"),
        (
            {"agent": 'agent = { type = "tpe", trials = 4, start = [{ x = 9 }] }'},
            "[run.agent] start[0]",
            "not one of 1, 2",
        ),
        ({"agent": 'agent = { type = "tpe", trials = 4, start = "last" }'}, "[run.agent] start", "'first'"),
        ({"agent": ""}, "[run.workload] args.x", "has several values, but the run has no agent"),
        ({"reward": ""}, "[[run]] reward", 'is missing; for example reward = { type = "identity", metrics = ["y"] }'),
        ({"reward": 'reward = { type = "identiti" }'}, "[[run]] reward type", "Did you mean 'identity'?"),
        ({"reward": 'reward = { type = "identity", metrics = ["yy"] }'}, "[[run]] reward", "Did you mean 'y'?"),
        ({"reward": 'reward = { type = "identity", metrics = [] }'}, "[[run]] reward metrics", "at least 1"),
        ({"reward": 'reward = { type = "expression", expression = "y." }'}, "[[run]] reward", "is not an expression"),
        (
            {
                "agent": 'agent = { type = "cmaes", trials = 4 }',
                "reward": 'reward = [{ type = "identity", metrics = ["y"] }, { type = "negative", metrics = ["y"] }]',
            },
            "[[run]] reward",
            "agent 'cmaes' takes one objective; for several: nsga2",
        ),
        ({"workload": "", "args": ""}, "[run.workload]", "is missing; it says what a trial runs"),
        ({"workload": '[run.workload]\ntype = "comand"'}, "[run.workload] type", "Did you mean 'command'?"),
        ({"workload": W + Y}, "[run.workload] command", "is missing"),
        ({"workload": W + Y + "command = ''"}, "[run.workload] command", "empty"),
        ({"workload": W + Y + "command = 'echo \"{x}'"}, "[run.workload] command", "no closing quotation"),
        ({"workload": W + Y + "command = 'echo {xx}'"}, "[run.workload] command", "Did you mean 'x'?"),
        ({"workload": W + Y + "command = 'echo {x}'\ntimeout_s = -1"}, "[run.workload] timeout_s", "not -1"),
        ({"workload": W + Y + "command = 'echo {x}'\ntimeout = 1"}, "[run.workload]", "Did you mean 'timeout_s'?"),
        (
            {"workload": W + "command = 'echo {x}'\nmetrics = { y = { regx = 'x' } }"},
            "[run.workload] metrics.y",
            "'regex'",
        ),
        (
            {"workload": W + "command = 'echo {x}'\nmetrics = { y = { regex = 'x' } }"},
            "[run.workload] metrics",
            "a group",
        ),
        (
            {"workload": W + Y + "command = 'echo {x}'\nconstraints = ['z < 1']"},
            "[run.workload] constraints",
            "unknown parameter z",
        ),
        (
            {"workload": W + Y + "command = 'echo {x}'\nconstraints = ['x <']"},
            "[run.workload] constraints",
            "not an expression",
        ),
        (args("x = []"), "[run.workload] args", "x: an empty list has nothing to choose from"),
        (args("x = [1]"), "[run.workload] args", "there is nothing to search"),
        (args("x = [1, 1.0]"), "[run.workload] args", "1.0 is listed twice"),
        (args("x = { low = 2, high = 1 }"), "[run.workload] args", "low must be below high"),
        (args("x = { low = 1, high = 2, dtpye = 'int' }"), "[run.workload] args", "Did you mean 'dtype'?"),
        (
            args("x = [1, 2]\nz = [1, 2]"),
            "[run.workload] args.z",
            "no command contains",
        ),
        (args("x = [1, 2]\nz = 2026-01-01"), "[run.workload] args", "is not a number, string, boolean, list or table"),
        (args("x = [1, nan]"), "[run.workload] args", "nan is not a finite number"),
        (args("x = { values = [1, 2], when = 'x == 1' }"), "[run.workload] args", "conditions form a cycle"),
        (
            args("x = ['a', 'b']\nz = { values = [1, 2], when = 'x > 3' }"),
            "[run.workload] args.z",
            "`when` has no value",
        ),
        (args("x = [1, 2]\nz = { values = [1, 2], when = 'q > 3' }"), "[run.workload] args.z", "unknown parameter q"),
        ({"more": "[run.rewards]\nmetric_failur = 1"}, "[run.rewards]", "Did you mean 'metric_failure'?"),
        ({"more": "[run.rewards]\nmetric_failure = inf"}, "[run.rewards] metric_failure", "finite"),
        ({"more": "[run.env_params.xx]"}, "[run.env_params.xx]", "there is no argument 'xx'"),
        ({"more": "[run.env_params]\nx = 5"}, "[run.env_params.x]", "not 5"),
        (
            {
                **args("x = [1, 2]\nz = [1, 2]\nw = { values = [1, 2], when = 'z>1' }"),
                "more": "[run.env_params.z]",
                "workload": W + Y + "command = 'echo {x} {z} -{w}'",
            },
            "[run.workload] args.w",
            "`when` names a drawn argument",
        ),
    ],
)
def test_a_problem_names_its_key_and_the_fix(write, parts, key, words):
    messages = problems(write(**parts))
    assert any(line.startswith(f"{key}") and words in line for line in messages), messages


def test_noise_that_no_command_names_is_legal_and_gets_a_hint(write):
    (run,) = load(write(more="[run.noise]\nseed = [1, 2]")).runs

    assert [hint.key for hint in run.hints()] == ["[[run]] noise.seed"]


def test_every_problem_is_listed_at_once(write):
    messages = problems(
        write(
            head='name = "x"\n[system]\nparallel = 0',
            agent='agent = { type = "tpee", trials = 4 }',
            reward='reward = { type = "identity", metrics = ["z"] }',
            args="[run.workload.args]\nx = [1, 2]\nz = [3, 4]",
        )
    )
    assert len(messages) == 4, messages
    assert [line.split(":")[0] for line in messages] == [
        "[system] parallel",
        "[run.agent] type",
        "[run.workload] args.z",
        "[[run]] reward",
    ]


def test_a_wrong_name_does_not_hide_other_problems(write):
    messages = problems(write(run='[[run]]\nname = "a b"', more="[run.env_params.x]\nweights = [0.5, 0.6]"))
    assert [line.split(":")[0] for line in messages] == ["[[run]] name", "[run.env_params.x]", "[run.workload] args"]


def test_paths_are_relative_to_home_if_it_is_set(write, loaded, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "in").touch()
    parts = {"head": 'name = "x"\nhome = "elsewhere"', "workload": f'{W}files = ["in"]\ncommand = "echo y={{x}}"\n{Y}'}
    assert loaded(**parts).directory == tmp_path / "elsewhere"
    parts["head"] = 'name = "x"\nhome = "gone"'
    assert problems(write(**parts))[0] == f"home: there is no directory {tmp_path / 'gone'}."


def test_problems_of_several_runs_say_which_run(write):
    path = write(agent='agent = { type = "tpee", trials = 1 }')
    path.write_text(f"{path.read_text()}\n{path.read_text().partition('parallel = 2')[2].replace('first', 'second')}")
    assert [line.split(":")[0] for line in problems(path)] == [
        "[run.agent] type (run 'first')",
        "[run.agent] type (run 'second')",
    ]


def test_two_runs_with_one_name_are_refused(write):
    path = write()
    path.write_text(f"{path.read_text()}\n{path.read_text().partition('parallel = 2')[2]}")
    assert problems(path) == ["[[run]] name: 'first' is used 2 times; each run needs its own folder."]


@pytest.mark.parametrize("name", ["[1]", "{ a = 1 }", "5", "true"])
def test_a_name_that_is_not_text_is_a_problem(write, name):
    path = write(run=f"[[run]]\nname = {name}")
    path.write_text(f"{path.read_text()}\n{path.read_text().partition('parallel = 2')[2]}")
    assert any(line.startswith("[[run]] name") for line in problems(path))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"name = ", "is not valid TOML"),
        (b"\xff\xfe", "is not text"),
        (b"", "[[run]]: is missing"),
        (b"name = 'x'\nrun = 5", "[[run]]: is missing"),
        (b"name = 'x'\nrun = []", "[[run]]: is missing"),
        (b"name = 'x'\nrun = [5]", "[[run]]: is missing"),
        (b"name = 'x'\n[run]\nname = 'a'", "[run]: must be [[run]], with two brackets"),
        (b"name = 'x'\nkey = fast", "(at line 2, column 7): key = fast. Text needs quotes."),
    ],
)
def test_a_file_that_is_not_a_scenario(tmp_path, content, words):
    path = tmp_path / "study.toml"
    path.write_bytes(content)
    assert any(words in line for line in problems(path))


@pytest.mark.parametrize("value", ["[]", "[{}]", "3", "true", "'x'", "{}", "[[1]]", "{ type = 3 }", "{ type = ['a'] }"])
@pytest.mark.parametrize("key", ["agent", "reward", "workload", "depends_on", "live", "rollout", "engine", "rewards"])
def test_a_value_of_another_shape_is_a_problem_not_a_crash(tmp_path, key, value):
    path = tmp_path / "study.toml"
    path.write_text(f"name = 'x'\n[[run]]\nname = 'a'\n{key} = {value}\n[[run]]\nname = 'b'")
    assert problems(path)


@pytest.mark.parametrize("line", ["gateway = { type = [] }", "gateway = [{}]", "gateway = { type = { a = 1 } }"])
def test_a_gateway_of_another_shape_is_a_problem_not_a_crash(tmp_path, line):
    path = tmp_path / "study.toml"
    loop = "{ type = 'remote', command = ['x'], pass_env = [['a']] }"
    path.write_text(f"name = 'x'\n[[run]]\nname = 'a'\n{line}\n[run.rollout]\nloop = {loop}")
    assert any("[run.gateway]" in line for line in problems(path))


def test_double_brackets_are_named(write):
    path = write()
    path.write_text(path.read_text().replace("[run.workload]", "[[run.workload]]").partition("[run.workload.args]")[0])
    assert "[run.workload]: must be one table, not a list; double brackets, [[…]], make a list." in problems(path)


def test_what_python_passes_is_checked_by_type():
    with pytest.raises(TypeError, match="a scenario is the path of a TOML file, or a dict, not None"):
        load(None)
    with pytest.raises(TypeError, match="set is a dict such as"):
        load({}, set=["system.parallel=4"])
    with pytest.raises(ScenarioError, match=r"scenario: \[system\] parallel: cannot be None; use text, a number"):
        load({"system": {"parallel": None}})


def test_numbers_of_numpy_are_numbers(write):
    assert load(write(), set={"system.parallel": np.int64(3)}).overrides == {"system.parallel": 3}


def test_a_missing_file_or_a_directory_is_refused(tmp_path):
    assert "there is no such file" in problems(tmp_path / "gone.toml")[0]
    assert "is a directory" in problems(tmp_path)[0]


@pytest.mark.parametrize(
    ("text", "size"), [("512MiB", 512 * 2**20), ("2 GiB", 2**31), ("1.5kb", 1500), ("100", 100), (7, 7), (None, None)]
)
def test_sizes_have_units(text, size):
    assert size_bytes(text) == size


@pytest.mark.parametrize("name", ["report.html", "Report.HTML", "scenario.toml", "campaign.json", "cache.db"])
def test_a_run_cannot_have_the_name_of_a_file_in_the_output(write, name):
    with pytest.raises(ScenarioError, match="choose another name"):
        load(write(run=f'[[run]]\nname = "{name}"'))
