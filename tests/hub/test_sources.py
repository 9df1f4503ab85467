"""Which files a split consists of: here, and on a Hub that answers on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.hub.server import Hub
from tests.hub.support import documents, windows, write
from tests.text.tokenizers_for_tests import gpt2_like

from penstock.hub import sources_of

ROOT = Path(__file__).parents[2]


# ------------------------------------------------------------------------------------------- here


@pytest.mark.parametrize(
    ("kind", "split", "plain"),
    [
        ("parquet", "train", True),
        ("jsonl", "train", True),
        ("jsonl.gz", "train", True),
        ("parquet", "train[:10%]", False),
        ("parquet", "train+test", False),
        ("parquet", "all", False),
        ("csv", "train", False),
    ],
)
def test_whole_splits_of_parquet_and_json_lines_are_plain(
    kind: str, split: str, plain: bool, tmp_path: Path
) -> None:
    folder = write(tmp_path / "d", kind, "train", documents(10))
    write(folder, kind, "test", documents(10))
    found = sources_of(str(folder), None, split)
    assert (found.plain, found.revision, found.split) == (plain, None, split)
    both = split in ("train+test", "all")
    wanted = [f"{name}-0000{i}-of-00002.{kind}" for name in ("train", "test") for i in range(2)]
    assert [Path(path).name for path in found.paths] == wanted[: 4 if both else 2]
    assert all(Path(path).is_file() for path in found.paths)


def test_settings_of_the_card_that_change_documents_are_left_to_datasets(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", "parquet", "train", documents(10))
    card = "configs:\n- config_name: default\n  data_files: '*.parquet'\n"
    (folder / "README.md").write_text(f"---\n{card}---\n")
    assert sources_of(str(folder)).plain
    card += "  filters: [[id, '>', 2]]\n"
    (folder / "README.md").write_text(f"---\n{card}---\n")
    assert not sources_of(str(folder)).plain


def test_stamps_tell_when_a_file_is_another(tmp_path: Path) -> None:
    folder = str(write(tmp_path / "d", "jsonl", "train", documents(10)))
    before = sources_of(folder)
    assert sources_of(folder) == before
    write(tmp_path / "d", "jsonl", "train", documents(9))
    after = sources_of(folder)
    assert after.paths == before.paths
    assert after.stamps != before.stamps


# -------------------------------------------------------------------------------------- the Hub

CHILD = """
import json, sys
import numpy as np
from penstock import HuggingFaceDataset, PenstockError

for line in sys.stdin:
    name, split, config, revision, tokenizer = json.loads(line)
    try:
        dataset = HuggingFaceDataset(
            name, split, "text", 32, tokenizer, config, revision=revision, workers=0,
            backend="reference",
        )
        rows = dataset.take(np.arange(len(dataset)))["input_ids"].tolist()
        files = dataset.files
        print(json.dumps([files.revision, files.paths, rows]), flush=True)
    except PenstockError as error:
        print(json.dumps([type(error).__name__, str(error)]), flush=True)
"""


class Asking:
    """A process that opens datasets of a Hub, one at a time."""

    def __init__(self, url: str, *, offline: bool) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": str(int(offline))},
        )

    def __enter__(self) -> Asking:
        return self

    def __exit__(self, *_: object) -> None:
        self.child.communicate()

    def open(
        self, name: str, split: str = "train", config: str = "", revision: str | None = None
    ) -> Any:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        asked = [name, split, config or None, revision, str(gpt2_like())]
        self.child.stdin.write(json.dumps(asked) + "\n")
        self.child.stdin.flush()
        return json.loads(self.child.stdout.readline())


def test_a_dataset_of_the_hub_is_pinned_remembered_and_read_from_there(tmp_path: Path) -> None:
    old, new = documents(60), documents(60, seed=1)
    write(tmp_path / "d" / "data", "parquet", "train", old)
    with Hub({"acme/tales": tmp_path / "d"}) as hub:
        first = hub.main["acme/tales"]
        with Asking(hub.url, offline=False) as asking:
            revision, paths, rows = asking.open("acme/tales")
            assert revision == first
            assert paths[0].startswith(f"hf://datasets/acme/tales@{first}/data/train-00000")
            assert np.array_equal(rows, windows(old, 32)[:, :-1])

            write(tmp_path / "d" / "data", "parquet", "train", new)
            second = hub.push("acme/tales", tmp_path / "d")
            count = len(hub.asked)
            assert asking.open("acme/tales", revision=first) == [revision, paths, rows]
            assert len(hub.asked) == count  # a commit cannot change

            revision, _, rows = asking.open("acme/tales")
            assert revision == second
            assert np.array_equal(rows, windows(new, 32)[:, :-1])
            _, _, rows = asking.open("acme/tales", "train[10:50]")
            assert np.array_equal(rows, windows(new[10:50], 32)[:, :-1])

            kind, said = asking.open("acme/nothing")
            assert kind == "MissingData"
            assert "acme/nothing can be read neither as a directory here nor from the Hub" in said
            kind, said = asking.open("acme/tales", revision="v9")
            assert (kind, "Revision 'v9' doesn't exist" in said) == ("MissingData", True)
            kind, said = asking.open("acme/tales", "valid")
            assert said == "acme/tales has no split 'valid'; its splits: train"
            kind, said = asking.open("acme/tales", config="de")
            assert kind == "ConfigError"
            assert "acme/tales (de) cannot be loaded: BuilderConfig 'de' not found" in said

        count = len(hub.asked)
        with Asking(hub.url, offline=True) as asking:
            assert asking.open("acme/tales")[0] == second
            assert asking.open("acme/tales", revision=first)[0] == first
            kind, said = asking.open("acme/unseen")
            assert (kind, "the Hub cannot be asked for it" in said) == ("MissingData", True)
        assert len(hub.asked) == count
