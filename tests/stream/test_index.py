"""An index says what a stream delivers in an epoch, whoever counts it and however often killed."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.text.tokenizers_for_tests import gpt2_like, stdlib_texts

from penstock.cache import locked
from penstock.errors import ConfigError, DataError, StateMismatch
from penstock.stream import Counts, TextStream, count, merge_states
from penstock.stream import index as index_module
from penstock.stream.index import advised_lanes, command, kept
from penstock.stream.lanes import ChunkLane
from penstock.stream.reading import Reader
from penstock.text.batches import Unit
from penstock.text.tokenizer import open_tokenizer

TOKENIZER = open_tokenizer(gpt2_like())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own."""
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def documents(count: int = 240, seed: int = 0) -> list[str]:
    """Pieces of the standard library, of widely varying length, some of them empty."""
    chance, source = random.Random(seed), "".join(stdlib_texts())
    found = []
    for _ in range(count):
        length = int(chance.lognormvariate(5, 1.2))
        begin = chance.randrange(len(source) - length)
        found.append(source[begin : begin + length] if chance.random() > 0.05 else "")
    return found


def write(folder: Path, kind: str, texts: list[str]) -> Path:
    """Texts in two files of a kind."""
    folder.mkdir(parents=True)
    cut = len(texts) // 3
    for name, part in (("a", texts[:cut]), ("b", texts[cut:])):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in part).encode()
        match kind:
            case "parquet":
                table = pa.table({"text": part})
                pq.write_table(table, folder / f"{name}.parquet", row_group_size=50)
            case "jsonl":
                (folder / f"{name}.jsonl").write_bytes(lines)
            case "gz":
                (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines))
    return folder


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write(tmp_path / "corpus", "parquet", documents())


def opened(corpus: Path, **options: Any) -> TextStream:
    """A stream of short rows, in which padding and cutting both happen."""
    defaults = {"lanes": 3, "rank": 0, "world_size": 1, "threads": 2, "device": "cpu"}
    return TextStream(corpus, TOKENIZER, 64, 2, **(defaults | options))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Unit]:
    """The units that are read, as they are."""
    units: list[Unit] = []
    chunks = Reader.chunks

    def noting(self: Reader, unit: Unit) -> Iterator[Any]:
        units.append(unit)
        return chunks(self, unit)

    monkeypatch.setattr(Reader, "chunks", noting)
    return units


def one_epoch(stream: TextStream) -> tuple[int, int]:
    """Rows, and tokens in them, that the lanes of a chunked stream give in epoch 0."""
    rows = tokens = 0
    for lane in stream.share.started().values():
        assert isinstance(lane, ChunkLane)
        out = np.empty(stream.seq_len + 1, np.uint32)
        while (drawn := lane.row(out)) and lane.last[0] == 0:
            rows += 1
            tokens += drawn.used
    stream.close()
    return rows, tokens


# --- counts


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "gz"])
@pytest.mark.parametrize("lanes", [1, 3])
def test_a_chunked_epoch_delivers_what_was_counted(tmp_path: Path, kind: str, lanes: int) -> None:
    texts = documents()
    stream = opened(write(tmp_path / "corpus", kind, texts), lanes=lanes)
    counts = count(stream)
    assert (counts.rows, counts.tokens) == one_epoch(stream)
    lengths = np.diff(TOKENIZER.encode(texts)[1])
    lengths[lengths > 0] += 1  # EOS
    assert (counts.documents, counts.empty) == (len(texts), int((lengths == 0).sum()))
    assert (counts.tokens, counts.longest) == (int(lengths.sum()), int(lengths.max()))
    assert counts.rows * 65 == counts.tokens + counts.padding


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "gz"])
@pytest.mark.parametrize("lanes", [1, 3])
def test_a_concatenated_epoch_delivers_what_was_counted(
    tmp_path: Path, kind: str, lanes: int
) -> None:
    stream = opened(write(tmp_path / "corpus", kind, documents()), lanes=lanes, packing="concat")
    counts = count(stream)
    used = [drawn.used for _, drawn in iter(lambda: stream.row_of(0), None)]
    assert sum(used) == counts.tokens
    assert counts.rows == counts.tokens // 65
    assert counts.padding == 0
    if lanes == 1:
        assert sum(each == 65 for each in used) == counts.rows
    stream.close()


def test_what_is_cropped_is_not_known_so_rows_are_not_either(corpus: Path) -> None:
    counts = count(opened(corpus, packing="best_fit_crop"))
    assert counts.rows is None
    assert counts.tokens == count(opened(corpus)).tokens
    with pytest.raises(ConfigError, match="give steps a number"):
        counts.steps(1)
    with pytest.raises(ConfigError, match="give steps a number"):
        opened(corpus, packing="best_fit_crop", steps="epoch")


