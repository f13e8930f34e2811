"""CloudAI's test templates: the command that each `test_template_name` stands for, and what its output says."""

import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from loopwright.cloudai.output import read_fio, read_nccl, read_osu, read_ucc

Arguments = Mapping[str, Any]
"""`cmd_args` with each value as the text of a command, a searched one as `{name}`; only fixed flags are booleans."""

UNSET_TASKS = ("--unset=SLURM_NTASKS", "--unset=SLURM_NPROCS")
"""Arguments of `env` for an srun that derives its tasks from nodes and tasks per node, not from those of its job."""
TRIAL_DIRECTORY = "$TRIAL_DIRECTORY"
"""Stands for the trial's directory in a command; `job_main` fills it in."""


class Template(ABC):
    """One `test_template_name`.

    class Sleep(Template):
        def words(self, args: Arguments, extra: Mapping[str, str]) -> list[str]:
            return ["sleep", args["seconds"]]
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    """Arguments that a test need not give."""
    required: ClassVar[tuple[str, ...]] = ()
    """Arguments that it must give."""
    unsupported: ClassVar[tuple[str, ...]] = ()
    """Arguments that need another test's output."""
    metrics: ClassVar[tuple[str, ...]] = ()
    """The metrics that `read` gives, as CloudAI writes them, then some of our own."""
    success: ClassVar[str | None] = None
    """A pattern that the output of a successful test contains."""

    @abstractmethod
    def words(self, args: Arguments, extra: Mapping[str, str]) -> list[str]:
        """The command, with `extra_cmd_args` at its end."""

    def launcher(self, args: Arguments, mpi: str) -> list[str]:
        """What starts the command on a cluster: srun with its first arguments; empty if the command does so itself."""
        return ["srun", "--export=ALL", f"--mpi={mpi}"]

    def image(self, args: Arguments) -> str | None:
        """The container image."""
        image = args.get("docker_image_url")
        return str(image) if image else None

    def options(self, args: Mapping[str, Any]) -> list[str]:
        """What `read` needs to know about the test, as text."""
        return []

    @staticmethod
    def read(_output: str, _options: Sequence[str], /) -> dict[str, float]:
        """The metrics in the output of a test, by their names in Loopwright."""
        return {}


class Sleep(Template):
    """Sleeps."""

    defaults: ClassVar[Mapping[str, Any]] = {"seconds": 5}

    def words(self, args: Arguments, extra: Mapping[str, str]) -> list[str]:
        return ["sleep", args["seconds"]]

    def image(self, args: Arguments) -> str | None:
        return None  # CloudAI names an image and does not use it


class BashCmd(Template):
    """A shell command, in the batch script itself."""

    required: ClassVar[tuple[str, ...]] = ("cmd",)

    def launcher(self, args: Arguments, mpi: str) -> list[str]:
        return []

    def words(self, args: Arguments, extra: Mapping[str, str]) -> list[str]:
        return ["bash", "-c", args["cmd"]]


class SlurmContainer(Template):
    """A shell command in a container."""

    required: ClassVar[tuple[str, ...]] = ("docker_image_url", "cmd")

    def words(self, args: Arguments, extra: Mapping[str, str]) -> list[str]:
        return ["bash", "-c", " ".join([args["cmd"], *(f"{k} {v}".strip() for k, v in extra.items())])]


