"""A training run killed with SIGKILL at random moments and resumed is one that never was."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.loader.support import Endless, write_store
from tests.loader.training import GLOBAL_BATCH, make, rows

ROOT = Path(__file__).parents[2]

RUN = """
[data]
pack_sequences = {packed}

[[data.datasets]]
path = "{root}/web"
weight = 3.0

[[data.datasets]]
path = "{root}/code"

[[data.phases]]
start_step = 40
dataset_weights = {{ web = 0.5 }}
lr_scale = 0.5
"""


@pytest.fixture
def toml(tmp_path: Path) -> str:
    write_store(tmp_path / "web", 60)
    write_store(tmp_path / "code", 25, seed=1)
    file = tmp_path / "run.toml"
    file.write_text(RUN.format(root=tmp_path, packed="true"))
    return str(file)


def undisturbed(toml: str, batches: int) -> list[list[str]]:
    iterator = Endless(make(toml, world=1, rank=0, threads=0))
    return [rows(next(iterator)) for _ in range(batches)]


def start(
    toml: str, folder: Path, batches: int, luck: random.Random
) -> list[subprocess.Popen[bytes]]:
    """One process for all ranks, or one each."""
    world, threads = luck.choice([1, 2, 3, 4]), luck.choice([0, 2])
    ranks: list[list[str]] = [[]]
    if world == 2 and luck.random() < 0.7:
        ranks = [["0"], ["1"]]
    checkpoint(folder)
    (folder / "processes").write_text(str(len(ranks)))
    settings = [toml, str(folder), str(batches), str(world), str(threads)]
    command = [sys.executable, "-m", "tests.loader.training", *settings]
    return [subprocess.Popen([*command, *rank], cwd=ROOT) for rank in ranks]


def checkpoint(folder: Path) -> None:
    """Begin where all processes have come to: nothing keeps them in step, as a trainer would."""
    saved = states(folder)
    if saved and len(saved) == int((folder / "processes").read_text()):
        reached = [json.loads(file.read_text()) for file in saved]
        least = min(reached, key=lambda state: state["position"])
        (folder / "begin.json").write_text(json.dumps(least))
    for file in saved:
        file.unlink()


def states(folder: Path) -> list[Path]:
    return sorted(folder.glob("state-*.json"))


def kill_sometime(
    processes: list[subprocess.Popen[bytes]], folder: Path, luck: random.Random
) -> None:
    """While it starts, or a moment after it has begun to deliver."""
    if (folder / "begin.json").exists() and luck.random() < 0.2:
        time.sleep(luck.uniform(0, 1.5))
    else:
        end = time.monotonic() + 60
        while len(states(folder)) < len(processes) and processes[0].poll() is None:
            assert time.monotonic() < end
            time.sleep(0.005)
        time.sleep(luck.uniform(0, 0.15))
    for process in processes:
        process.kill()  # SIGKILL; nothing where it has finished
    for process in processes:
        process.wait()


def survive(toml: str, folder: Path, *, kills: int, batches: int, seed: int) -> None:
    folder.mkdir()
    luck = random.Random(seed)
    for _ in range(kills):
        processes = start(toml, folder, batches, luck)
        kill_sometime(processes, folder, luck)
    for process in start(toml, folder, batches, luck):
        assert process.wait(timeout=120) == 0
    expected = undisturbed(toml, batches)
    seen: set[tuple[int, int]] = set()  # (batch, place in it)
    for log in folder.glob("log-*"):
        for line in log.read_text().splitlines():
            if not line.endswith("]]"):
                continue  # empty, or cut short by a kill
            number, rank, world, digests = json.loads(line)
            where = f"batch {number}, rank {rank} of {world}, seed {seed}"
            assert digests == expected[number][rank::world], where
            seen |= {(number, place) for place in range(rank, GLOBAL_BATCH, world)}
    assert len(seen) == batches * GLOBAL_BATCH, f"seed {seed}"
    assert json.loads((folder / "begin.json").read_text())["position"] > 0


def test_a_run_killed_four_times_and_resumed_on_other_ranks_delivers_the_same(
    toml: str, tmp_path: Path
) -> None:
    survive(toml, tmp_path / "out", kills=4, batches=300, seed=int(time.time()))


@pytest.mark.long
def test_a_run_killed_thirty_times_delivers_the_same(toml: str, tmp_path: Path) -> None:
    survive(toml, tmp_path / "out", kills=30, batches=2500, seed=int(time.time()))
