"""A sharded policy (FSDP): each worker holds a part of every weight, and a full layer only while that runs.

Gradients and optimizer state are sharded in the same way.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(module: nn.Module, layers: Iterable[nn.Module], device: str) -> None:
    """Keep only this worker's part, on its device; at most one layer at a time is moved there in full."""
    mesh = init_device_mesh(torch.device(device).type, (distributed.get_world_size(),))
    for part in (*layers, module):
        # Including the root: parameters left in full would be stale after the shards change.
        fully_shard(part, mesh=mesh, reshard_after_forward=True)


def full(value: Tensor) -> Tensor:
    """The full tensor. If it is sharded, every worker must call this."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def gather(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The full tensors. If they are sharded, every worker must call this; only the first one gets the result."""
    result = {}
    for name, value in tensors.items():
        tensor = full(value.detach())
        if not isinstance(value, DTensor):
            result[name] = tensor
        elif distributed.get_rank() == 0:
            result[name] = tensor.cpu()  # one at a time: all of them may exceed a GPU's memory
    return result


def local_part(value: Tensor, target: Tensor) -> Tensor:
    """This worker's part of a full tensor, sharded like the target."""
    if not isinstance(target, DTensor):
        return value
    return distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
