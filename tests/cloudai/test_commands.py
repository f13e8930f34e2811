"""The commands of all templates, against those that CloudAI's own code wrote for the same files (commit 5b5c0f7)."""

import re
import shlex

import pytest

from loopwright.cloudai import convert

SYSTEM = """
name = "cluster"
scheduler = "slurm"
install_path = "install"
output_path = "results"
default_partition = "main"
gpus_per_node = 8
ntasks_per_node = 8
extra_srun_args = "--reservation night"
[[partitions]]
name = "main"
[global_env_vars]
LEVEL = "3"
"""
IMAGE = 'docker_image_url = "registry#image:1"'
NCCL = (
    "--minbytes 32M --maxbytes 32M --stepbytes 1M --op sum --datatype float --root 0 --iters 20 --warmup_iters 5 "
    "--agg_iters 1 --average 1 --parallel_init 0 --check 1 --blocking 0 --cudagraph 0"
)
CONTAINER = (
    "--container-image=registry#image:1 "
    "--container-mounts=OUT:/cloudai_run_results,INSTALL:/cloudai_install,OUT{mounts} "
    "--no-container-mount-home --reservation night"
)
TESTS = {
    "nccl": (
        f"""test_template_name = "NcclTest"
extra_container_mounts = ["/data:/data"]
extra_env_vars = {{ NCCL_TOPO_FILE = "/etc/topology.xml" }}
extra_cmd_args = {{ "--stepfactor" = "2" }}
cmd_args = {{ {IMAGE}, subtest_name = "all_gather_perf_mpi" }}
nsys = {{ output = "profile", trace = "cuda", force_overwrite = true }}""",
        f"srun --export=ALL --mpi=pmix -N2 "
        f"{CONTAINER.format(mounts=',/data:/data,/etc/topology.xml:/etc/topology.xml')} "
        f'bash -c "source OUT/env_vars.sh; nsys profile -o profile -t cuda --force-overwrite=true all_gather_perf_mpi '
        f'--nthreads 1 --ngpus 1 {NCCL} --stepfactor 2"',
    ),
    "nccl in one process": (
        f"""test_template_name = "NcclTest"
cmd_args = {{ {IMAGE}, subtest_name = "all_reduce_perf", ngpus = 8 }}""",
        f"srun --export=ALL --ntasks=1 -N2 {CONTAINER.format(mounts='')} "
        f'bash -c "source OUT/env_vars.sh; all_reduce_perf --nthreads 1 -g 8 {NCCL}"',
    ),
    "ucc": (
        f"""test_template_name = "UCCTest"
extra_cmd_args = {{ "--iters" = "5", "-T" = "" }}
cmd_args = {{ {IMAGE}, collective = "allreduce", b = 8, e = "4G", gen = "exp:min=1" }}""",
        f"srun --export=ALL --mpi=pmix -N2 {CONTAINER.format(mounts='')} bash -c "
        '"source OUT/env_vars.sh; /opt/hpcx/ucc/bin/ucc_perftest -c allreduce -b 8 -e 4G --gen exp:min=1 -m cuda -F '
        '--iters=5 -T"',
    ),
    "osu, point to point": (
        f"""test_template_name = "OSUBench"
[cmd_args]
{IMAGE}
benchmarks_dir = "/opt/osu"
benchmark = "osu_latency"
message_size = "2:128"
mem_limit = 1000""",
        f"srun --export=ALL --mpi=pmix -N2 {CONTAINER.format(mounts='')} bash -c "
        '"source OUT/env_vars.sh; /opt/osu/osu_latency --message-size 2:128 --mem-limit 1000"',
    ),
    "osu, collective": (
        f"""test_template_name = "OSUBench"
cmd_args = {{ {IMAGE}, benchmarks_dir = "/opt/osu", benchmark = "osu_alltoall", warmup = 3 }}""",
        f"srun --export=ALL --mpi=pmix -N2 {CONTAINER.format(mounts='')} bash -c "
        '"source OUT/env_vars.sh; /opt/osu/osu_alltoall --warmup 3 --full"',
    ),
    "fio": (
        f"""test_template_name = "Fio"
[cmd_args]
{IMAGE}
num_tasks_per_node = 2
job_file = "/data/job.fio"
args = {{ name = "smoke", bs = "128k", thread = true, direct = false, filename = {{ a = "/x", b = "/y" }} }}""",
        f"srun --export=ALL -N2 {CONTAINER.format(mounts='')} --ntasks-per-node=2 --ntasks=4 bash -c "
        '"source OUT/env_vars.sh; fio --name=smoke --bs=128k --thread --filename=/x --filename=/y /data/job.fio"',
    ),
    "container": (
        f"""test_template_name = "SlurmContainer"
extra_srun_args = ["--ntasks=4"]
extra_cmd_args = {{ "--size" = "5" }}
cmd_args = {{ {IMAGE}, cmd = "cp a /cloudai_run_results" }}""",
        f"srun --export=ALL --mpi=pmix -N2 {CONTAINER.format(mounts='')} --ntasks=4 bash -c "
        '"source OUT/env_vars.sh; cp a /cloudai_run_results --size 5"',
    ),
    "sleep": (
        'test_template_name = "Sleep"\ncmd_args = { seconds = 3 }',
        'srun --export=ALL --mpi=pmix -N2 --reservation night bash -c "source OUT/env_vars.sh; sleep 3"',
    ),
}


def pairs(words):
    """Options with their values, in any order: programs do not care."""
    return sorted(re.split(r" (?=-)", " ".join(words)))


def split(words):
    """The arguments of srun, and the program with its own."""
    program = next(
        i for i, word in enumerate(words) if i and not word.startswith("-") and words[i - 1] != "--reservation"
    )
    return set(words[1:program]), words[program:]


@pytest.mark.parametrize("name", TESTS)
def test_a_template_stands_for_the_command_that_cloudai_writes(tmp_path, name):
    test, theirs = TESTS[name]
    (tmp_path / "tests").mkdir()
    (tmp_path / "install").mkdir()
    system = SYSTEM.replace('"install"', f'"{tmp_path / "install"}"')
    entry = 'name = "s"\n[[Tests]]\nid = "t"\ntest_name = "one"\nnum_nodes = 2\n'
    for file, text in {"system": system, "tests/one": f'name = "one"\ndescription = ""\n{test}', "s": entry}.items():
        (tmp_path / f"{file}.toml").write_text(text)
    (run,) = convert(tmp_path / "system.toml", tmp_path / "tests", tmp_path / "s.toml").scenario["run"]
    command = run["workload"]["command"]
    words = command[command.index("srun") :]
    ours = [word.replace("$TRIAL_DIRECTORY", "OUT") for word in words]
    our_options, our_program = split([word.replace(str(tmp_path / "install"), "INSTALL") for word in ours])
    their_options, (_, _, script) = split(shlex.split(theirs))
    # Variables are in the environment of the job; pyxis is told to let them in.
    our_options = {
        option.replace("--nodes={nodes}", "-N2") for option in our_options if "--container-env" not in option
    }
    if name == "fio":  # the number of nodes may be searched
        their_options.remove("--ntasks=4")
        assert command[command.index("--") + 1 : command.index("srun")] == [
            *("env", "--unset=SLURM_NTASKS", "--unset=SLURM_NPROCS")
        ]
    assert our_options == their_options
    their_program = script.removeprefix("source OUT/env_vars.sh; ")
    if our_program[:2] == ["bash", "-c"]:
        assert our_program[2] == their_program
    else:
        assert our_program[0] == their_program.split()[0]
        assert pairs(our_program) == pairs(their_program.split())
