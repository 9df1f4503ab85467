"""The fast path: gigatoken, many times as quick as the reference, and checked against it.

    Fast(json_bytes, memory_limit=256 << 20).encode(pa.array(["Hello"], pa.large_string()))

It remembers every word it has met, about 0.8 bytes for each byte of prose and up to 8 for text in
which no word comes twice, and never forgets. So the object is dropped and opened again when what it
has read, or what the process has grown by since, passes `memory_limit`. It encodes on the calling
thread alone.

It takes texts together, which lets other threads of Python run, or one by one, which does not. One
by one is a fifth faster for texts of some kilobytes and needs no awkward, whose import takes half a
second; 1.4 µs a call make it slower for short ones. A process that has nothing else to do
(`alone`) takes the better of the two.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, MissingExtra
from penstock.text.arrow import begins_of

if TYPE_CHECKING:
    import pyarrow as pa

INSTALL = "pip install 'penstock[fast]'"
# How often the process's size is looked at: after so many bytes of text.
LOOK = 8 << 20
STATM = Path("/proc/self/statm")
# Texts of fewer bytes go faster together; by so many, awkward's import would have been repaid.
SHORT, MANY = 1500, 200_000

Encoded = tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]


class Fast:
    """A tokenizer.json, opened by gigatoken."""

    def __init__(self, content: bytes, *, memory_limit: int, alone: bool = False) -> None:
        self._content, self._limit = content, memory_limit
        self._alone, self._short = alone, 0
        self.opened = 0
        self._open()

    def _open(self) -> None:
        try:
            from gigatoken.gigatoken_rs import load_hf_json  # noqa: PLC0415 - optional
        except ImportError:
            raise MissingExtra(f"gigatoken is not installed: {INSTALL}") from None
        self._backend: Any = None  # the old one goes before the new one comes
        try:
            self._backend = load_hf_json(self._content)
        except (RuntimeError, ValueError, TypeError) as error:
            raise ConfigError(
                f"gigatoken does not know its kind ({str(error).partition(chr(10))[0]})"
            ) from None
        self.opened += 1
        self._read, self._looked, self._resident = 0, 0, resident_bytes()

    def encode(self, texts: pa.LargeStringArray) -> Encoded:
        """The ids of all texts, and where each text's begin: (n,) uint32, (texts + 1,) int64."""
        if not len(texts):
            return np.empty(0, np.uint32), np.zeros(1, np.int64)
        begins = begins_of(texts)
        try:
            found = self._encode(begins, texts.buffers()[2])
        except BaseException as error:
            # A panic in Rust is no Exception, and its class cannot be imported.
            if type(error).__name__ != "PanicException":
                raise
            raise ConfigError(f"gigatoken broke down ({error}): use backend='reference'") from None
        self._count(int(begins[-1] - begins[0]))
        return found

    def _encode(self, begins: npt.NDArray[np.int64], data: pa.Buffer | None) -> Encoded:
        """Text i is data[begins[i]:begins[i + 1]]."""
        if not self._alone:
            return self._together(begins, data)
        count = len(begins) - 1
        short = begins[-1] - begins[0] < SHORT * count
        self._short += count if short else 0
        if not short or self._short <= MANY:
            return self._one_by_one(begins, data)
        found = self._together(begins, data)
        if self._short - count <= MANY:  # for the first time, and compared was the other way
            ids, offsets = self._one_by_one(begins, data)
            if not (np.array_equal(found[0], ids) and np.array_equal(found[1], offsets)):
                raise ConfigError(
                    "gigatoken gives other ids for texts together than for each of them: use "
                    "backend='reference'"
                )
        return found

    def _one_by_one(self, begins: npt.NDArray[np.int64], data: pa.Buffer | None) -> Encoded:
        view = memoryview(b"" if data is None else data)
        encode = self._backend.encode
        ids = [encode(bytes(view[begin:end])) for begin, end in pairwise(begins.tolist())]
        return np.concatenate(ids), np.cumsum([0, *map(len, ids)])

    def _together(self, begins: npt.NDArray[np.int64], data: pa.Buffer | None) -> Encoded:
        """Arrow's buffers as an awkward array: gigatoken reads them where they are."""
        import awkward as ak  # noqa: PLC0415 - gigatoken's own dependency

        characters = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
        content = ak.contents.NumpyArray(characters, parameters={"__array__": "char"})
        strings = ak.contents.ListOffsetArray(
            ak.index.Index64(begins), content, parameters={"__array__": "string"}
        )
        layout = self._backend.encode_batch(ak.Array(strings), parallel=False).layout
        offsets = np.asarray(layout.offsets.data, np.int64)
        ids = np.asarray(layout.content.data, np.uint32)[offsets[0] : offsets[-1]]
        return ids, offsets - offsets[0]

    def _count(self, size: int) -> None:
        """Open it anew where what it remembers may have passed the limit."""
        self._read += size
        if self._read - self._looked < LOOK:
            return
        self._looked = self._read
        if self._read > self._limit / 0.8 or resident_bytes() - self._resident > self._limit:
            self._open()


def resident_bytes() -> int:
    """This process's memory; 0 where the system does not tell (then bytes read decide alone)."""
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
