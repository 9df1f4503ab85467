"""A dataset is tokenized once, whoever comes when, and gives the documented samples."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.hub.support import documents, rows_of, stream, windows, write
from tests.prepare.test_pipeline import tree
from tests.text.tokenizers_for_tests import gpt2_like, llama3_like

from penstock import (
    ConfigError,
    DataError,
    DistributedSampler,
    HuggingFaceDataset,
    MissingData,
    MissingExtra,
    MixtureDataset,
    StatefulDataLoader,
    verify,
)
from penstock.hub import store_of
from penstock.prepare import plan, preparation

ROOT = Path(__file__).parents[2]
T = 32


def load(folder: Any, split: str = "train", **options: Any) -> HuggingFaceDataset:
    options = {"workers": 0, "backend": "reference", **options}
    text_field = options.pop("text_field", "text")
    return HuggingFaceDataset(folder, split, text_field, T, gpt2_like(), **options)


def stores() -> list[Path]:
    return sorted(Path(os.environ["PENSTOCK_CACHE_DIR"], "hub").glob("[!.]*"))


def leftovers() -> list[Path]:
    found = Path(os.environ["PENSTOCK_CACHE_DIR"], "hub").glob(".*")
    return [path for path in found if not path.name.endswith(".lock")]


# ---------------------------------------------------------------------------------- the samples


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "jsonl.gz"])
def test_samples_are_all_documents_ended_by_eos_and_cut_end_to_end(
    kind: str, tmp_path: Path
) -> None:
    texts = documents(60)
    dataset = load(write(tmp_path / "d", kind, "train", texts))
    expected = windows(texts, T)
    assert np.array_equal(rows_of(dataset), expected)
    item = dataset[5]
    assert sorted(item) == ["input_ids", "labels"]
    assert item["input_ids"].dtype == item["labels"].dtype == torch.int64
    assert item["input_ids"].tolist() == expected[5, :-1].tolist()
    assert item["labels"].tolist() == expected[5, 1:].tolist()
    assert dataset.store.total("sequence") == len(stream(texts))
    assert verify(dataset.store.path).ok


def test_worker_processes_and_the_fast_backend_give_the_same_samples(tmp_path: Path) -> None:
    texts = documents(60)
    dataset = load(write(tmp_path / "d", "parquet", "train", texts), workers=2, backend="auto")
    assert np.array_equal(rows_of(dataset), windows(texts, T))


@pytest.mark.parametrize(
    ("split", "chosen"),
    [
        ("train[5:25]", slice(5, 25)),
        ("train[:50%]", slice(0, 25)),
        ("train+test", slice(0, 60)),
        ("all", slice(0, 60)),
    ],
)
def test_parts_and_sums_of_splits_are_what_datasets_makes_of_them(
    split: str, chosen: slice, tmp_path: Path
) -> None:
    texts = documents(60)
    folder = write(tmp_path / "d", "parquet", "train", texts[:50])
    write(folder, "parquet", "test", texts[50:])
    dataset = load(folder, split)
    assert not dataset.files.plain
    assert np.array_equal(rows_of(dataset), windows(texts[chosen], T))
    assert not leftovers()


def test_what_only_datasets_can_read_comes_by_way_of_it(tmp_path: Path) -> None:
    texts = documents(60)
    dataset = load(write(tmp_path / "d", "csv", "train", texts))
    assert not dataset.files.plain
    assert np.array_equal(rows_of(dataset), windows(texts, T))
    assert not leftovers()


def test_packed_samples_keep_documents_apart_as_documented(tmp_path: Path) -> None:
    texts = documents(60)
    dataset = load(write(tmp_path / "d", "jsonl", "train", texts), pack_sequences=True)
    expected = windows(texts, T)
    end = dataset.store.eos_token_id
    batch = dataset.take(np.arange(len(dataset)))
    document = np.cumsum(expected == end, axis=1) - (expected == end)  # EOS ends its own
    labels = np.where(document[:, 1:] == document[:, :-1], expected[:, 1:], -100)
    assert np.array_equal(batch["labels"].numpy(), labels)
    assert np.array_equal(batch["doc_ids"].numpy(), document[:, :-1])
    assert {"position_ids", "cu_seqlens", "max_seqlen"} < set(batch)
    assert sorted(dataset[0]) == ["doc_ids", "input_ids", "labels"]


def test_another_config_of_a_dataset_is_another_dataset(tmp_path: Path) -> None:
    texts = documents(40), documents(40, seed=1)
    folder = tmp_path / "d"
    for name, found in zip("ab", texts, strict=True):
        write(folder / name, "parquet", "train", found)
    card = "".join(f"- config_name: {name}\n  data_files: {name}/*.parquet\n" for name in "ab")
    (folder / "README.md").write_text(f"---\nconfigs:\n{card}---\n")
    for name, found in zip("ab", texts, strict=True):
        dataset = load(folder, dataset_config=name)
        assert np.array_equal(rows_of(dataset), windows(found, T))
    with pytest.raises(ConfigError, match=r"\(c\) cannot be loaded: .*'c' not found.*'a', 'b'"):
        load(folder, dataset_config="c")
    with pytest.raises(ConfigError, match="Config name is missing"):
        load(folder)


def test_settings_of_a_card_are_heeded_and_another_setting_is_another_store(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "a.csv").write_text("text;y,text\n" + "a;b,c\n" * 99)
    paths = set()
    for separator, text in ((";", "a"), (",", "c")):
        card = f"configs:\n- config_name: x\n  data_files: a.csv\n  sep: '{separator}'\n"
        (folder / "README.md").write_text(f"---\n{card}---\n")
        dataset = load(folder)
        assert np.array_equal(rows_of(dataset), windows([text] * 99, T))
        paths.add(dataset.store.path)
    assert len(paths) == 2


def test_a_directory_is_the_same_whatever_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "d", "parquet", "train", documents(60))
    monkeypatch.chdir(tmp_path)
    assert load(folder).store.path == load("d").store.path == load("./d").store.path


# --------------------------------------------------------------------------------- the one store


def test_a_second_start_reads_no_document(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", "parquet", "train", documents(60))
    first = load(folder)
    before = tree(first.store.path), first.store.path.stat().st_mtime_ns
    for file in folder.iterdir():  # damaged, and not to be seen from outside
        stat = file.stat()
        file.write_bytes(b"?" * stat.st_size)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    again = load(folder, pack_sequences=True, workers=2)
    assert np.array_equal(rows_of(first), rows_of(first))
    assert again.store.path == first.store.path
    assert (tree(again.store.path), again.store.path.stat().st_mtime_ns) == before


def test_other_documents_or_another_tokenizer_field_or_split_make_another_store(
    tmp_path: Path,
) -> None:
    texts = documents(60)
    folder = write(tmp_path / "d", "jsonl", "train", texts)
    write(folder, "jsonl", "test", texts)
    paths = {load(folder).store.path, load(folder, "test").store.path}
    other = HuggingFaceDataset(
        folder, "train", "text", T, llama3_like(), workers=0, backend="reference"
    )
    paths.add(other.store.path)
    write(folder, "jsonl", "train", texts[:50])
    dataset = load(folder)
    paths.add(dataset.store.path)
    assert len(paths) == 4
    assert paths == set(stores())
    assert np.array_equal(rows_of(dataset), windows(texts[:50], T))


def test_a_cache_directory_can_be_named_and_moved_without_being_written_to(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", "parquet", "train", documents(60))
    first = load(folder, cache_dir=tmp_path / "mine")
    assert not stores()
    (tmp_path / "mine").rename(tmp_path / "yours")
    for path in (tmp_path / "yours").glob(".*.lock"):
        path.unlink()
    again = load(folder, cache_dir=tmp_path / "yours")
    assert again.identity() == first.identity()
    assert not list((tmp_path / "yours").glob(".*.lock"))


RUN = """
import logging, sys
WORKERS = 0
from penstock import HuggingFaceDataset
if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    dataset = HuggingFaceDataset(sys.argv[1], "train", "text", 32, sys.argv[2], workers=WORKERS)
    print(dataset.take(range(len(dataset)))["labels"].sum().item(), dataset.store.path)
