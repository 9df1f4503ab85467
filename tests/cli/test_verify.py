"""`penstock verify` over real stores."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from penstock.cli import main
from penstock.store import ShardWriter


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two shards of three documents, 12 tokens in all."""
    path = tmp_path / "tokens"
    with ShardWriter(path, {"sequence": "uint16"}, max_tokens_per_shard=8) as writer:
        for length in (3, 4, 5):
            writer.append({"sequence": np.arange(length)})
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["verify", *map(str, arguments)])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


def test_a_sound_store_is_one_line_and_exit_code_0(store: Path) -> None:
    result = run(store)
    assert result.exit_code == 0
    assert result.stdout == f"{store}: 2 shards, 3 documents, 12 tokens: sound\n"
    assert result.stderr == ""


def test_a_flipped_bit_is_exit_code_1_and_names_the_shard(store: Path) -> None:
    flip_a_bit(store / "__default__/shard_0001/sequence.bin")
    result = run(store)
    assert result.exit_code == 1
    first, problem = result.stdout.splitlines()
    assert first.endswith("1 problem")
    assert "shard_0001" in problem


def test_json_says_the_same(store: Path) -> None:
    result = run(store, "--json")
    report = json.loads(result.stdout)
    assert report["store"] == str(store)
    assert (report["ok"], report["problems"]) == (True, [])
    assert (report["shards"], report["documents"], report["tokens"]) == (2, 3, 12)

    flip_a_bit(store / "__default__/shard_0000/sequence.bin")
    result = run(store, "--json")
    assert result.exit_code == 1
    assert not json.loads(result.stdout)["ok"]


def test_a_folder_that_is_no_store_is_a_problem(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result.exit_code == 1
    assert "No supported" in result.stdout


def test_a_path_that_does_not_exist_is_a_mistake_in_the_call(tmp_path: Path) -> None:
    result = run(tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "does not exist" in result.stderr
