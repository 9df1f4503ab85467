"""A stream's process killed with SIGKILL in mid-pass is gone on with exactly, on other ranks."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.stream.numbered import everything, lengths, traced, write_numbered

from penstock import merge_states

ROOT = Path(__file__).parents[2]
SIZES = lengths(400, seed=2)


def run(corpus: Path, folder: Path, world: int, rows: int | None) -> None:
    """Run to the end, or kill it when it has logged so many rows or more."""
    command = [sys.executable, "-m", "tests.stream.killed", str(corpus), str(folder), str(world)]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ)
    if rows is None:
        assert process.wait(timeout=200) == 0
        return
    log = folder / "log"
    end = time.monotonic() + 200
    while process.poll() is None and (not log.exists() or log.read_text().count("}]") < rows):
        assert time.monotonic() < end
        time.sleep(0.005)
    process.kill()
    process.wait()


def harvest(folder: Path, world: int) -> list[dict[str, Any]]:
    """What a checkpoint knows to be delivered; and the checkpoint to go on from."""
    files = [folder / f"state-{rank}.json" for rank in range(world)]
    rows = []
    if all(file.exists() for file in files):
        states = [json.loads(file.read_text()) for file in files]
        for line in (folder / "log").read_text().splitlines():
            if line.endswith("}]"):
                rank, step, row = json.loads(line)
                if step <= states[rank]["step"]:
                    rows.append({key: torch.tensor(value[0]) for key, value in row.items()})
        merged = merge_states(states)
        (folder / "begin.json").write_text(json.dumps({**merged, "step": 0}))
    for file in (*files, folder / "log"):
        file.unlink(missing_ok=True)
    return rows


def survive(tmp_path: Path, kills: int, seed: int) -> None:
    corpus = write_numbered(tmp_path / "d", SIZES, group=3)
    folder, luck = tmp_path / "run", random.Random(seed)
    folder.mkdir()
    rows: list[dict[str, Any]] = []
    for _ in range(kills):
        world = luck.choice([1, 2, 3, 4])
        run(corpus, folder, world, luck.randint(1, 2 * 400 // kills))
        rows += harvest(folder, world)
    run(corpus, folder, 2, None)
    rows += harvest(folder, 2)
    assert (folder / "done").exists()
    assert traced(rows, SIZES) == everything(SIZES, 2), f"seed {seed}"


def test_a_run_killed_twice_has_each_document_once_a_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    survive(tmp_path, 2, int(time.time()))


@pytest.mark.long
def test_a_run_killed_twenty_times_has_each_document_once_a_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    survive(tmp_path, 20, int(time.time()))
