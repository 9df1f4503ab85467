"""A split streamed: every document once a pass, in its own order, at the commit of the state."""

from __future__ import annotations

import inspect
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.hub.server import Hub
from tests.hub.support import documents, row_tokens, stream, write
from tests.text.tokenizers_for_tests import gpt2_like

from penstock import (
    ConfigError,
    DataConfig,
    DataError,
    DatasetSource,
    PenstockError,
    StatefulDataLoader,
    StateMismatch,
    StreamingHuggingFaceDataset,
    build_dataloader,
    merge_states,
)

ROOT = Path(__file__).parents[2]
T = 32


def load(folder: Any, split: str = "train", **options: Any) -> StreamingHuggingFaceDataset:
    options = {"lanes": 12, "threads": 2, **options}
    text_field = options.pop("text_field", "text")
    return StreamingHuggingFaceDataset(folder, split, text_field, T, gpt2_like(), **options)


def tokens(rows: Any) -> Counter[int]:
    return Counter(token for row in rows for token in row_tokens(row))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "d", "parquet", "train", documents(90))


# ---------------------------------------------------------------------------------------- the rows


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "jsonl.gz", "csv"])
def test_a_pass_is_all_documents_ended_by_eos(kind: str, tmp_path: Path) -> None:
    texts = documents(60)
    folder = write(tmp_path / "d", kind, "train", texts)
    found = [row for rank in range(2) for row in load(folder, rank=rank, world_size=2)]
    assert tokens(found) == Counter(stream(texts))
    assert {row["input_ids"].shape for row in found} == {(T,)}
    in_order = [t for row in load(folder, lanes=1, shuffle_buffer_size=0) for t in row_tokens(row)]
    assert in_order == stream(texts)


@pytest.mark.parametrize(
    ("split", "chosen"), [("train[5:25]", slice(5, 25)), ("train+test", slice(0, 60))]
)
def test_parts_and_sums_of_splits_are_what_datasets_makes_of_them(
    split: str, chosen: slice, tmp_path: Path
) -> None:
    texts = documents(60)
    folder = write(tmp_path / "d", "parquet", "train", texts[:50])
    write(folder, "parquet", "test", texts[50:])
    dataset = load(folder, split, lanes=1, shuffle_buffer_size=0)
    assert not dataset.files.plain
    assert [t for row in dataset for t in row_tokens(row)] == stream(texts[chosen])


def test_it_is_used_as_it_was_where_it_comes_from(folder: Path) -> None:
    documented = ["dataset_name", "split", "text_field", "seq_len", "tokenizer_path"]
    documented += ["dataset_config", "rank", "world_size", "seed", "shuffle_buffer_size"]
    documented += ["pack_sequences"]
    parameters = inspect.signature(StreamingHuggingFaceDataset).parameters
    assert list(parameters)[: len(documented)] == documented
    defaults = [parameters[name].default for name in documented[5:]]
    assert defaults == [None, 0, 1, 42, 10000, False]
    dataset = StreamingHuggingFaceDataset(
        dataset_name=str(folder),
        split="train",
        text_field="text",
        seq_len=T,
        tokenizer_path=str(gpt2_like()),
        rank=1,
        world_size=2,
    )
    for name, value in {
        "dataset_name": str(folder),
        "split": "train",
        "text_field": "text",
        "seq_len": T,
        "tokenizer_path": str(gpt2_like()),
        "dataset_config": None,
        "rank": 1,
        "world_size": 2,
        "seed": 42,
        "shuffle_buffer_size": 10000,
        "pack_sequences": False,
    }.items():
        assert getattr(dataset, name) == value
    assert repr(dataset) == f"<passes over split 'train' of {folder}: rank 1 of 2>"
    batches = torch.utils.data.DataLoader(dataset, batch_size=4)
    assert next(iter(batches))["input_ids"].shape == (4, T)
    state = dataset.state_dict()
    assert state["epoch"] == 0
    assert state["rank_docs_consumed"] > 0
    with pytest.raises(TypeError):
        len(dataset)  # type: ignore[arg-type]


def test_packed_rows_keep_documents_apart(folder: Path) -> None:
    plain, packed = load(folder), load(folder, pack_sequences=True)
    end = packed.tokenizer.eos_id
    crossed = 0
    for row, apart in zip(plain, packed, strict=True):
        assert torch.equal(row["input_ids"], apart["input_ids"])
        ends = row["input_ids"] == end
        assert torch.equal(apart["labels"], row["labels"].masked_fill(ends, -100))
        crossed += int(ends.sum())
        assert apart["doc_ids"].shape == (T,)
    assert crossed


