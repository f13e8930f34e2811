"""A private Slurm cluster of two nodes on loopback, without systemd.

    python -m tests.slurm.cluster start DIRECTORY
    python -m tests.slurm.cluster stop DIRECTORY

Everything it needs is in one directory: a munge key and socket, the configuration, logs, state and process ids.
Starting it twice starts it once.
"""

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol", "srun")
NODES = ("n1", "n2")
CPUS = 64
"""Declared, so that many jobs run at a time on a small machine."""
_CONF = """
ClusterName=loopwright
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CryptoType=crypto/munge
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
PropagateResourceLimits=NONE
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
ReturnToService=2
KillWait=5
MinJobAge=300
SlurmdParameters=config_overrides
SlurmdTimeout=30
MpiDefault=none
GresTypes=gpu
{nodes}
PartitionName=main PriorityTier=5 PreemptMode=OFF Nodes={names} Default=YES MaxTime=INFINITE DefaultTime=10 State=UP
PartitionName=low Nodes={names} MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=CANCEL
PartitionName=high Nodes={names} MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF
"""


def is_installed() -> bool:
    """Whether a cluster can be started: Slurm's programs are here, and we are root."""
    return os.getuid() == 0 and all(shutil.which(name, path=_PATH) for name in PROGRAMS)


_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


class Cluster:
    """The cluster in a directory. Its processes are stopped by their ids."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = {"SLURM_CONF": str(directory / "slurm.conf")}
        """What Slurm's programs need to find this cluster."""

    def start(self) -> None:
        """Start what is not running. Returns once both nodes are idle."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o755)
        with self._lock():
            (self.directory / f"user.{os.getpid()}").touch()
            if not (self.directory / "slurm.conf").exists():
                self._configure()
            if not self._is_running("munged"):
                self._spawn(
                    "munged",
                    *("--foreground", "--force", "--num-threads=2", f"--key-file={self.directory}/munge.key"),
                    *(f"--socket={self.directory}/munge.socket", f"--pid-file={self.directory}/munge.pid"),
                    *(f"--log-file={self.directory}/munge.log", f"--seed-file={self.directory}/munge.seed"),
                )
                self._wait(lambda: (self.directory / "munge.socket").exists(), "munged")
            self.start_controller()
            for node in NODES:
                self.start_node(node)
            self._wait(lambda: self.states() == dict.fromkeys(NODES, "idle") or self._resume(), "both nodes")

    def stop(self) -> None:
        """Stop everything."""
        with self._lock():
            for node in NODES:
                self.kill(f"slurmd.{node}")
            self.kill("slurmctld")
            self.kill("munged")

    def leave(self) -> None:
        """Stop the cluster and delete its directory, unless another process uses it."""
        (self.directory / f"user.{os.getpid()}").unlink(missing_ok=True)
        if not any(Path(f"/proc/{path.suffix[1:]}").exists() for path in self.directory.glob("user.*")):
            self.stop()
            shutil.rmtree(self.directory, ignore_errors=True)

    def start_controller(self) -> None:
        """Start slurmctld, also after it was killed; it recovers its jobs."""
        if not self._is_running("slurmctld"):
            self._spawn("slurmctld", "-D")

    def start_node(self, node: str, hidden: Path | None = None) -> None:
        """Start a node's slurmd, also after it was killed. It does not see the content of a hidden directory."""
        if self._is_running(f"slurmd.{node}"):
            return
        arguments = ("slurmd", "-D", "-N", node)
        if hidden is None:
            self._spawn(*arguments, name=f"slurmd.{node}")
            return
        script = 'mount -t tmpfs tmpfs "$0" && exec "$@"'
        self._spawn("unshare", "--mount", "sh", "-c", script, str(hidden), *arguments, name=f"slurmd.{node}")

    def kill(self, name: str) -> None:
        """End one of munged, slurmctld, slurmd.n1, slurmd.n2."""
        if not self._is_running(name):
            return
        pid = int((self.directory / f"{name}.started").read_text())
        os.kill(pid, signal.SIGTERM)
        deadline_s = time.monotonic() + 10
        while self._is_running(name):
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            if time.monotonic() > deadline_s:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def states(self) -> dict[str, str]:
        """The state of each node; empty while the controller does not answer."""
        lines = self.run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %t").stdout.splitlines()
        return {line.split()[0]: line.split()[1] for line in lines}

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's programs on this cluster."""
        environment = {**os.environ, **self.environment, "PATH": _PATH}
        return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=60)

    def _resume(self) -> bool:
        # A node that was down or drained by an earlier test comes back.
        for node, state in self.states().items():
            if state not in ("idle", "mix", "alloc"):
                self.run("scontrol", "update", f"nodename={node}", "state=resume")
        return False

    def _configure(self) -> None:
        for name in ("state", *(f"spool.{node}" for node in NODES)):
            (self.directory / name).mkdir(exist_ok=True)
        (self.directory / "munge.key").write_bytes(os.urandom(1024))
        (self.directory / "munge.key").chmod(0o400)
        with socket.socket() as one, socket.socket() as two, socket.socket() as three:
            ports = []
            for each in (one, two, three):
                each.bind(("127.0.0.1", 0))
                ports.append(each.getsockname()[1])
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} "
            "RealMemory=4000 Gres=gpu:2 State=UNKNOWN"
            for node, port in zip(NODES, ports[1:], strict=True)
        )
        devices = "".join(
            f"NodeName={node} Name=gpu File=/dev/{device}\n"
            for node in NODES
            for device in ("null", "zero")  # the plug-in needs files that exist
        )
        (self.directory / "gres.conf").write_text(devices)
        (self.directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        part = self.directory / "slurm.conf.part"
        part.write_text(
            _CONF.format(
                host=socket.gethostname(),
                controller=ports[0],
                directory=self.directory,
                nodes=nodes,
                names=",".join(NODES),
            )
        )
        part.rename(self.directory / "slurm.conf")

    def _spawn(self, program: str, *arguments: str, name: str = "") -> None:
        name = name or program
        with (self.directory / f"{name}.out").open("ab") as log:
            process = subprocess.Popen(
                [program, *arguments],
                env={**os.environ, **self.environment, "PATH": _PATH},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        (self.directory / f"{name}.started").write_text(str(process.pid))
        process.returncode = 0  # nobody waits for it: it is stopped by its id, perhaps by another process

    def _is_running(self, name: str) -> bool:
        try:
            pid = int((self.directory / f"{name}.started").read_text())
            status = Path(f"/proc/{pid}/stat").read_text()
        except (OSError, ValueError):
            return False
        return f"({name.partition('.')[0]})" in status and ") Z" not in status

    def _wait(self, condition: object, what: str) -> None:
        deadline_s = time.monotonic() + 120
        while not condition():  # type: ignore[operator]
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{what} did not start; see the logs in {self.directory}")
            time.sleep(0.2)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with (self.directory / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


if __name__ == "__main__":
    cluster = Cluster(Path(sys.argv[2]).absolute())
    cluster.start() if sys.argv[1] == "start" else cluster.stop()
    print(f"export SLURM_CONF={cluster.environment['SLURM_CONF']}")
