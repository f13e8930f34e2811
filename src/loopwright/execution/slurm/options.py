"""The settings of a Slurm system, and the command lines that follow from them."""

import math
import sys
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from loopwright.execution.system import SystemConfig


class SlurmOptions(SystemConfig):
    """How jobs are submitted and followed."""

    type: Literal["slurm"] = "slurm"
    """`slurm`: jobs of a Slurm cluster."""
    mode: Literal["per_trial", "allocation"] = "per_trial"
    """`per_trial`: each trial is a job. `allocation`: one job is submitted, and trials are steps inside it."""
    retries: int = Field(default=3, ge=0)
    """How often a trial that was lost to a failed node or to preemption is attempted again under its number."""
    partition: str | None = None
    """The partition; by default the cluster's own."""
    account: str | None = None
    """The account that jobs are charged to."""
    qos: str | None = None
    """The quality of service."""
    constraint: str | None = None
    """Features that nodes must have, as `sbatch --constraint` takes them."""
    nodelist: str | None = None
    """Nodes to use, such as "n[1-4]"."""
    exclude: str | None = None
    """Nodes not to use."""
    reservation: str | None = None
    """A reservation to run in."""
    gpus: int | None = Field(default=None, ge=0)
    """GPUs per node of each job, or of the allocation; by default `[run.workload] gpus`."""
    container_image: str | None = None
    """A container image that commands run in, by `srun --container-image` (pyxis)."""
    launcher: Literal["auto", "srun", "direct"] = "auto"
    """`direct` starts a command once, on the first node of its job; `srun` starts it on each node. `auto`: `srun` for
    several nodes, a container image or an allocation, otherwise `direct`."""
    srun_arguments: tuple[str, ...] = ()
    """Further arguments of `srun`."""
    arguments: tuple[str, ...] = ()
    """Further arguments of `sbatch`, such as "--mem=8G"."""
    nodes: int = Field(default=1, ge=1)
    """How many nodes the allocation has (`mode = "allocation"`)."""
    time_limit_s: float | None = Field(default=None, gt=0)
    """The time limit of the allocation; by default the partition's own."""
    margin_s: float = Field(default=60.0, ge=0)
    """How much longer than `timeout_s` Slurm's own time limit of a job is."""
    poll_s: float = Field(default=2.0, ge=1)
    """Seconds between two queries of the queue; one query covers all jobs."""
    python: str = sys.executable
    """The Python on compute nodes, which must have Loopwright installed."""

    def sbatch(self, name: str, nodes: int, gpus: int, timeout_s: float | None, extra: Sequence[str] = ()) -> list[str]:
        """The command line that submits a job script from standard input."""
        limit_s = self.time_limit_s if self.mode == "allocation" else timeout_s
        if self.mode != "allocation" and limit_s is not None:
            limit_s += self.grace_s + self.margin_s
        options = {
            "job-name": name,
            "nodes": str(nodes),
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
            "nodelist": self.nodelist,
            "exclude": self.exclude,
            "reservation": self.reservation,
            "gres": f"gpu:{count}" if (count := self.gpus if self.gpus is not None else gpus) else None,
            "time": str(math.ceil(limit_s / 60)) if limit_s is not None else None,
        }
        # Files and directories of the job are ours to open: Slurm's own messages about them say nothing.
        nowhere = (f"--{stream}=/dev/null" for stream in ("input", "output", "error"))
        fixed = ["--parsable", "--no-requeue", "--chdir=/", *nowhere]
        settings = [f"--{key}={value}" for key, value in options.items() if value is not None]
        return ["sbatch", *fixed, *settings, *extra, *self.arguments]

    def srun(self, nodes: int, gpus: int, *, once: bool) -> list[str]:
        """What goes before a command that is started by srun; empty if it is started directly."""
        is_step = self.mode == "allocation"
        is_plain = self.launcher == "auto" and nodes == 1 and self.container_image is None
        if self.launcher == "direct" or ((is_plain or once) and not is_step):
            return []
        words = ["srun", "--unbuffered", "--quiet", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
        words += ["--kill-on-bad-exit=1"]
        words += ["--exact", f"--gres=gpu:{gpus}" if gpus else "--gres=none"] if is_step else []
        if once:  # a step that holds all of its nodes
            return [*words, "/bin/sh", "-c", '[ "$SLURM_PROCID" != 0 ] || exec "$0" "$@"']
        words += [f"--container-image={self.container_image}"] if self.container_image is not None else []
        return [*words, *self.srun_arguments]
