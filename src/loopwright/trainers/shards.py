"""A policy in shards (FSDP): each worker holds a part of every weight, and the whole of a layer only while it runs.

Gradients and what the optimizer remembers lie in the same parts.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(module: nn.Module, layers: Iterable[nn.Module], device: str) -> None:
    """Leave each worker its part, on its device, to which no more than a layer is moved at a time."""
    mesh = init_device_mesh(torch.device(device).type, (distributed.get_world_size(),))
    for one in (*layers, module):
        # Also the last one: what stayed whole would be out of date once its parts are changed.
        fully_shard(one, mesh=mesh, reshard_after_forward=True)


def whole(value: Tensor) -> Tensor:
    """All of a tensor. Where it lies in shards, every worker must ask for it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def gathered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All of each tensor. Where they lie in shards, every worker must ask for them, and the first one has them."""
    found = {}
    for name, value in tensors.items():
        one = whole(value.detach())
        if not isinstance(value, DTensor):
            found[name] = one
        elif distributed.get_rank() == 0:
            found[name] = one.cpu()  # one at a time: all of them may be more than a GPU holds
    return found


def held(value: Tensor, place: Tensor) -> Tensor:
    """Of a whole tensor, what this worker has at a place."""
    if not isinstance(place, DTensor):
        return value
    return distribute_tensor(value.to(place.device), place.device_mesh, place.placements, src_data_rank=None)
