"""Small datasets on disk in formats that `datasets` reads, and what their samples have to be."""

from __future__ import annotations

import csv
import gzip
import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from tests.text.tokenizers_for_tests import gpt2_like, stdlib_texts
from tokenizers import Tokenizer

END = "<|endoftext|>"


def documents(count: int, seed: int = 0) -> list[str]:
    """Documents of many lengths; the first few are hard in some way."""
    whole = "\n".join(stdlib_texts())
    luck = random.Random(seed)
    starts = [luck.randrange(len(whole) - 3000) for _ in range(count)]
    found = [whole[at : at + luck.choice([20, 90, 400, 2500])] for at in starts]
    hard = ["a", "", " \n\t ", f"it spells {END} itself", "naïve façade 日本語 👩‍👩‍👧", "\u3000"]
    return [*hard, *found][:count]


def write(folder: Path, kind: str, split: str, texts: Sequence[str]) -> Path:
    """A split of a dataset, in two files; gives the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    half = len(texts) // 2
    for number, part in enumerate((texts[:half], texts[half:])):
        _write(folder / f"{split}-{number:05d}-of-00002", kind, part)
    return folder


def _write(stem: Path, kind: str, texts: Sequence[str]) -> None:
    rows = [{"id": i, "text": text} for i, text in enumerate(texts)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    match kind:
        case "parquet":
            columns = pa.table({"id": range(len(texts)), "text": pa.array(texts, pa.string())})
            pq.write_table(columns, f"{stem}.parquet", row_group_size=7)
        case "jsonl":
            Path(f"{stem}.jsonl").write_text(lines)
        case "jsonl.gz":
            Path(f"{stem}.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
        case "csv":
            with Path(f"{stem}.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, ["id", "text"], quoting=csv.QUOTE_ALL)
                writer.writeheader()
                writer.writerows(rows)


@cache
def _reference() -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(gpt2_like() / "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # what spells one is text
    return tokenizer


def stream(texts: Sequence[str]) -> list[int]:
    """Every document's tokens and EOS, one after the other; those without tokens left out."""
    tokenizer = _reference()
    end = tokenizer.token_to_id(END)
    found: list[int] = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if ids:
            found += [*ids, end]
    return found


def windows(texts: Sequence[str], seq_len: int) -> npt.NDArray[np.int64]:
    """The stream cut into seq_len + 1 tokens each, its tail dropped."""
    tokens, width = stream(texts), seq_len + 1
    count = len(tokens) // width
    return np.array(tokens[: count * width], np.int64).reshape(count, width)


def rows_of(dataset: Any) -> npt.NDArray[np.int64]:
    """All samples of a dataset, inputs and last label together."""
    batch = dataset.take(np.arange(len(dataset)))
    inputs, labels = batch["input_ids"].numpy(), batch["labels"].numpy()
    return np.concatenate([inputs, labels[:, -1:]], axis=1)


def row_tokens(row: Any) -> list[int]:
    """A streamed row's tokens, without its padding; inputs and labels have to agree."""
    inputs, labels = row["input_ids"].tolist(), row["labels"].tolist()
    known = [label for label in labels if label != -100]
    assert labels == known + [-100] * (len(labels) - len(known))
    assert inputs[1 : len(known) + 1] == known[: len(inputs) - 1]
    return [inputs[0], *known]
