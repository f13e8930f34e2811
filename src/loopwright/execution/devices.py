"""GPUs of this machine, for `[system] gpus = "auto"`."""

import os
from collections.abc import Mapping
from pathlib import Path


def visible_devices(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> tuple[str, ...]:
    """The ids of all GPUs that processes of this machine may use; those of an enclosing scheduler first."""
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name in environment:
            return tuple(part.strip() for part in environment[name].split(",") if part.strip())
    nvidia = sum(path.name[6:].isdigit() for path in (root / "dev").glob("nvidia*"))
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    amd = sum(path.read_text().strip() not in ("", "0") for path in nodes)
    return tuple(str(number) for number in range(nvidia or amd))
