"""CloudAI's files become a scenario that loads."""

import tomllib

import pytest
import tomli_w

from loopwright.cloudai import convert
from loopwright.core.errors import ScenarioError
from loopwright.scenario.load import load

SLURM = """
name = "cluster"
scheduler = "slurm"
install_path = "install"
output_path = "results"
default_partition = "main"
mpi = "pmix"
gpus_per_node = 8
ntasks_per_node = 8
extra_srun_args = "--reservation night"
extra_sbatch_args = ["--mem=0"]
[[partitions]]
name = "main"
[global_env_vars]
LEVEL = 3
"""
HERE = 'name = "here"\nscheduler = "standalone"\ninstall_path = "i"\noutput_path = "results"\n'
NAP = 'name = "nap"\ndescription = "a nap"\ntest_template_name = "Sleep"\n[cmd_args]\nseconds = 1\n'
RING = """
name = "ring"
description = "a ring"
test_template_name = "NcclTest"
[cmd_args]
docker_image_url = "registry#image:1"
subtest_name = "all_reduce_perf_mpi"
iters = [10, 20]
[extra_cmd_args]
"--stepfactor" = "2"
[extra_env_vars]
NCCL_ALGO = ["Ring", "Tree"]
"""


@pytest.fixture
def files(tmp_path):
    """Writes files and converts the scenario, without loading it."""

    def make(scenario, *, system=HERE, hooks=None, single_sbatch=False, **tests):
        for name, text in {
            "system": system,
            "scenario": scenario,
            **{f"tests/{n}": t for n, t in tests.items()},
        }.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / f"{name}.toml").write_text(text)
        (tmp_path / "tests").mkdir(exist_ok=True)
        return convert(
            tmp_path / "system.toml",
            tmp_path / "tests",
            tmp_path / "scenario.toml",
            hooks=hooks,
            single_sbatch=single_sbatch,
        )

    return make


def problems(files, *arguments, **options):
    with pytest.raises(ScenarioError) as raised:
        files(*arguments, **options)
    return str(raised.value)


def entry(text: str) -> str:
    return f'name = "s"\n[[Tests]]\nid = "T.1"\n{text}'


def test_a_plain_test_takes_its_overrides(files):
    conversion = files(entry('test_name = "nap"\ntime_limit = "00:01:30"\n[Tests.cmd_args]\nseconds = 7'), nap=NAP)
    (run,) = conversion.scenario["run"]
    assert (run["name"], run["workload"]["command"], run["workload"]["timeout_s"]) == ("T.1", ["sleep", "7"], 90)
    assert load(tomllib.loads(tomli_w.dumps(conversion.scenario))).runs[0].agent is None


def test_a_search_on_slurm_is_converted(files):
    text = entry('test_name = "ring"\nnum_nodes = [1, 2]\nagent_metrics = ["latency-in-place"]')
    conversion = files(text, system=SLURM, ring=RING)
    (run,) = load(conversion.scenario).runs
    assert (run.agent.type, run.reward[0].type, run.reward[0].metrics) == ("grid", "inverse", ("latency_in_place",))
    assert (set(run.space.tunable), run.space.grid_size) == ({"iters", "NCCL_ALGO", "nodes"}, 8)
    command = " ".join(run.workload.command)
    assert "srun --export=ALL --mpi=pmix --nodes={nodes} --container-image=registry#image:1" in command
    assert "--container-env=LEVEL,NCCL_ALGO --reservation night all_reduce_perf_mpi --nthreads 1" in command
    assert "--iters {iters}" in command
    assert command.endswith("--stepfactor 2")
    system = load(conversion.scenario).scenario.system
    assert (system.partition, system.reservation, system.gpus, system.launcher) == ("main", "night", 8, "direct")
    assert system.arguments == ("--ntasks-per-node=8", "--mem=0")


