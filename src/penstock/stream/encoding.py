"""Documents to framed ids, by Penstock's tokenizers and by those of nanochat's shape.

encode = encoder_of(open_tokenizer("tokenizers/mine"), bos=True, eos=False, threads=4)
ids, offsets = encode(texts)                     # uint32, int64: one more than documents
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import ConfigError, DataError
from penstock.pack import bounds_of, framed
from penstock.text.tokenizer import Tokenizer, open_tokenizer

Ids = npt.NDArray[np.uint32]
Offsets = npt.NDArray[np.int64]
Encode = Callable[[pa.LargeStringArray], tuple[Ids, Offsets]]


def opened(tokenizer: str | os.PathLike[str] | Tokenizer) -> Tokenizer:
    """A tokenizer, opened where it is not yet."""
    return open_tokenizer(tokenizer) if isinstance(tokenizer, str | os.PathLike) else tokenizer


def is_nanochats(tokenizer: Any) -> bool:
    """Whether `encode(texts, prepend=…, num_threads=…)` gives lists."""
    return hasattr(tokenizer, "get_bos_token_id")


def framing_encoder(
    tokenizer: Tokenizer, *, bos: int | None, eos: int | None, empty: bool = False
) -> Encode:
    """Penstock's tokenizer, with BOS before and EOS after each document.

    A document without a token gets neither, unless such `empty` ones are wanted too.
    """

    def encode(texts: pa.LargeStringArray) -> tuple[Ids, Offsets]:
        ids, offsets = tokenizer.encode(texts)
        lengths = np.diff(offsets)
        if empty or lengths.all():
            return framed(ids, offsets, bos=bos, eos=eos, limit=None)[:2]
        full = np.flatnonzero(lengths)
        bounds = np.concatenate([offsets[full], offsets[-1:]])
        ids, framed_bounds, _ = framed(ids, bounds, bos=bos, eos=eos, limit=None)
        lengths[full] = np.diff(framed_bounds)
        return ids, bounds_of(lengths)

    return encode


def nanochats_encoder(tokenizer: Any, *, bos: int, threads: int) -> Encode:
    """A tokenizer whose `encode` takes a list of texts and gives one of lists or arrays."""

    def encode(texts: pa.LargeStringArray) -> tuple[Ids, Offsets]:
        lists = tokenizer.encode(texts.to_pylist(), prepend=bos, num_threads=threads)
        if len(lists) != len(texts):
            raise DataError(
                f"{type(tokenizer).__name__}.encode gave {len(lists)} lists of ids for "
                f"{len(texts)} documents, where one each was expected"
            )
        return _ragged(lists)

    return encode


def _ragged(lists: Any) -> tuple[Ids, Offsets]:
    """Ids and offsets of lists or arrays of ids.

    >>> ids, offsets = _ragged([[1, 2], np.array([3])])
    >>> ids.tolist(), offsets.tolist()
    ([1, 2, 3], [0, 2, 3])
    """
    offsets = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(each) for each in lists], out=offsets[1:])
    if all(type(each) is list for each in lists):
        found = array("I" if array("I").itemsize == 4 else "L")
        try:
            for each in lists:
                found.fromlist(each)
        except (TypeError, OverflowError) as error:
            raise DataError(f"a tokenizer gave an id that is none ({error})") from None
        return np.frombuffer(found, np.uint32), offsets
    if not offsets[-1]:
        return np.empty(0, np.uint32), offsets
    ids = np.concatenate([ids for each in lists if len(ids := np.asarray(each))])
    if ids.dtype.kind not in "iu" or int(ids.min()) < 0 or int(ids.max()) >= 1 << 32:
        raise DataError(
            f"a tokenizer gave an id that is none: {ids.dtype} from {ids.min()} to {ids.max()}"
        )
    return ids.astype(np.uint32, copy=False), offsets


def bos_of(tokenizer: Any) -> int:
    """The token that begins a document: BOS, or EOS where that parts documents, as GPT-2's."""
    if is_nanochats(tokenizer):
        return int(tokenizer.get_bos_token_id())
    for token in (tokenizer.bos_id, tokenizer.eos_id):
        if token is not None:
            return int(token)
    raise ConfigError(
        f"{tokenizer.name} names neither BOS nor EOS, one of which begins each document here: add "
        "bos_token to its tokenizer_config.json"
    )
