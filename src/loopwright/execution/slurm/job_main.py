"""The compute node's side of a job: runs one command as a local process and writes how it ended.

`python -m loopwright.execution.slurm.job_main BASE` reads BASE.json and writes BASE.done, which carries the exit code:
no accounting is needed. The command's timeout, its output limits and the end of its process tree are those of a local
trial.
"""

import asyncio
import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loopwright.core.errors import LaunchError, StorageError
from loopwright.execution.base import Command
from loopwright.execution.local.executor import LocalExecutor

_SIGNALS_S = 0.1
_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")


async def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Run the command; returns the record of its end."""
    job = {name: value for name, value in os.environ.items() if name.startswith("SLURM") or name in _DEVICES}
    command = Command(
        argv=tuple(spec["argv"]),
        directory=Path(spec["directory"]),
        environment={**spec["environment"], **job},
        stdout=Path(spec["stdout"]),
        stderr=Path(spec["stderr"]),
        timeout_s=spec["timeout_s"],
        marker=spec["marker"],
    )
    executor = LocalExecutor(output_bytes=spec["output_bytes"], grace_s=spec["grace_s"])
    task = asyncio.ensure_future(executor.run(command, lambda _: None))
    interrupted = asyncio.Event()

    def interrupt() -> None:
        interrupted.set()
        task.cancel()

    # scancel, a time limit and preemption begin with SIGTERM.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, interrupt)
    try:
        done = await task
        if done.exit_code != 0 and not done.timed_out:
            # Slurm signals the command, too, which may be faster than we are.
            await asyncio.sleep(_SIGNALS_S)
        if interrupted.is_set():
            return {"interrupted": True}
    except asyncio.CancelledError:
        return {"interrupted": True}
    except LaunchError as error:
        return {"launch_error": str(error), "infra": error.infra}
    except StorageError as error:
        return {"launch_error": str(error), "infra": True}
    return asdict(done)


def main(base: str) -> int:
    """Run the job of this name; returns the command's exit code, for Slurm's own records."""
    spec = json.loads(Path(f"{base}.json").read_bytes())
    record = asyncio.run(run(spec)) | {"directory": spec["directory"]}
    part = Path(f"{base}.part")
    with part.open("w") as file:
        json.dump(record, file)
        file.flush()
        os.fsync(file.fileno())
    part.rename(f"{base}.done")
    Path(f"{base}.json").unlink(missing_ok=True)
    log = Path(f"{base}.log")
    if log.exists() and log.stat().st_size == 0:
        log.unlink()
    if (number := record.get("signal")) is not None:
        return 128 + int(number)
    return int(record.get("exit_code", 1))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