def test_a_single_sbatch_is_an_allocation(files):
    text = entry('test_name = "nap"\nnum_nodes = "3"\ntime_limit = "2:00:00"\niterations = 2')
    table = files(text, system=SLURM, nap=NAP, single_sbatch=True).scenario["system"]
    assert (table["mode"], table["nodes"], table["time_limit_s"]) == ("allocation", 3, 14400)
    assert "needs scheduler" in problems(files, text, nap=NAP, single_sbatch=True)


def test_nested_arguments_are_dotted_dimensions(files):
    test = """
name = "disk"
description = "d"
test_template_name = "Fio"
dse_excluded_args = ["cmd_args.args.bssplit"]
agent = "ppo"
agent_steps = 64
agent_reward_function = "identity"
agent_config = { random_seed = 7, start_action = "first", rewards = { metric_failure = -2.0 } }
env_params = { }
[cmd_args]
fio_binary = "echo"
[cmd_args.args]
bs = ["4k", "64k"]
bssplit = ["4k/50", "8k/50"]
direct = true
thread = [true, false]
"""
    conversion = files(entry('test_name = "disk"'), disk=test)
    (run,) = conversion.scenario["run"]
    assert run["workload"]["command"][-4:] == [
        *("--bs={args.bs}", "--bssplit=4k/50,8k/50", "--direct", "--thread={args.thread}")
    ]
    assert "--flag=--thread" in run["workload"]["command"]
    assert run["workload"]["args"] == {"args": {"bs": ["4k", "64k"], "thread": [True, False]}}
    assert run["agent"] == {"type": "ppo", "trials": 64, "seed": 7}
    assert conversion.notes == ("[[Tests]] T.1: start_action is ignored: ppo begins with its own policy",)
    assert run["rewards"] == {"metric_failure": -2.0}
    load(conversion.scenario)
    (run,) = files(entry('test_name = "disk"'), disk=test.replace('"ppo"', '"tpe"')).scenario["run"]
    assert run["agent"] == {"type": "tpe", "trials": 64, "seed": 7, "start": "first"}


def test_what_the_environment_draws(files):
    test = NAP.replace("seconds = 1", "seconds = [1, 2]\nlevel = [1, 2]\n[env_params.level]\nweights = [0.25, 0.75]")
    test = test.replace("[cmd_args]", 'agent = "bandit"\nagent_steps = 8\n[cmd_args]')
    (run,) = files(entry('test_name = "nap"'), nap=test).scenario["run"]
    assert run["env_params"] == {"level": {"weights": [0.25, 0.75]}}


def test_dependencies_order_the_tests_and_say_what_differs(files):
    def one(name, kind, other):
        return f'[[Tests]]\nid = "{name}"\ntest_name = "nap"\ndependencies = [{{ type = "{kind}", id = "{other}" }}]\n'

    text = 'name = "s"\n' + one("c", "end_post_comp", "b") + one("b", "start_post_comp", "a")
    text += '[[Tests]]\nid = "a"\ntest_name = "nap"\n'
    conversion = files(text, nap=NAP)
    runs = {run["name"]: run.get("depends_on") for run in conversion.scenario["run"]}
    assert list(runs.items()) == [("a", None), ("b", {"a": "after_ok"}), ("c", {"b": "after_start"})]
    assert "c: end_post_comp: starts once b has started" in conversion.notes[0]
    load(conversion.scenario)
    circle = 'name = "s"\n' + one("a", "start_post_comp", "b") + one("b", "start_post_comp", "a")
    assert "these tests wait for one another" in problems(files, circle, nap=NAP)


