"""Data-parallel coordinates of device meshes, over gloo."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from penstock import ConfigError
from penstock.ranks import data_parallel

MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...], tuple[str, ...] | None]] = {
    "dp x tp": ((2, 2), ("dp", "tp"), None),
    "tp first": ((2, 2), ("tp", "dp"), None),
    "hybrid": ((2, 2, 1), ("dp_replicate", "dp_shard", "tp"), None),
    "pipeline": ((2, 1, 2), ("pp", "dp_shard", "cp"), None),
    "own names": ((2, 2), ("rows", "columns"), ("columns",)),
}
WANTED = {  # of global ranks 0 to 3
    "dp x tp": [(0, 2), (0, 2), (1, 2), (1, 2)],
    "tp first": [(0, 2), (1, 2), (0, 2), (1, 2)],
    "hybrid": [(0, 4), (1, 4), (2, 4), (3, 4)],
    "pipeline": [(0, 1), (0, 1), (0, 1), (0, 1)],
    "own names": [(0, 2), (1, 2), (0, 2), (1, 2)],
}


def one_rank(rank: int, file: str, out: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=4)
    found: dict[str, Any] = {}
    for name, (shape, names, axes) in MESHES.items():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        found[name] = data_parallel(mesh, axes)
    unnamed = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    for wrong in (None, ["dp"]):
        try:
            data_parallel(unnamed, wrong)
        except ConfigError as error:
            found[f"error {wrong}"] = str(error)
    out.put((rank, found))
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_along_other_axes_than_data_read_the_same(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    out = context.SimpleQueue()
    file = str(tmp_path / "store")
    ranks = [context.Process(target=one_rank, args=(rank, file, out)) for rank in range(4)]
    for process in ranks:
        process.start()
    found = dict(out.get() for _ in ranks)
    for process in ranks:
        process.join()
        assert process.exitcode == 0
    for name, wanted in WANTED.items():
        assert [found[rank][name] for rank in range(4)] == wanted, name
    assert "which of them read different data" in found[0]["error None"]
    assert "state axes that it has" in found[0]["error ['dp']"]
