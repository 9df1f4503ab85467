"""A training run for `test_kill`: batches in, their digests into a log, the state beside it.

    python -m tests.loader.training RUN.json FOLDER STEPS WORLD THREADS [RANK]

Without RANK one process stands for all ranks, by as many loaders. It goes on from
FOLDER/begin.json. After each step each process writes its state, as a trainer should: to another
name, then renamed.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tests.loader.support import Endless

from penstock import StatefulDataLoader, build_dataloader, load_config

GLOBAL_BATCH = 12
SEQ_LEN = 8


def make(toml: str, *, world: int, rank: int, threads: int) -> StatefulDataLoader:
    config = replace(load_config(toml), num_workers=threads)
    return build_dataloader(
        config,
        batch_size=GLOBAL_BATCH // world,
        seq_len=SEQ_LEN,
        seed=11,
        rank=rank,
        world_size=world,
        accumulation=2,
    )


def rows(batch: dict[str, Any]) -> list[str]:
    """A digest of each row of a batch, over all that it holds."""
    keys = [key for key in sorted(batch) if key not in ("cu_seqlens", "max_seqlen")]
    return [
        blake2b(
            b"".join(batch[key][row].numpy().tobytes() for key in keys), digest_size=6
        ).hexdigest()
        for row in range(len(batch["input_ids"]))
    ]


def main() -> None:
    toml, folder, steps, world, threads, *given = sys.argv[1:]
    ranks = [int(given[0])] if given else range(int(world))
    loaders = [make(toml, world=int(world), rank=rank, threads=int(threads)) for rank in ranks]
    name = given[0] if given else "all"
    state, log = Path(folder, f"state-{name}.json"), Path(folder, f"log-{name}")
    if (begin := Path(folder, "begin.json")).exists():  # the same for all ranks
        for loader in loaders:
            loader.load_state_dict(json.loads(begin.read_text()))
    iterators = [Endless(loader) for loader in loaders]
    with log.open("a") as out:
        out.write("\n")  # what a killed process wrote of a line stays a line of its own
        while loaders[0].position // GLOBAL_BATCH < int(steps):
            number = loaders[0].position // GLOBAL_BATCH
            for rank, iterator in zip(ranks, iterators, strict=True):
                line = [number, rank, int(world), rows(next(iterator))]
                out.write(json.dumps(line) + "\n")
            out.flush()
            part = state.with_suffix(".part")
            part.write_text(json.dumps(loaders[0].state_dict()))
            part.replace(state)
            time.sleep(0.001)


if __name__ == "__main__":
    main()
