"""The reference: Hugging Face `tokenizers`, which defines what a tokenizer.json means.

    Reference(json_bytes).encode(pa.array(["Hello"], pa.large_string()))       # ids, offsets

It reads 2–5 MB/s a core, gives the characters that each token covers, and decodes. Its own threads
stay off (TOKENIZERS_PARALLELISM=false, unless the environment says otherwise), because processes
that have used them cannot fork: whoever wants threads calls several of these.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import tokenizers

from penstock.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

# Texts are encoded a megabyte at a time: an Encoding takes some 50 bytes a token.
PIECE = 1 << 20


class Reference:
    """A tokenizer.json, opened by `tokenizers`."""

    def __init__(self, content: bytes, name: str) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # noqa: BLE001 - it raises Exception itself
            raise DataError(
                f"{name} cannot be opened by tokenizers {tokenizers.__version__}: "
                f"{str(error).partition(chr(10))[0]}"
            ) from None

    def encode(
        self, texts: pa.LargeStringArray
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """The ids of all texts, and where each text's begin: (n,) uint32, (texts + 1,) int64."""
        ids, lengths = [np.empty(0, np.uint32)], [0]
        for piece in pieces(texts.to_pylist()):
            for encoding in self._tokenizer.encode_batch_fast(piece, add_special_tokens=False):
                ids.append(np.array(encoding.ids, np.uint32))
                lengths.append(len(ids[-1]))
        return np.concatenate(ids), np.cumsum(lengths, dtype=np.int64)

    def encode_spans(
        self, texts: Sequence[str]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """`encode`, and the characters [begin, end) of each token in its text: (n, 2)."""
        ids, lengths = [np.empty(0, np.uint32)], [0]
        spans = [np.empty((0, 2), np.int64)]
        for piece in pieces(texts):
            for encoding in self._tokenizer.encode_batch(piece, add_special_tokens=False):
                ids.append(np.array(encoding.ids, np.uint32))
                lengths.append(len(ids[-1]))
                spans.append(np.array(encoding.offsets, np.int64).reshape(-1, 2))
        return np.concatenate(ids), np.cumsum(lengths, dtype=np.int64), np.concatenate(spans)

    def decode(self, ids: list[int]) -> str:
        """The text, special tokens spelt out."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def id_of(self, token: str) -> int | None:
        """The id that it gives to a token."""
        return self._tokenizer.token_to_id(token)


def pieces(texts: Sequence[str], limit: int = PIECE) -> Iterator[list[str]]:
    """Consecutive texts of about so many characters together.

    >>> list(pieces(["aa", "b", "cccc", "d"], limit=3))
    [['aa', 'b'], ['cccc'], ['d']]
    """
    piece: list[str] = []
    size = 0
    for text in texts:
        piece.append(text)
        size += len(text)
        if size >= limit:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece
