"""A run killed with SIGKILL at random moments and resumed on other ranks is one that never was."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.stream.support import PACKINGS, make, taken
from tests.stream.training import digests
from tests.text.tokenizers_for_tests import gpt2_like

from penstock.stream import merge_states

ROOT = Path(__file__).parents[2]


def start(data: Path, packing: str, out: Path, rows: int, luck: random.Random) -> list[Process]:
    """One process for all ranks, or one each."""
    checkpoint(out)
    world, size, threads = luck.choice([1, 2, 3, 6]), luck.choice([1, 2, 3]), luck.choice([1, 3])
    ranks = [[str(rank) for rank in range(world)]]
    if world == 2 and luck.random() < 0.5:
        ranks = [["0"], ["1"]]
    given = [data, gpt2_like(), packing, out, rows, world, size, threads]
    command = [sys.executable, "-m", "tests.stream.training", *map(str, given)]
    return [subprocess.Popen([*command, *each], cwd=ROOT) for each in ranks]


Process = subprocess.Popen[bytes]


def checkpoint(out: Path) -> None:
    """Begin at the last row at which every rank has saved its state."""
    states: dict[int, list[Path]] = {}
    for file in sorted(out.glob("state-*.json")):
        states.setdefault(int(file.stem.split("-")[1]), []).append(file)
    for _, files in sorted(states.items(), reverse=True):
        read = [json.loads(file.read_text()) for file in files]
        if len(read) == read[0]["world_size"]:
            (out / "begin.json").write_text(json.dumps(merge_states(read)))
            break
    for files in states.values():
        for file in files:
            file.unlink()


def kill_sometime(processes: list[Process], out: Path, luck: random.Random) -> None:
    """While it starts, or a moment after it has begun to deliver."""
    if luck.random() < 0.1:
        time.sleep(luck.uniform(0, 3))
    else:
        end = time.monotonic() + 120
        while not any(out.glob("state-*.json")) and processes[0].poll() is None:
            assert time.monotonic() < end
            time.sleep(0.005)
        time.sleep(luck.uniform(0, 0.2))
    for process in processes:
        process.kill()  # SIGKILL; nothing where it has finished
    for process in processes:
        process.wait()


def survive(data: Path, packing: str, out: Path, *, kills: int, rows: int, seed: int) -> None:
    out.mkdir()
    luck = random.Random(seed)
    for _ in range(kills):
        kill_sometime(start(data, packing, out, rows, luck), out, luck)
    for process in start(data, packing, out, rows, luck):
        assert process.wait(timeout=120) == 0
    with make(data, packing) as stream:
        expected = digests(taken(stream, rows + 18))
    seen: set[int] = set()
    for log in out.glob("log-*"):
        for line in log.read_text().splitlines():
            if not line.endswith("]]"):
                continue  # empty, or cut short by a kill
            row, rank, world, found = json.loads(line)
            places = range(row + rank, row + world * len(found), world)
            assert found == [expected[place] for place in places], (row, rank, world, seed)
            seen |= set(places)
    assert seen >= set(range(rows)), seed


def test_a_run_killed_twice_and_resumed_on_other_ranks_delivers_the_same(
    corpora: dict[str, Path], tmp_path: Path
) -> None:
    seed = int(time.time())
    packing = PACKINGS[seed % 3]
    survive(corpora["mixed"], packing, tmp_path / "out", kills=2, rows=500, seed=seed)


@pytest.mark.long
@pytest.mark.parametrize("packing", PACKINGS)
def test_a_run_killed_twenty_times_delivers_the_same(
    corpora: dict[str, Path], tmp_path: Path, packing: str
) -> None:
    seed = int(time.time())
    survive(corpora["mixed"], packing, tmp_path / "out", kills=20, rows=4000, seed=seed)
