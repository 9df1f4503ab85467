"""Documents whose every token is like no other, so that rows tell what they were made of.

write_numbered(folder, [3, 1], kind="parquet")   # documents of 3 tokens and of 1
traced(rows)                                     # {token: how often}, order and EOS checked
"""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

EOS = 0
IGNORED = -100


@dataclass
class Numbering:
    """The tokenizer: "40 3" is the tokens 40, 41, 42, and "40 0" has none."""

    name: str = "numbering"
    backend: str = "tokenizers"
    eos_id: int | None = EOS
    bos_id: int | None = None
    pad_id: int | None = None
    vocab_size: int = 1 << 20
    content_hash: str = "numbering"
    specials: dict[str, int] = field(default_factory=dict)
    chat_template: str | None = None
    special_tokens_map: dict[str, str] = field(default_factory=dict)

    def encode(self, texts: Any, **_: Any) -> tuple[Any, Any]:
        pairs = [list(map(int, text.split())) for text in texts.to_pylist()]
        ids = [np.arange(first, first + count, dtype=np.uint32) for first, count in pairs]
        offsets = np.cumsum([0, *map(len, ids)])
        return np.concatenate([np.empty(0, np.uint32), *ids]), offsets

    def encode_spans(self, *_: Any, **__: Any) -> Any:
        raise AssertionError

    def decode(self, ids: Any) -> str:
        return " ".join(map(str, np.asarray(ids).tolist()))


def lengths(count: int, *, seed: int = 0, most: int = 40) -> list[int]:
    """Documents of many lengths, some of which have no token."""
    luck = random.Random(seed)
    return [luck.choice([0, 1, 2, 7, luck.randint(1, most)]) for _ in range(count)]


def write_numbered(
    folder: Path, sizes: Sequence[int], *, kind: str = "parquet", files: int = 3, group: int = 9
) -> Path:
    """A corpus of documents with these numbers of tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    starts = np.cumsum([1, *sizes]).tolist()
    texts = [f"{start} {size}" for start, size in zip(starts, sizes, strict=False)]
    for number in range(files):
        part = texts[len(texts) * number // files : len(texts) * (number + 1) // files]
        path = folder / f"{number}.{kind}"
        lines = "".join(json.dumps({"text": text}) + "\n" for text in part).encode()
        if kind == "parquet":
            column = pa.array(part, pa.string())
            pq.write_table(pa.table({"text": column}), path, row_group_size=group)
        else:
            path.write_bytes(gzip.compress(lines, mtime=0) if kind.endswith("gz") else lines)
    return folder


def tokens_of(row: dict[str, Any]) -> list[int]:
    """The tokens of a row without its padding; inputs and labels have to agree."""
    inputs, labels = (row[key].tolist() for key in ("input_ids", "labels"))
    known = [label for label in labels if label != IGNORED]
    assert labels[: len(known)] == known
    assert inputs[1 : len(known) + 1] == known[: len(inputs) - 1]
    return [inputs[0], *known]


def batch_rows(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """A batch's rows."""
    return [
        {key: batch[key][i] for key in ("input_ids", "labels")}
        for i in range(len(batch["input_ids"]))
    ]


def traced(rows: Iterable[dict[str, Any]], sizes: Sequence[int]) -> Counter[int]:
    """How often each token came: a document's in their order, then EOS, cut by rows alone."""
    starts = np.cumsum([1, *sizes]).tolist()
    ends = {start + size - 1 for start, size in zip(starts, sizes, strict=False) if size}
    found: Counter[int] = Counter()
    for row in rows:
        tokens = tokens_of(row)
        found.update(tokens)
        for token, following in pairwise(tokens):
            if token == EOS:
                assert following in starts
            else:
                assert following == (EOS if token in ends else token + 1)
        if len(tokens) <= len(row["labels"]):
            assert tokens[-1] == EOS, "padding comes after a lane's last document"
    return found


def everything(sizes: Sequence[int], times: int = 1) -> Counter[int]:
    """What `traced` finds in so many passes."""
    found = Counter(dict.fromkeys(range(1, sum(sizes) + 1), times))
    found[EOS] = times * sum(map(bool, sizes))
    return found
