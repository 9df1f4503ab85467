"""What streams are timed beside: nanochat's loaders told again, and a script with `datasets`.

for inputs, targets, place in plain_best_fit(Free("arrays"), files): ...
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

B, T = 16, 2048
BOS = 50_256
Files = list[str]


def cut_documents(files: Files, folder: Path, megabytes: int) -> Files:
    """Real text in documents of log-normal length, as Parquet like nanochat's own."""
    done = folder / "done.json"
    if not done.exists() or json.loads(done.read_text()) != megabytes:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        lengths = iter(lognormal(megabytes * 1000))
        for number, file in enumerate(files[: max(2, megabytes // 24)]):
            text = "".join(pq.read_table(file)["text"].to_pylist())
            documents, at = [], 0
            while at < len(text):
                size = 4 * next(lengths)
                documents.append(text[at : at + size])
                at += size
            table = pa.table({"text": documents[:-1]})
            pq.write_table(
                table, folder / f"{number:03d}.parquet", row_group_size=1024, compression="zstd"
            )
        done.write_text(json.dumps(megabytes))
    return [str(path) for path in sorted(folder.glob("*.parquet"))]


def lognormal(count: int) -> list[int]:
    """Lengths around 400 tokens, a tenth of them longer than a row."""
    rng = np.random.default_rng(0)
    some = np.clip(rng.lognormal(6.0, 1.2, 4096), 1, 65_535).astype(np.int64)
    found: list[int] = rng.choice(some, count).tolist()
    return found


class Free:
    """A tokenizer of nanochat's shape that costs nothing: ids are looked up by a text's length."""

    def __init__(self, kind: str) -> None:
        ids = np.random.default_rng(1).integers(0, BOS, 1 << 17).astype(np.uint32)
        self.found: dict[int, Any] = {}
        for length in {*lognormal(200_000)}:
            found = ids[length : 2 * length].copy()
            found[0] = BOS
            self.found[4 * length] = found if kind == "arrays" else found.tolist()

    def get_bos_token_id(self) -> int:
        """As every document begins."""
        return BOS

    def encode(self, texts: list[str], prepend: int, num_threads: int) -> list[Any]:  # noqa: ARG002
        """Ids of each text."""
        found = self.found
        return [found[len(text)] for text in texts]


def batches_of_texts(files: Files) -> Iterator[tuple[list[str], dict[str, int]]]:
    """Texts, 128 at a time, and the place of their row group."""
    epoch = 1
    while True:
        for number, name in enumerate(files):
            file = pq.ParquetFile(name)
            for group in range(file.num_row_groups):
                texts = file.read_row_group(group).column("text").to_pylist()
                for at in range(0, len(texts), 128):
                    place = {"pq_idx": number, "rg_idx": group, "epoch": epoch}
                    yield texts[at : at + 128], place
        epoch += 1


class Pool:
    """Waiting documents in one tensor: each a (start, length), in order of arrival."""

    def __init__(self, size: int) -> None:
        self.tokens = torch.empty(size, dtype=torch.long)
        self.used = 0
        self.waiting: list[tuple[int, int]] = []

    def add(self, lists: list[Any]) -> None:
        """Put documents behind those that wait, moved together or to a larger tensor if need be."""
        came = sum(map(len, lists))
        if self.used + came > len(self.tokens):
            self._move(self.tokens)
        if self.used + came > len(self.tokens):
            self._move(torch.empty(max(2 * len(self.tokens), self.used + came), dtype=torch.long))
        for each in lists:
            end = self.used + len(each)
            self.tokens[self.used : end] = torch.tensor(each, dtype=torch.long)
            self.waiting.append((self.used, len(each)))
            self.used = end

    def _move(self, to: torch.Tensor) -> None:
        self.used, old = 0, self.tokens
        for i, (start, length) in enumerate(self.waiting):
            if to is not old or start != self.used:
                to[self.used : self.used + length] = old[start : start + length].clone()
            self.waiting[i] = self.used, length
            self.used += length
        self.tokens = to

    def take(self, room: int) -> torch.Tensor:
        """The longest that fits, else the start of the shortest."""
        best, longest = -1, 0
        for i, (_, length) in enumerate(self.waiting):
            if longest < length <= room:
                best, longest = i, length
        if best < 0:
            best = min(range(len(self.waiting)), key=lambda i: self.waiting[i][1])
        start, length = self.waiting.pop(best)
        return self.tokens[start : start + min(length, room)]


def plain_best_fit(tokenizer: Any, files: Files) -> Iterator[Any]:
    """The best-fit loader of nanochat, told again: a scan for each pick, a pool of tokens."""
    texts, pool, place = batches_of_texts(files), Pool(1000 * 512), {}
    rows = torch.empty((B, T + 1), dtype=torch.long)
    inputs, targets = torch.empty((2, B, T), dtype=torch.long)
    while True:
        for row in range(B):
            column = 0
            while column <= T:
                while len(pool.waiting) < 1000:
                    batch, place = next(texts)
                    pool.add(tokenizer.encode(batch, prepend=BOS, num_threads=4))
                found = pool.take(T + 1 - column)
                rows[row, column : column + len(found)] = found
                column += len(found)
        inputs.copy_(rows[:, :-1])
        targets.copy_(rows[:, 1:])
        yield inputs, targets, place


def plain_flat(tokenizer: Any, files: Files) -> Iterator[Any]:
    """The flat loader of nanochat, told again: a list of ids, cut."""
    texts, held, place = batches_of_texts(files), [], {}
    while True:
        while len(held) <= B * T:
            batch, place = next(texts)
            for each in tokenizer.encode(batch, prepend=BOS, num_threads=4):
                held.extend(each)
        cut = torch.tensor(held[: B * T + 1], dtype=torch.long)
        held = held[B * T :]
        yield cut[:-1].view(B, T), cut[1:].view(B, T), place


class Peer(torch.utils.data.IterableDataset[Any]):
    """`datasets` streaming, tokenized in batches, cut into rows: what a script would have."""

    def __init__(self, files: Files, folder: str) -> None:
        import datasets

        self.folder = folder
        source = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
        self.rows = source.map(
            self.encode, batched=True, batch_size=256, remove_columns=["id", "text"]
        )
        self.tokenizer: Any = None

    def encode(self, batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        """Ids of a batch of documents, EOS after each."""
        if self.tokenizer is None:  # in the worker
            from tokenizers import Tokenizer

            self.tokenizer = Tokenizer.from_file(self.folder + "/tokenizer.json")
            self.eos = self.tokenizer.token_to_id("<|endoftext|>")
        found = self.tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"ids": [[*each.ids, self.eos] for each in found]}

    def __iter__(self) -> Iterator[Any]:
        held: list[int] = []
        for row in self.rows:
            held += row["ids"]
            while len(held) > T:
                cut = torch.tensor(held[: T + 1])
                held = held[T + 1 :]
                yield {"input_ids": cut[:-1], "labels": cut[1:]}
