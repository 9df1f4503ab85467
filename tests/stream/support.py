"""What the tests of streams share: corpora whose rows can be traced, and rows as they compare."""

from __future__ import annotations

import functools
import gzip
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tests.text.tokenizers_for_tests import gpt2_like

from penstock.stream import TextStream
from penstock.text import open_tokenizer
from penstock.text.documents import read_texts
from penstock.text.tokenizer import FileTokenizer

PACKINGS = ("chunked", "concat", "best_fit_crop")
SEQ_LEN = 15


@functools.cache
def tokenizer() -> FileTokenizer:
    return open_tokenizer(gpt2_like(), backend="reference")


# --- corpora


def documents(count: int, *, seed: int = 0, first: int = 0, empty: float = 0.1) -> list[str]:
    """Texts of which every word tells its document, some long, some empty."""
    luck = random.Random(seed)
    found = []
    for number in range(first, first + count):
        words = 0 if luck.random() < empty else int(luck.lognormvariate(0.8, 0.9)) + 1
        found.append(" ".join(f"{word}d{number}" for word in range(words)))
    return found


def write_parquet(
    path: Path, texts: Sequence[str | None], *, group: int = 7, **options: Any
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"text": pa.array(texts, pa.string())})
    pq.write_table(table, path, row_group_size=group, **options)
    return path


def lines(texts: Sequence[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def write_lines(path: Path, texts: Sequence[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = lines(texts)
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def write_list(path: Path, texts: Sequence[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([{"text": text} for text in texts]))
    return path


def write(path: Path, texts: Sequence[str]) -> Path:
    """A file of the kind that its name tells."""
    if path.suffix == ".parquet":
        return write_parquet(path, texts)
    return (write_list if path.suffix == ".json" else write_lines)(path, texts)


CORPORA = {
    "parquet": ("a.parquet", "b.parquet"),
    "jsonl": ("a.jsonl", "b.jsonl"),
    "gzip": ("a.jsonl.gz", "b.jsonl.gz", "c.jsonl.gz"),
    "list": ("a.json",),
    "mixed": ("a.jsonl", "b.parquet", "c.json", "d.jsonl.gz", "e.jsonl"),
}


def write_corpora(root: Path) -> dict[str, Path]:
    """One folder of each kind, of 60 documents each."""
    for name, files in CORPORA.items():
        each = 60 // len(files)
        for number, file in enumerate(files):
            write(root / name / file, documents(each, seed=number, first=number * each))
    return {name: root / name for name in CORPORA}


# --- streams


def make(
    paths: Any, packing: str = "chunked", *, rank: int = 0, world: int = 1, **options: Any
) -> TextStream:
    """A small stream."""
    given: dict[str, Any] = {
        "seq_len": SEQ_LEN,
        "batch_size": 1,
        "lanes": 6,
        "buffer_size": 5,
        "tokenizer_batch_size": 3,
        "threads": 1,
        "seed": 3,
    }
    given |= options
    given.setdefault("tokenizer", tokenizer())
    return TextStream(paths, packing=packing, rank=rank, world_size=world, **given)


def rows_of(batch: dict[str, Any]) -> list[tuple[Any, ...]]:
    """A batch as rows that compare: all that it holds, cu_seqlens as each row's lengths."""
    inputs = batch["input_ids"]
    count, width = inputs.shape
    keys = ["input_ids", "labels"]
    lengths: list[tuple[int, ...]] = [()] * count
    if "cu_seqlens" in batch:
        keys += ["doc_ids", "position_ids"]
        ends = batch["cu_seqlens"].tolist()
        assert ends[0] == 0
        assert ends[-1] == count * width
        assert set(range(0, count * width, width)) <= set(ends), "documents end where rows do"
        row = np.array(ends[:-1]) // width
        lengths = [tuple(np.diff(ends)[row == i].tolist()) for i in range(count)]
        assert batch["max_seqlen"] == max(map(max, lengths))
    return [(*(batch[key][i].numpy().tobytes() for key in keys), lengths[i]) for i in range(count)]


def taken(stream: TextStream, count: int) -> list[tuple[Any, ...]]:
    """The next so many rows of a stream whose batches have one row."""
    return [row for _ in range(count) for row in rows_of(stream.next_batch())]


def global_rows(streams: Sequence[TextStream]) -> list[tuple[Any, ...]]:
    """One batch of each rank, as rows of the stream."""
    parts = [rows_of(stream.next_batch()) for stream in streams]
    return [part[i] for i in range(len(parts[0])) for part in parts]


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


def pieces(batch: dict[str, Any]) -> Iterator[tuple[int, ...]]:
    """The tokens of each piece of a document in a batch, padding left out.

    What is trained tells the pieces: a label across two documents, or of padding, is none.
    """
    inputs, labels = batch["input_ids"].tolist(), batch["labels"].tolist()
    for row, targets in zip(inputs, labels, strict=True):
        piece = [row[0]]
        for column, label in enumerate(targets):
            if label != -100:
                piece.append(label)
            else:
                yield tuple(piece)
                piece = [row[column + 1]] if column + 1 < len(row) else []
        if piece:
            yield tuple(piece)


def encoded(texts: Sequence[str]) -> list[tuple[int, ...]]:
    """Each document's ids and EOS, or nothing."""
    ids, offsets = tokenizer().encode(list(texts))
    found = [tuple(ids[a:b].tolist()) for a, b in pairwise(offsets)]
    return [(*each, tokenizer().eos_id) if each else () for each in found]  # type: ignore[arg-type]


def texts_of(stream: TextStream) -> list[list[str]]:
    """The documents of each unit."""
    return [
        [
            text
            for texts in read_texts(
                stream.corpus.files[unit.file], unit, stream.text_field, policy="reject"
            )
            for text in texts.texts.to_pylist()
        ]
        for unit in stream.corpus.units
    ]


def threads_of_ours() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("penstock")]


def soon(true: Callable[[], bool]) -> bool:
    """Whether it becomes true within a minute."""
    end = time.monotonic() + 60
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