def test_hooks_run_in_the_job_of_the_test(files, tmp_path):
    (tmp_path / "hook" / "test").mkdir(parents=True)
    (tmp_path / "hook" / "h.toml").write_text(
        'name = "look"\n[[Tests]]\nid = "h"\ntest_name = "first"\ntime_limit = "10"'
    )
    test = NAP.replace('"nap"', '"first"').replace("[cmd_args]", '[extra_env_vars]\nA = "1 2"\n[cmd_args]')
    (tmp_path / "hook" / "test" / "first.toml").write_text(test)
    text = 'name = "s"\npre_test = "look"\n[[Tests]]\nid = "T"\ntest_name = "nap"\ntime_limit = "5"\n'
    (run,) = files(text, nap=NAP, hooks=tmp_path / "hook").scenario["run"]
    assert run["workload"]["command"][1:] == [
        *("-m", "loopwright.cloudai.job_main", "Sleep"),
        *("--pre", "env 'A=1 2' sleep 1", "--", "sleep", "1"),
    ]
    assert run["workload"]["timeout_s"] == 900
    (run,) = files(f"{text}num_nodes = 4", system=SLURM, nap=NAP, hooks=tmp_path / "hook").scenario["run"]
    command = run["workload"]["command"]
    hook = command[command.index("--pre") + 1]
    assert hook.startswith(
        "env --unset=SLURM_NTASKS --unset=SLURM_NPROCS 'A=1 2' srun --export=ALL --mpi=pmix --nodes=1"
    )
    assert (run["workload"]["nodes"], "--nodes={nodes}" in command) == (4, True)
    missing = text.replace('"look"', '"lok"')
    assert "no hook 'lok'" in problems(files, missing, nap=NAP, hooks=tmp_path / "hook")


@pytest.mark.parametrize(
    ("text", "tests", "words"),
    [
        (entry('test_name = "nop"'), {}, "[[Tests]] T.1: no test 'nop'. Known: nap. Did you mean 'nap'?"),
        (entry('test_name = "nap"\nnum_node = 2'), {}, "unknown key 'num_node'"),
        (entry('test_name = "nap"\ntime_limit = "soon"'), {}, "'soon' is not a time limit; write it as HH:MM:SS"),
        (entry("num_nodes = 2"), {}, "needs `test_name`, or `test_template_name`"),
        (entry('test_name = "nap"\ndependencies = [{ type = "start_post_comp", id = "x" }]'), {}, "depends on 'x'"),
        (entry('test_name = "nap"\nagent_metrics = ["x"]\ncmd_args.seconds = [1, 2]'), {}, "no metric 'x'"),
        (
            entry('test_name = "nap"\nagent_reward_function = "y"\ncmd_args.seconds = [1, 2]'),
            {},
            "'y' is not supported",
        ),
        (entry('test_name = "ring"'), {"ring": RING}, "'all_reduce_perf_mpi' is not on this machine"),
        (
            entry('test_name = "nap"\ncmd_args.x.y = [1, 2]'),
            {},
            "cmd_args.x.y: is a list, but the command of Sleep has",
        ),
        ("name = ", {}, "is not valid TOML"),
        ('name = "s"\nTests = []', {}, "Tests: must have at least 1"),
    ],
)
def test_problems_name_the_place_and_the_fix(files, text, tests, words):
    assert words in problems(files, text, nap=NAP, **tests)


def test_another_template_is_one_error_that_shows_the_command(files):
    test = 'name = "t"\ndescription = "d"\ntest_template_name = "NeMoRun"\n[cmd_args]\nbatch = [1, 2]\n'
    text = entry('test_name = "t"') + '\n[[Tests]]\nid = "T.2"\ntest_name = "t"\n'
    message = problems(files, text, t=test)
    assert message.count("is not supported") == 1
    assert "NeMoRun is not supported; supported: Sleep, BashCmd" in message
    example = message.split("Write it as a command:")[1]
    assert tomllib.loads(example)["run"][0]["workload"]["command"] == "srun PROGRAM --batch={batch}"


def test_another_scheduler_is_an_error(files):
    system = HERE.replace("standalone", "kubernetes")
    assert "scheduler: 'kubernetes' is not supported" in problems(files, entry('test_name = "nap"'), system=system)
