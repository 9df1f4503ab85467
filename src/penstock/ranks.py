"""Which rank this process is, and of how many."""

from __future__ import annotations

import os

import torch.distributed as dist

from penstock.checks import whole
from penstock.errors import ConfigError


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
