"""Which rank this process is, and of how many."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from penstock.checks import whole
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def rank_and_world(rank: int | None = None, world: int | None = None) -> tuple[int, int]:
    """This process's rank, and how many there are.

    Each is what is given, else torch.distributed's, else RANK or WORLD_SIZE, else a lone process's.

    >>> rank_and_world(3, 8)
    (3, 8)
    """
    joined = dist.is_available() and dist.is_initialized()
    if rank is None:
        rank = dist.get_rank() if joined else _environment("RANK", 0)
    if world is None:
        world = dist.get_world_size() if joined else _environment("WORLD_SIZE", 1)
    rank, world = (whole(each, name) for each, name in ((rank, "rank"), (world, "num_replicas")))
    if world < 1 or not 0 <= rank < world:
        raise ConfigError(f"rank must lie in [0, {world}), the number of replicas, and is {rank}")
    return rank, world


def _environment(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"the environment has {name}={text!r}, which is not a number") from None


# Names of mesh axes along which ranks read different data; along all others they read the same.
DATA_PARALLEL = frozenset(
    [
        "dp",
        "ddp",
        "data",
        "data_parallel",
        "batch",
        "dp_replicate",
        "dp_shard",
        "replicate",
        "shard",
        "fsdp",
        "hsdp",
    ]
)


def data_parallel(mesh: DeviceMesh, axes: Sequence[str] | None = None) -> tuple[int, int]:
    """The rank and world size that loaders take: this process's place among those with other data.

        rank, world_size = data_parallel(mesh)
        loader = build_dataloader(config, ..., rank=rank, world_size=world_size)

    Ranks that differ in tensor-, sequence-, context- or pipeline-parallel axes alone get the same
    place, and so the same batches. `axes` names the data-parallel ones where their names do not.
    """
    names = mesh.mesh_dim_names or ()
    chosen = [name for name in names if name in (DATA_PARALLEL if axes is None else axes)]
    if len(chosen) < len(set(axes or ())) or not chosen:
        wanted = "axes that it has" if axes else "which of them read different data, as axes=[...]"
        raise ConfigError(
            f"this mesh has the axes {', '.join(names) or 'without names'}: state {wanted}"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ConfigError("this process is not part of the mesh, and reads no data for it")
    rank, world = 0, 1
    for name, size, place in zip(names, mesh.shape, coordinate, strict=True):
        if name in chosen:
            rank, world = rank * size + place, world * size
    return rank, world