def test_a_state_goes_on_on_other_ranks_and_is_small_json(folder: Path) -> None:
    whole = [row_tokens(row) for row in load(folder)]
    everyone = [load(folder, rank=rank, world_size=3) for rank in range(3)]
    first = [[row_tokens(row) for row in itertools.islice(each, 6)] for each in everyone]
    found = [row for rows in zip(*first, strict=True) for row in rows]
    assert found == whole[:18]
    state = json.loads(json.dumps(merge_states([each.state_dict() for each in everyone])))
    assert len(json.dumps(state)) < 1500
    again = load(folder)
    again.load_state_dict(state)
    assert [row_tokens(row) for row in again] == whole[18:]


def test_a_rank_reads_the_row_groups_of_its_own_lanes_alone(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    texts = [text for text in documents(48, seed=3) if text.strip()][:40]
    for number, text in enumerate(texts):
        table = pa.table({"text": [text], "id": [number]})
        pq.write_table(table, folder / f"train-{number:05d}-of-00040.parquet")
    rows = [list(load(folder, rank=rank, world_size=2, threads=1)) for rank in range(2)]
    assert sum(map(tokens, rows), Counter()) == Counter(stream(texts))
    mine = [n for n, text in enumerate(texts) if tokens(rows[0]) >= Counter(stream([text]))]
    others = [n for n, text in enumerate(texts) if not tokens(rows[0]) >= Counter(stream([text]))]
    assert len(others) > 10 < len(mine)
    for number in others:  # their pages, not their footers
        file = folder / f"train-{number:05d}-of-00040.parquet"
        raw, stat = file.read_bytes(), file.stat()
        size = int.from_bytes(raw[-8:-4], "little") + 8
        file.write_bytes(b"?" * (len(raw) - size) + raw[-size:])
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    again = load(folder, rank=0, world_size=2, threads=1)
    assert [row_tokens(row) for row in again] == [row_tokens(row) for row in rows[0]]
    with pytest.raises(DataError, match="cut short, damaged"):
        list(load(folder, rank=1, world_size=2))


# ------------------------------------------------------------------------------- what is said of it


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"split": "valid"}, r"d has no split 'valid'; its splits: train$"),
        ({"dataset_config": "de"}, r"d \(de\) cannot be loaded: .*'de' not found"),
        ({"text_field": "body"}, r"has no column 'body' to read; its columns: id, text$"),
        ({"text_field": "id"}, r"'id' of split 'train' of .* is int64, not text; its columns"),
        ({"world_size": 5}, r"^12 lanes cannot be dealt evenly to 5 ranks: run 1, 2, 3, 4, 6, 12"),
        ({"rank": 4, "world_size": 4}, r"rank must lie in \[0, 4\)"),
        ({"shuffle_buffer_size": -1}, "shuffle_buffer_size is a whole number >= 0, not -1"),
        ({"revision": "main"}, "is a directory here, which has no revision 'main'"),
    ],
)
def test_mistakes_are_one_sentence_when_it_is_made(
    options: dict[str, Any], words: str, folder: Path
) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        load(folder, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_column_that_is_not_there_is_told_of_other_formats_too(kind: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "d", kind, "train", documents(30))
    with pytest.raises(ConfigError, match="has no column 'body' to read; its columns: id, text"):
        load(folder, text_field="body")


def test_a_tokenizer_without_eos_or_none_at_all_is_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "no-eos"
    path.mkdir()
    (path / "tokenizer.json").write_bytes((gpt2_like() / "tokenizer.json").read_bytes())
    (path / "tokenizer_config.json").write_text("{}")
    for where, words in (
        (path, "no-eos names no eos_token, and documents have to end with one"),
        (tmp_path / "nowhere", "nowhere"),
    ):
        with pytest.raises(PenstockError, match=words) as error:
            StreamingHuggingFaceDataset(folder, "train", "text", T, where)
        assert "\n" not in str(error.value)


def test_an_empty_split_is_one_error(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    table = pa.table({"text": pa.array(["", ""], pa.string())})
    pq.write_table(table, folder / "train.parquet")
    for rank in range(2):
        with pytest.raises(PenstockError, match="holds no document with a token"):
            list(load(folder, rank=rank, world_size=2))
    pq.write_table(table[:0], folder / "train.parquet")
    with pytest.raises(PenstockError, match="holds no document"):
        list(load(folder))


def test_states_of_other_data_are_refused_and_change_nothing(folder: Path, tmp_path: Path) -> None:
    dataset = load(folder)
    list(itertools.islice(dataset, 5))
    good = dataset.state_dict()
    other = load(write(tmp_path / "e", "parquet", "train", documents(91))).state_dict()
    for state, words in (
        (other, "data was .* and is .* here"),
        (load(folder, seed=1).state_dict(), "seed was 1 and is 42"),
        (good | {"pass": "x"}, "pass is 'x', where a whole number was"),
        (None, "it is None, where a dict was expected"),
    ):
        with pytest.raises(StateMismatch, match=words):
            dataset.load_state_dict(state)  # type: ignore[arg-type]
        assert dataset.state_dict() == good
    with pytest.warns(UserWarning, match="only 7 documents to leave out"):
        dataset.load_state_dict({"epoch": 2, "rank_docs_consumed": 7})
    assert dataset.state_dict()["epoch"] == 2


# ------------------------------------------------------------------------------------ from a config


def toml(tmp_path: Path, folder: Path, more: str = "") -> Path:
    path = tmp_path / "run.toml"
    path.write_text(
        f"""
        [data]
        hf_dataset_name = "{folder}"
        hf_streaming = true
        tokenizer_path = "{gpt2_like()}"
        num_workers = 2
        {more}
        """
    )
    return path


def build(config: Any, **options: Any) -> Any:
    return build_dataloader(config, **{"batch_size": 4, "seq_len": T, "seed": 5, **options})


def test_a_config_streams_and_goes_on(folder: Path, tmp_path: Path) -> None:
    path = toml(tmp_path, folder)
    loaders = [build(path, rank=rank, world_size=2) for rank in range(2)]
    found = [list(loader) for loader in loaders]
    assert isinstance(loaders[0].dataset, StreamingHuggingFaceDataset)
    labels = torch.cat([batch["labels"] for batches in found for batch in batches])
    assert labels.shape[1] == T
    assert int((labels != -100).sum()) >= len(stream(documents(90))) - len(labels)
    state = merge_states([loader.state_dict() for loader in loaders])
    again = build(path, batch_size=2)
    again.load_state_dict(state)
    assert again.step == loaders[0].step
    assert next(iter(again))["labels"].shape == (2, T)
    packed = build(toml(tmp_path, folder, "pack_sequences = true"))
    assert {"doc_ids", "position_ids", "cu_seqlens"} < set(next(iter(packed)))


def test_a_validation_pass_is_finite_in_order_and_padded(folder: Path, tmp_path: Path) -> None:
    path = toml(tmp_path, folder)
    loaders = [build(path, rank=rank, world_size=2, split="val") for rank in range(2)]
    for loader in loaders:
        assert loader.dataset.shuffle_buffer_size == 0
    both = []
    for _ in range(2):
        batches = [batch for loader in loaders for batch in loader]
        assert {batch["labels"].shape for batch in batches} == {(4, T)}
        trained = torch.cat([batch["labels"] for batch in batches])
        # Each document's tokens and EOS but the first token of each row are labels.
        rows = int((trained != -100).any(1).sum())
        assert int((trained != -100).sum()) + rows == len(stream(documents(90)))
        both.append(trained)
    assert torch.equal(*both)
    for loader in loaders:
        ledger = loader.stats()["ledger"]
        assert ledger["rows"] * (T + 1) == ledger["delivered"] + ledger["padding"]
        assert ledger["tokens"] == ledger["delivered"] + ledger["waiting"]


def test_what_a_config_cannot_have_is_said(folder: Path, tmp_path: Path) -> None:
    name = {"hf_dataset_name": str(folder), "hf_streaming": True}
    tokenizer = {"tokenizer_path": str(gpt2_like())}
    with pytest.raises(ConfigError, match=r"needs a tokenizer: set tokenizer_path in \[data\]"):
        build(DataConfig(**name))
    for more in ({"packing": "concat"}, {"packing": "concat", "balance": "attention"}):
        with pytest.raises(ConfigError, match="packing and balance need all documents' lengths"):
            build(DataConfig(**name, **tokenizer, **more))
    with pytest.raises(ConfigError, match="hf_streaming does not go with datasets"):
        DataConfig(**name, **tokenizer, datasets=[DatasetSource(path="x")])
    with pytest.raises(ConfigError, match="240 lanes cannot be dealt evenly to 7 ranks"):
        build(toml(tmp_path, folder), rank=0, world_size=7)


# ------------------------------------------------------------------------------------- from the Hub


class Child:
    """A process whose Hub is on loopback."""

    def __init__(self, url: str) -> None:
        online = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT)}
        self.child = subprocess.Popen(
            [sys.executable, "-m", "tests.hub.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | online | {"PENSTOCK_REMOTE_WAIT": "0.01"},
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.child.communicate(timeout=60)

    def ask(self, command: str, value: Any = None) -> Any:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(json.dumps([command, value]) + "\n")
        self.child.stdin.flush()
        return json.loads(self.child.stdout.readline())

    def make(self, **options: Any) -> None:
        named = {"dataset_name": "acme/tales", "split": "train", "text_field": "text"}
        named |= {"seq_len": T, "tokenizer_path": str(gpt2_like()), "lanes": 12, "threads": 2}
        assert self.ask("make", named | options) is None


def test_a_state_pins_the_commit_and_reads_survive_what_a_hub_does(tmp_path: Path) -> None:
    texts, newer = documents(60), documents(60, seed=1)
    folder = write(tmp_path / "d", "parquet", "train", texts)
    expected = [row_tokens(row) for row in load(folder)]
    with Hub({"acme/tales": folder}) as hub, Child(hub.url) as child:
        first = hub.main["acme/tales"]
        child.make()
        hub.faults += ["429", "", "cut", "503", "", "cut"]
        rows = child.ask("rows", 20)
        assert rows == expected[:20]
        assert not hub.faults
        state = child.ask("state")
        assert state["revision"] == first

        write(folder, "parquet", "train", newer)
        second = hub.push("acme/tales", folder)
        child.make()
        assert child.ask("revision") == second
        new = child.ask("rows", 3)
        assert child.ask("load", state) is None
        assert child.ask("revision") == first
        assert rows + child.ask("rows", 10_000) == expected

        kind, said = child.ask("load", state | {"revision": "0" * 40})["error"]
        assert (kind, "acme/tales" in said, "\n" in said) == ("MissingData", True, False)
        kind, said = child.ask("load", state | {"revision": "main"})["error"]
        assert (kind, "revision is 'main', where a commit was expected" in said) == (
            "StateMismatch",
            True,
        )
        child.make(revision=second)
        kind, said = child.ask("load", state)["error"]
        assert (kind, "asks for another one" in said) == ("StateMismatch", True)
        assert child.ask("rows", 3) == new

        del hub.commits["acme/tales"][first]  # history was rewritten
        child.make()
        (refused,) = itertools.islice(errors(child, state), 1)
        assert refused[0] == "MissingData"
        assert "\n" not in refused[1]
        assert first[:7] in refused[1]


def errors(child: Child, state: Any) -> Any:
    """What is said on the way to rows from a state."""
    for command, value in (("load", state), ("rows", 5)):
        said = child.ask(command, value)
        if isinstance(said, dict) and "error" in said:
            yield said["error"]


def test_ranks_ask_the_hub_for_their_own_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    luck = [text * 40 for text in documents(60, seed=4) if len(text) > 300]
    for number, text in enumerate(luck[:24]):
        pq.write_table(pa.table({"text": [text]}), folder / f"train-{number:05d}-of-00024.parquet")
    with Hub({"acme/tales": folder}) as hub, Child(hub.url) as child:
        asked: list[Sequence[str]] = []
        for rank in range(2):
            child.make(rank=rank, world_size=2, lanes=24, threads=1)
            child.ask("state")  # has read the footers
            before = len(hub.asked)
            assert child.ask("rows", 10_000)
            asked.append([each for each in hub.asked[before:] if "resolve" in each])
        assert all(12 <= len(set(each)) <= 16 for each in asked), asked  # some is read ahead


def test_an_iterator_of_the_loader_is_the_datasets_pass(folder: Path) -> None:
    dataset = load(folder)
    rows = [row_tokens(row) for row in load(folder)]
    batches = StatefulDataLoader(dataset, 5)
    labels = torch.cat([batch["labels"] for batch in batches])
    assert len(rows) <= len(labels) < len(rows) + 5