def test_any_number_of_threads_counts_the_same(corpus: Path, tmp_path: Path) -> None:
    one, four = (
        count(opened(corpus, threads=threads), tmp_path / f"{threads}.jsonl") for threads in (1, 4)
    )
    assert one.units == four.units


def test_counting_does_not_move_the_stream(corpus: Path) -> None:
    stream, other = opened(corpus), opened(corpus)
    stream.next_batch(), other.next_batch()
    count(stream)
    assert torch.equal(stream.next_batch()["input_ids"], other.next_batch()["input_ids"])
    assert stream.state_dict() == other.state_dict()
    stream.close(), other.close()


def test_rejects_are_left_out_and_told_by_file(tmp_path: Path) -> None:
    folder = write(tmp_path / "corpus", "jsonl", documents(60))
    with (folder / "b.jsonl").open("a") as file:
        file.write('{"no": "text"}\nnot json\n')
    stream = opened(folder, policy="reject")
    counts = count(stream)
    assert counts.rejected == {str(folder / "b.jsonl"): 2}
    assert counts.documents == 60
    assert (counts.rows, counts.tokens) == one_epoch(stream)


def test_with_policy_error_a_reject_stops_the_count_and_what_is_counted_is_kept(
    tmp_path: Path, read: list[Unit]
) -> None:
    folder = write(tmp_path / "corpus", "jsonl", documents(60))
    with (folder / "b.jsonl").open("a") as file:
        file.write("not json\n")
    stream = opened(folder, threads=1)
    with pytest.raises(DataError, match=r"b\.jsonl"):
        count(stream)
    assert kept(stream)[1] == len(stream.corpus.units) - 1  # the last one is bad
    read.clear()
    assert count(opened(folder, policy="reject")).rejected
    assert len(read) == 1
    with pytest.raises(DataError, match=r"b\.jsonl"):  # also where another run has left it out
        count(stream)


def test_a_corpus_of_nothing_has_no_epoch(tmp_path: Path) -> None:
    folder = write(tmp_path / "corpus", "parquet", [""] * 20)
    counts = count(opened(folder))
    assert (counts.documents, counts.empty, counts.tokens, counts.rows) == (20, 20, 0, 0)
    assert counts.padding_share == counts.padding_at(4) == 0
    with pytest.raises(ConfigError, match="an epoch has 0 rows"):
        opened(folder, steps="epoch")


def test_the_lanes_that_are_advised_keep_padding_within_5_percent(tmp_path: Path) -> None:
    folder = write(tmp_path / "corpus", "jsonl", documents(3000))
    many = opened(folder, lanes=240)
    counts = count(many)
    assert counts.padding_share > 0.1
    lanes = advised_lanes(many, counts, world=2)
    assert lanes is not None
    assert lanes < 240
    assert lanes % 2 == 0
    fewer = count(opened(folder, lanes=lanes))
    assert 0.04 < fewer.padding_share < 0.06


def test_where_documents_cannot_fill_rows_no_lanes_are_advised(tmp_path: Path) -> None:
    word = stdlib_texts()[1][:1000]
    length = next(k for k in range(1, 1000) if len(TOKENIZER.encode([word[:k]])[0]) == 40)
    stream = opened(write(tmp_path / "corpus", "jsonl", [word[:length]] * 300), lanes=6)
    assert advised_lanes(stream, count(stream)) is None


# --- a finite epoch


