"""A run for `test_killed`: rows of two passes into a log, the states beside it.

    python -m tests.stream.killed CORPUS FOLDER WORLD

All ranks live here, a loader each, and go on from FOLDER/begin.json where it is there. After each
row its rank's state is written as a trainer should: to another name, then renamed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.stream.numbered import Numbering

from penstock import StatefulDataLoader
from penstock.stream import PassStream


def main() -> None:
    corpus, folder, world = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    loaders = [
        StatefulDataLoader(
            PassStream(corpus, Numbering(), 16, lanes=12, rank=rank, world_size=world, threads=2), 1
        )
        for rank in range(world)
    ]
    if (begin := folder / "begin.json").exists():
        for loader in loaders:
            loader.load_state_dict(json.loads(begin.read_text()))
    with (folder / "log").open("a") as log:
        log.write("\n")
        while any(loader.epoch < 2 for loader in loaders):
            for rank, loader in enumerate(loaders):
                batch = next(iter(loader), None) if loader.epoch < 2 else None
                if batch is not None:
                    line = {key: batch[key].tolist() for key in ("input_ids", "labels")}
                    log.write(json.dumps([rank, loader.step, line]) + "\n")
                    log.flush()
                part = folder / "part"
                part.write_text(json.dumps(loader.state_dict()))
                part.replace(folder / f"state-{rank}.json")
    (folder / "done").touch()


if __name__ == "__main__":
    main()
