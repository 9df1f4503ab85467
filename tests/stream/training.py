"""A training run for `test_kill`: batches in, their digests into a log, states beside it.

    python -m tests.stream.training DATA TOKENIZER PACKING FOLDER ROWS WORLD SIZE THREADS RANK...

One process stands for the ranks that are named. It goes on from FOLDER/begin.json. After each batch
it writes each rank's state as state-ROW-RANK.json: to another name, then renamed.
"""

from __future__ import annotations

import json
import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tests.stream.support import make, rows_of

from penstock.text import open_tokenizer


def digests(rows: list[Any]) -> list[str]:
    return [blake2b(repr(row).encode(), digest_size=6).hexdigest() for row in rows]


def main() -> None:
    data, tokenizer, packing, folder, rows, world, size, threads, *ranks = sys.argv[1:]
    streams = {
        int(rank): make(
            data,
            packing,
            rank=int(rank),
            world=int(world),
            batch_size=int(size),
            threads=int(threads),
            tokenizer=open_tokenizer(tokenizer, backend="reference"),
        )
        for rank in ranks
    }
    begin = Path(folder, "begin.json")
    for stream in streams.values():
        if begin.exists():
            stream.load_state_dict(json.loads(begin.read_text()))
    row = next(iter(streams.values())).state_dict()["row"]
    with Path(folder, f"log-{ranks[0]}").open("a") as log:
        log.write("\n")  # what a killed process wrote of a line stays a line of its own
        while row < int(rows):
            for rank, stream in streams.items():
                found = digests(rows_of(stream.next_batch()))
                log.write(json.dumps([row, rank, int(world), found]) + "\n")
            log.flush()
            row += int(world) * int(size)
            for rank, stream in streams.items():
                state = Path(folder, f"state-{row}-{rank}.json")
                part = state.with_suffix(".part")
                part.write_text(json.dumps(stream.state_dict()))
                part.replace(state)


if __name__ == "__main__":
    main()