@pytest.mark.parametrize("packing", ["chunked", "concat"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_epoch_of_steps_ends_on_all_ranks_after_its_rows(
    corpus: Path, packing: Any, world: int
) -> None:
    options: Any = {"packing": packing, "lanes": 6, "world_size": world}
    steps = count(opened(corpus, **options)).rows // (2 * world)
    for rank in range(world):
        endless = opened(corpus, rank=rank, **options)
        with opened(corpus, rank=rank, steps="epoch", **options) as stream, endless:
            assert len(stream) == stream.steps_in_epoch == endless.steps_in_epoch == steps
            batches = list(stream)
            assert len(batches) == steps
            assert list(stream) == []
            for batch, other in zip(batches, endless, strict=False):
                assert torch.equal(batch["input_ids"], other["input_ids"])


def test_an_epoch_ends_at_the_same_row_when_it_is_resumed_with_other_batches(
    corpus: Path,
) -> None:
    counts = count(opened(corpus))
    ranks = [opened(corpus, rank=rank, world_size=3, steps="epoch") for rank in range(3)]
    for stream in ranks:
        for _ in range(5):
            stream.next_batch()
    state = merge_states([stream.state_dict() for stream in ranks])
    alone = opened(corpus, steps="epoch")
    alone.load_state_dict(state)
    left = (counts.rows - 5 * 6) // 2
    assert len(alone) == 5 + left
    assert len(list(alone)) == left
    for stream in [*ranks, alone]:
        stream.close()


def test_a_stream_without_an_end_has_no_length_and_is_true(corpus: Path) -> None:
    stream = opened(corpus)
    with pytest.raises(TypeError, match="no end"):
        len(stream)
    assert stream
    assert len(opened(corpus, steps=7)) == 7
    with pytest.raises(ConfigError, match="steps"):
        opened(corpus, steps="epochs")


def test_without_a_complete_index_the_error_has_the_command(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "my counts.jsonl"
    with pytest.raises(ConfigError) as caught:
        opened(corpus, steps="epoch", index=path, text_field="text", bos=True, lanes=6)
    assert "does not exist" in str(caught.value)
    assert (
        f"`penstock index {corpus} --tokenizer {gpt2_like()} --seq-len 64 --lanes 6 "
        f"-o '{path}' --bos`" in str(caught.value)
    )
    count(opened(corpus), path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4]))
    with pytest.raises(ConfigError, match=f"has 3 of {len(lines) - 1} units"):
        opened(corpus, steps="epoch", index=path)


def test_an_epoch_shorter_than_a_global_batch_says_how_many_rows_there_are(corpus: Path) -> None:
    rows = count(opened(corpus)).rows
    with pytest.raises(ConfigError, match=rf"an epoch has {rows:,} rows.*takes 6,000"):
        TextStream(
            corpus, TOKENIZER, 64, 2000, lanes=3, rank=0, world_size=3, steps="epoch", device="cpu"
        )


def test_the_command_states_all_that_decides_the_counts(corpus: Path) -> None:
    stream = opened(corpus, packing="concat", policy="reject", eos=False, bos=True)
    said = command(stream)
    assert said.endswith("--packing concat --lanes 3 --policy reject --no-eos")
    stream.inputs = [f"{n}.jsonl" for n in range(50)]
    assert "index 0.jsonl 1.jsonl … --tokenizer" in command(stream).replace("'", "")


# --- the file


def test_a_second_run_reads_nothing(corpus: Path, read: list[Unit]) -> None:
    first = count(opened(corpus))
    assert len(read) == len(first.units)
    assert len({(u.file, u.begin, u.row_begin) for u in read}) == len(read)
    before = first.path.stat()
    read.clear()
    assert count(opened(corpus)) == first
    assert count(opened(corpus, seed=5, shuffle=False, threads=1)) == first  # which change nothing
    assert read == []
    assert first.path.stat().st_mtime_ns == before.st_mtime_ns


def test_an_index_cut_at_any_byte_is_completed(
    corpus: Path, tmp_path: Path, read: list[Unit]
) -> None:
    path = tmp_path / "counts.jsonl"
    whole = count(opened(corpus), path)
    raw = path.read_bytes()
    lines = raw.splitlines(keepends=True)
    for cut in [0, 1, len(lines[0]) - 1, len(lines[0]), len(lines[0]) + 5, *range(600, 1300, 97)]:
        path.write_bytes(raw[:cut])
        read.clear()
        assert count(opened(corpus), path) == whole
        assert len(read) == len(whole.units) - max(raw[:cut].count(b"\n") - 1, 0)
        assert sorted(path.read_bytes().splitlines()) == sorted(raw.splitlines())


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line.replace(b'"tokens": ', b'"tokens": 1'),
        lambda line: b"\0" * len(line),
        lambda line: b"[]",
        lambda line: b'{"unit": 0}',
        lambda line: line[: len(line) // 2],
    ],
)
def test_a_damaged_line_is_counted_again(
    corpus: Path, tmp_path: Path, read: list[Unit], damage: Any
) -> None:
    path = tmp_path / "counts.jsonl"
    whole = count(opened(corpus), path)
    lines = path.read_bytes().splitlines()
    lines[3] = damage(lines[3])
    path.write_bytes(b"\n".join(lines) + b"\n")
    read.clear()
    assert count(opened(corpus), path) == whole
    assert len(read) == 1
    assert count(opened(corpus), path) == whole
    assert len(read) == 1


