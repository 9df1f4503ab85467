"""The [run] table: what looks at a run from outside has to know."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.run import load_run

DATA = '[data]\ndataset_path = "tokens"\n'


def toml(folder: Path, run: str) -> Path:
    path = folder / "run.toml"
    path.write_text(f"{run}\n{DATA}")
    return path


def test_options_come_before_the_table_and_the_table_before_defaults(tmp_path: Path) -> None:
    path = toml(tmp_path, "[run]\nbatch_size = 8\nseq_len = 128\nworld_size = 4")
    run = load_run(path, world_size=2, seed=None, steps=10)
    assert (run.schedule, run.seq_len, run.world_size, run.seed) == (((0, 8),), 128, 2, 0)
    assert (run.steps, run.data.dataset_path) == (10, "tokens")


def test_a_schedule_is_a_list_of_step_and_size(tmp_path: Path) -> None:
    path = toml(tmp_path, "[run]\nbatch_size = [[0, 8], [100, 16]]\nseq_len = 128")
    assert load_run(path).schedule == ((0, 8), (100, 16))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("", "does not say batch_size"),
        ("[run]\nbatch_size = 8", "does not say seq_len: set it in a table .run., or give --seq-"),
        ("[run]\nbatch_size = 0\nseq_len = 8", "batch_size is a whole number >= 1, not 0"),
        ("[run]\nbatch_size = [8]\nseq_len = 8", "a list of .step, size., not"),
        ("[run]\nbatch_size = []\nseq_len = 8", "is empty"),
        ("[run]\nbatch_size = 8\nseqlen = 8\nseq_len = 8", "run.seqlen .meant: seq_len"),
        ("[run]\nbatch_size = 8\nseq_len = 8\nsteps = 0", "steps is a whole number >= 1"),
        ("run = 3", "run must be a table"),
    ],
)
def test_what_cannot_be_meant_is_said(tmp_path: Path, table: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run(toml(tmp_path, table))