"""


def start(script: Path, *arguments: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def test_of_processes_that_come_at_once_one_writes_and_all_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", "parquet", "train", documents(60))
    script = tmp_path / "run.py"
    script.write_text(RUN)
    children = [start(script, folder, gpt2_like()) for _ in range(2)]
    ended = [child.communicate() for child in children]
    assert [child.returncode for child in children] == [0, 0], ended
    assert len({out for out, _ in ended}) == 1
    assert sum(err.count("tokenizing") for _, err in ended) == 1


KILLED = """
import os, signal
from penstock.prepare import preparation, plan
from penstock.prepare.run import Run
works_of, keep = plan.works_of, Run.keep
preparation.works_of = lambda files: works_of(files, 4_000)
def keep_two(run, number, mark):
    keep(run, number, mark)
    if len(run.marks) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
Run.keep = keep_two
"""


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_writer_that_is_killed_is_taken_over_from_where_it_was(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [text for text in documents(60) if text.strip()]
    folder = write(tmp_path / "d", kind, "train", texts)
    script = tmp_path / "run.py"
    script.write_text(KILLED + RUN)
    child = start(script, folder, gpt2_like())
    assert child.wait() == -signal.SIGKILL
    child.communicate()
    (store,) = stores()
    assert not (store / "manifest.json").exists()
    made = {shard.stat().st_ino for shard in store.glob(".prepare/parts/*/*/shard_*")}
    assert len(made) >= 2
    monkeypatch.setattr(preparation, "works_of", lambda files: plan.works_of(files, 4_000))
    dataset = load(folder)
    assert np.array_equal(rows_of(dataset), windows(texts, T))
    assert dataset.store.path == store
    there = {shard.stat().st_ino for shard in store.glob("*/shard_*")}
    assert len(made & there) >= 2
    assert not leftovers()


def test_what_a_kill_left_beside_a_finished_store_is_removed(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", "parquet", "train", documents(60))
    path = load(folder, "train[:40]").store.path
    left = path.with_name(f".{path.name}.documents")
    left.mkdir()
    load(folder, "train[:40]")
    assert not left.exists()


def test_documents_that_are_gone_are_written_again_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = documents(60)
    folder = write(tmp_path / "d", "parquet", "train", texts)
    monkeypatch.setattr(
        preparation.Run, "keep", lambda *_: (_ for _ in ()).throw(DataError("stopped"))
    )
    with pytest.raises(DataError, match="stopped"):
        load(folder, "train[:40]")
    monkeypatch.undo()
    os.environ["PENSTOCK_CACHE_DIR"] = str(tmp_path / "cache")
    shutil.rmtree(*leftovers())
    assert np.array_equal(rows_of(load(folder, "train[:40]")), windows(texts[:40], T))


def test_a_script_without_a_main_guard_is_told_so_and_does_not_hang(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", "parquet", "train", documents(60))
    script = tmp_path / "run.py"
    script.write_text(
        RUN.replace("WORKERS = 0", "WORKERS = 1").replace('if __name__ == "__main__":', "if True:")
    )
    child = start(script, folder, gpt2_like())
    _, err = child.communicate()
    assert child.returncode == 1
    assert "put what it does under `if __name__ == '__main__':`" in err
    assert "DataError: a worker ended with code 1" in err


# -------------------------------------------------------------------------------------- training


def test_a_loader_over_it_resumes_with_another_world_size(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", "parquet", "train", documents(60))

    def loader(rank: int, world: int, batch: int) -> StatefulDataLoader:
        dataset = load(folder)
        sampler = DistributedSampler(dataset, world, rank, seed=7)
        return StatefulDataLoader(dataset, batch, sampler)

    one = loader(0, 1, 4)
    rows = [batch["input_ids"] for batch in one]
    again = loader(0, 1, 4)
    batches = iter(again)
    for _ in range(5):
        next(batches)
    state = json.loads(json.dumps(again.state_dict()))
    ranks = [loader(rank, 2, 2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
    for expected, *parts in zip(rows[5:], *ranks, strict=True):
        assert torch.equal(expected[0::2], parts[0]["input_ids"])
        assert torch.equal(expected[1::2], parts[1]["input_ids"])


def test_its_own_state_has_the_documented_keys(tmp_path: Path) -> None:
    dataset = load(write(tmp_path / "d", "parquet", "train", documents(60)))
    assert dataset.state_dict() == {"epoch": 0, "sample_idx": 0, "total_sequences": len(dataset)}
    dataset.load_state_dict({"epoch": 3, "sample_idx": 9, "total_sequences": 1})
    assert dataset.state_dict() == {"epoch": 3, "sample_idx": 9, "total_sequences": len(dataset)}
    dataset.load_state_dict({})
    assert dataset.state_dict()["epoch"] == 0


def test_it_mixes_with_others_and_is_gathered_with_them(tmp_path: Path) -> None:
    texts = documents(60), documents(60, seed=1)
    parts = [
        load(write(tmp_path / name, "parquet", "train", found))
        for name, found in zip("ab", texts, strict=True)
    ]
    mixture = MixtureDataset(parts, ["a", "b"])
    whole = np.concatenate([windows(found, T) for found in texts])
    assert np.array_equal(rows_of(mixture), whole)
    assert mixture.sample_bytes  # several batches are fetched at once


# ------------------------------------------------------------------------------------- in words


def test_what_does_not_exist_is_answered_with_what_does(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", "parquet", "train", documents(60))
    write(folder, "parquet", "test", documents(60))
    with pytest.raises(ConfigError, match=r"has no split 'valid'; its splits: train, test"):
        load(folder, "valid")
    with pytest.raises(ConfigError, match=r"has no split 'valid'"):
        load(folder, "train[:3]+valid[:10%]")
    for split in ("train", "train[:20]"):
        with pytest.raises(ConfigError, match=r"no column 'body' .*; its columns: id, text$"):
            load(folder, split, text_field="body")
        with pytest.raises(ConfigError, match=r"'id' of .* is int, not text; its columns: id,"):
            load(folder, split, text_field="id")
    with pytest.raises(MissingData, match="neither as a directory here nor from the Hub"):
        load(tmp_path / "nowhere")
    with pytest.raises(MissingData, match="org/nothing is no directory here, and the Hub cannot"):
        load("org/nothing")
    with pytest.raises(ConfigError, match="csv is a format to `datasets`, not a dataset"):
        load("csv")
    with pytest.raises(ConfigError, match="a directory here, which has no revision 'main'"):
        load(folder, revision="main")
    (tmp_path / "bare").mkdir()
    with pytest.raises(MissingData, match="bare can be read neither"):
        load(tmp_path / "bare")
    assert not stores()


def test_too_little_is_said(tmp_path: Path) -> None:
    few = write(tmp_path / "few", "jsonl", "train", ["short", "texts"])
    with pytest.raises(ConfigError, match=r"no sample of 32 inputs and labels: its \d+ tokens"):
        load(few)
    none = write(tmp_path / "none", "parquet", "train", [])
    with pytest.raises(DataError, match=r"split 'train' of .*none holds no documents"):
        load(none)
    with pytest.raises((DataError, ConfigError), match=r"'train\[:1\]' of .*none"):
        load(none, "train[:1]")
    with pytest.raises(ConfigError, match="seq_len must be at least 1"):
        HuggingFaceDataset(few, "train", "text", 0, gpt2_like())


def test_a_tokenizer_without_eos_is_an_error(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    shutil.copy(gpt2_like() / "tokenizer.json", tokenizer)
    folder = write(tmp_path / "d", "parquet", "train", documents(60))
    with pytest.raises(ConfigError, match="names no eos_token"):
        HuggingFaceDataset(folder, "train", "text", T, tokenizer, workers=0)


def test_a_document_without_text_is_an_error_or_left_out(tmp_path: Path) -> None:
    texts: list[Any] = documents(400)
    texts[200] = None
    folder = write(tmp_path / "d", "parquet", "train", texts)
    with pytest.raises(DataError, match=r"train-00001.*row 0: 'text' is null"):
        load(folder)
    dataset = load(folder, policy="reject")
    assert np.array_equal(rows_of(dataset), windows([t for t in texts if t is not None], T))
    assert dataset.store.metadata["ledger"]["rejected"] == {
        "'text' is null, where text was expected": 1
    }


def test_a_missing_library_is_answered_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"pip install 'penstock\[hub\]'"):
        load(write(tmp_path / "d", "parquet", "train", documents(60)))


def test_a_cache_that_cannot_be_written_to_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "d", "parquet", "train", documents(60))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="set PENSTOCK_CACHE_DIR to a folder that can"):
        load(folder)


def test_files_that_change_while_they_are_looked_at_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", "parquet", "train", documents(60))
    dataset = load(folder)
    old = dataset.files  # the stamps of before
    table = pa.table({"text": documents(9)})
    pq.write_table(table, old.paths[0])
    shutil.rmtree(dataset.store.path)
    with pytest.raises(DataError, match="is being changed"):
        store_of(old, "text", gpt2_like(), workers=0)