def test_an_index_of_another_stream_is_refused_by_what_differs(
    corpus: Path, tmp_path: Path
) -> None:
    path = tmp_path / "counts.jsonl"
    count(opened(corpus), path)
    raw = path.read_bytes()
    for options, said in [
        ({"lanes": 4}, "lanes was 3 and is 4 here"),
        ({"bos": True}, "framing.bos was None and is"),
        ({"packing": "concat"}, "packing was 'chunked' and is 'concat' here"),
    ]:
        with pytest.raises(StateMismatch, match=said) as caught:
            count(opened(corpus, **options), path)
        assert "name another file, or delete" in str(caught.value)
        with pytest.raises(StateMismatch, match=said):
            opened(corpus, steps="epoch", index=path, **options)
    assert path.read_bytes() == raw
    other = write(tmp_path / "other", "parquet", documents(seed=1))
    with pytest.raises(StateMismatch, match="data was"):
        count(opened(other), path)


def test_a_file_that_is_no_index_is_refused_and_left_as_it_is(corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "precious.jsonl"
    for raw in (b'{"text": "mine"}\n{"text": "too"}', b"mine", b"\xff\n", b"[1]\n", b"\n"):
        path.write_bytes(raw)
        with pytest.raises(ConfigError, match="is no index"):
            count(opened(corpus), path)
        assert path.read_bytes() == raw
    good = count(opened(corpus)).path.read_bytes()
    path.write_bytes(good.replace(b'"version": 1', b'"version": 2', 1))
    with pytest.raises(StateMismatch, match="has version 2"):
        count(opened(corpus), path)


def test_an_index_of_a_moved_corpus_serves(corpus: Path, tmp_path: Path, read: list[Unit]) -> None:
    first = count(opened(corpus))
    moved = shutil.copytree(corpus, tmp_path / "elsewhere")
    read.clear()
    assert count(opened(moved)).units == first.units
    assert read == []


def test_places_that_cannot_be_written_are_said(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "counts.jsonl", tmp_path):
        with pytest.raises(ConfigError, match=r"cannot be used: .* -o") as caught:
            count(opened(corpus), path)
        assert str(path) in str(caught.value)


def test_one_counter_at_a_time(corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "counts.jsonl"
    with locked(path, wait=False), pytest.raises(ConfigError, match="another counter"):
        count(opened(corpus), path)
    whole = count(opened(corpus), path)
    with locked(path, wait=False):  # what is complete is read by anybody
        assert count(opened(corpus), path) == whole


CHILD = """
import os, resource, signal, sys
from penstock.errors import ConfigError
from penstock.stream import TextStream, count, index

index.SHOWN = 0
tokenizer, corpus, path, after = *sys.argv[1:4], int(sys.argv[4])
def show(at):
    if at.units >= after: os.kill(os.getpid(), signal.SIGKILL)
{before}
try:
    count(TextStream(corpus, tokenizer, 64, 2, lanes=3), path, show)
except ConfigError as error:
    sys.exit(str(error))
"""


def child(before: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A process that counts."""
    code = textwrap.dedent(CHILD).format(before=before)
    return subprocess.run(
        [sys.executable, "-c", code, str(gpt2_like()), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "kills", [(5,), pytest.param((1, 2, 3, 8, 12, 20), marks=pytest.mark.long)]
)
def test_a_counter_that_is_killed_is_gone_on_from(
    corpus: Path, tmp_path: Path, read: list[Unit], kills: tuple[int, ...]
) -> None:
    path = tmp_path / "counts.jsonl"
    seen = 0
    for after in kills:
        assert child("", corpus, path, after).returncode == -9
        lines = path.read_bytes().count(b"\n") - 1
        assert lines >= max(after, seen)
        seen = lines
    counts = count(opened(corpus), path)
    assert len(read) == len(counts.units) - seen
    assert counts.units == count(opened(corpus), tmp_path / "whole.jsonl").units


def test_a_disk_that_is_full_ends_the_count_in_words_and_costs_nothing_counted(
    corpus: Path, tmp_path: Path, read: list[Unit]
) -> None:
    path = tmp_path / "counts.jsonl"
    ran = child("resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))", corpus, path, 10**6)
    assert ran.returncode == 1
    assert f"the index {path} cannot be used" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert path.stat().st_size == 1500  # torn in a line
    whole = path.read_bytes().count(b"\n") - 1
    counts = count(opened(corpus), path)
    assert len(read) == len(counts.units) - whole


def test_progress_ends_where_all_is_counted(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "SHOWN", 0)
    seen: list[index_module.Progress] = []
    counts: Counts = count(opened(corpus), progress=seen.append)
    assert [each.units for each in seen] == sorted(each.units for each in seen)
    assert seen[0].tokens == seen[0].units == seen[0].bytes == 0
    last = seen[-1]
    assert (last.units, last.tokens, last.documents) == (
        len(counts.units),
        counts.tokens,
        counts.documents,
    )
    assert last.bytes == last.total
    assert abs(last.total - opened(corpus).corpus.bytes) <= len(counts.units)