class NcclTest(Template):
    """A program of nccl-tests."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "subtest_name": "all_reduce_perf_mpi",
        "nthreads": 1,
        "ngpus": 1,
        "minbytes": "32M",
        "maxbytes": "32M",
        "stepbytes": "1M",
        "op": "sum",
        "datatype": "float",
        "root": 0,
        "iters": 20,
        "warmup_iters": 5,
        "agg_iters": 1,
        "average": 1,
        "parallel_init": 0,
        "check": 1,
        "blocking": 0,
        "cudagraph": 0,
    }
    required: ClassVar[tuple[str, ...]] = ("docker_image_url",)
    unsupported: ClassVar[tuple[str, ...]] = ("use_deepep_matrix",)
    metrics: ClassVar[tuple[str, ...]] = ("default", "latency-in-place", "latency-out-of-place", "avg_busbw_gb_s")
    success: ClassVar[str | None] = "Avg bus bandwidth"
    read = staticmethod(read_nccl)
    _not_options: ClassVar[frozenset[str]] = frozenset(
        {"docker_image_url", "subtest_name", "use_deepep_matrix", "alltoallv_matrix_container_path", "min_busbw"}
    )

    def words(self, args: Arguments, extra: Mapping[str, str]) -> list[str]:
        program = args["subtest_name"]
        words = ["/opt/nccl-tests/build/alltoallv_perf" if program == "alltoallv_perf_mpi" else program]
        for name, value in args.items():
            if name in self._not_options:
                continue
            option = (
                "-g" if name == "ngpus" and not _uses_mpi(program) else f"--{name}" if len(name) > 1 else f"-{name}"
            )
            if value is True:
                words.append(option)
            elif value is not False:
                words += [option, value]
        return words + [word for name, value in extra.items() for word in shlex.split(f"{name} {value}")]

    def launcher(self, args: Arguments, mpi: str) -> list[str]:
        return (
            super().launcher(args, mpi) if _uses_mpi(args["subtest_name"]) else ["srun", "--export=ALL", "--ntasks=1"]
        )


def _uses_mpi(program: str) -> bool:
    """Whether a program of nccl-tests is started once per rank; one that is searched is."""
    return program.endswith(("_mpi", "}"))


class UccTest(Template):
    """ucc_perftest."""

    defaults: ClassVar[Mapping[str, Any]] = {"collective": "alltoall", "b": 1, "e": "8M"}
    required: ClassVar[tuple[str, ...]] = ("docker_image_url",)
    unsupported: ClassVar[tuple[str, ...]] = ("use_deepep_matrix",)
    metrics: ClassVar[tuple[str, ...]] = ("default", "time-avg", "time-max", "bandwidth_avg_gb_s")
    success: ClassVar[str | None] = r"avg\s+min\s+max"
    read = staticmethod(read_ucc)

    def words(self, args: Arguments, extra: Mapping[str, str]) -> list[str]:
        words = ["/opt/hpcx/ucc/bin/ucc_perftest", "-c", args["collective"], "-b", args["b"], "-e", args["e"]]
        words += ["--gen", args["gen"]] if "gen" in args else []
        return [*words, "-m", "cuda", "-F", *_assigned(extra)]


class OsuBench(Template):
    """A program of the OSU micro-benchmarks."""

    defaults: ClassVar[Mapping[str, Any]] = {"full": True}
    required: ClassVar[tuple[str, ...]] = ("docker_image_url", "benchmarks_dir", "benchmark")
    metrics: ClassVar[tuple[str, ...]] = ("default", "latency_us", "bandwidth_mb_s", "messages_s")
    success: ClassVar[str | None] = "# Size|# OSU MPI (Hello|Init)"
    read = staticmethod(read_osu)
    _without_full: ClassVar[frozenset[str]] = frozenset(
        [
            *("osu_latency", "osu_latency_mt", "osu_latency_mp", "osu_latency_persistent", "osu_multi_lat"),
            *("osu_bw", "osu_bw_persistent", "osu_bibw", "osu_bibw_persistent", "osu_mbw_mr"),
            *("osu_put_latency", "osu_get_latency", "osu_acc_latency", "osu_get_acc_latency", "osu_cas_latency"),
            *("osu_fop_latency", "osu_put_bw", "osu_get_bw", "osu_put_bibw", "osu_init", "osu_hello"),
        ]
    )
    """Programs that do not know `--full`."""

    def words(self, args: Arguments, extra: Mapping[str, str]) -> list[str]:
        program = args["benchmark"]
        words = [f"{args['benchmarks_dir']}/{program}"]
        knows_full = (
            program not in self._without_full and "{" not in program
        )  # of those that are searched, some may not
        for name, value in args.items():
            option = f"--{name.replace('_', '-')}"
            if name in self.required or value is False or (name == "full" and not knows_full):
                continue
            words += [option] if value is True else [option, value]
        return words + _assigned(extra)


class Fio(Template):
    """fio, once per task."""

    defaults: ClassVar[Mapping[str, Any]] = {"fio_binary": "fio", "num_tasks_per_node": 1}
    metrics: ClassVar[tuple[str, ...]] = (
        "default",
        *("read_bw", "write_bw", "read_iops", "write_iops", "read_latency", "write_latency"),
    )
    success: ClassVar[str | None] = "IOPS="
    read = staticmethod(read_fio)

    def words(self, args: Arguments, extra: Mapping[str, str]) -> list[str]:
        words = [args["fio_binary"]]
        for name, value in args.get("args", {}).items():
            words += self._option(name, value)
        return [*words, *_assigned(extra), *([args["job_file"]] if "job_file" in args else [])]

    def _option(self, name: str, value: Any) -> list[str]:
        if isinstance(value, Mapping):
            return [word for inner in value.values() for word in self._option(name, inner)]
        option = name if name.startswith("-") else f"--{name}"
        return [] if value is False else [option] if value is True else [f"{option}={value}"]

    def launcher(self, args: Arguments, mpi: str) -> list[str]:
        return ["env", *UNSET_TASKS, "srun", "--export=ALL", f"--ntasks-per-node={args['num_tasks_per_node']}"]

    def options(self, args: Mapping[str, Any]) -> list[str]:
        names = {"metric_operation": "all", "metric_name": "bw", "metric_aggregate": "sum"}
        return [str(args.get(name, default)).lower() for name, default in names.items()]


def _assigned(extra: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" if value else name for name, value in extra.items()]


templates: dict[str, Template] = {
    "Sleep": Sleep(),
    "BashCmd": BashCmd(),
    "SlurmContainer": SlurmContainer(),
    "Fio": Fio(),
    "NcclTest": NcclTest(),
    "UCCTest": UccTest(),
    "OSUBench": OsuBench(),
}
"""The supported values of `test_template_name`."""
