"""The fast path: gigatoken, many times as quick as the reference, and checked against it.

    Fast(json_text, memory_limit=256 << 20).encode(pa.array(["Hello"], pa.large_string()))

It remembers every word it has met, about 0.8 bytes for each byte of prose and up to 8 for text in
which no word comes twice, and never forgets. So the object is dropped and opened again when what it
has read, or what the process has grown by since, passes `memory_limit`. It encodes on the calling
thread alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    import pyarrow as pa

INSTALL = "pip install 'penstock[fast]'"
# How often the process's size is looked at: after so many bytes of text.
LOOK = 8 << 20
STATM = Path("/proc/self/statm")


class Fast:
    """A tokenizer.json, opened by gigatoken."""

    def __init__(self, content: str, *, memory_limit: int) -> None:
        self._content, self._limit = content, memory_limit
        self.opened = 0
        self._open()

    def _open(self) -> None:
        try:
            import awkward  # noqa: PLC0415 - gigatoken's own dependency
            from gigatoken.gigatoken_rs import load_hf_json  # noqa: PLC0415 - optional
        except ImportError:
            raise MissingExtra(f"gigatoken is not installed: {INSTALL}") from None
        self._awkward = awkward
        self._backend: Any = None  # the old one goes before the new one comes
        try:
            self._backend = load_hf_json(self._content)
        except (RuntimeError, ValueError, TypeError) as error:
            raise ConfigError(
                f"gigatoken does not know its kind ({str(error).partition(chr(10))[0]})"
            ) from None
        self.opened += 1
        self._read, self._looked, self._resident = 0, 0, resident_bytes()

    def encode(
        self, texts: pa.LargeStringArray
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """The ids of all texts, and where each text's begin: (n,) uint32, (texts + 1,) int64."""
        if not len(texts):
            return np.empty(0, np.uint32), np.zeros(1, np.int64)
        try:
            layout = self._backend.encode_batch(self._strings(texts), parallel=False).layout
        except BaseException as error:
            # A panic in Rust is no Exception, and its class cannot be imported.
            if type(error).__name__ != "PanicException":
                raise
            raise ConfigError(f"gigatoken broke down ({error}): use backend='reference'") from None
        offsets = np.asarray(layout.offsets.data, np.int64)
        ids = np.asarray(layout.content.data, np.uint32)[offsets[0] : offsets[-1]]
        self._count(texts)
        return ids, offsets - offsets[0]

    def _strings(self, texts: pa.LargeStringArray) -> object:
        """Arrow's buffers as an awkward array: gigatoken reads them where they are."""
        ak = self._awkward
        _, offsets, data = texts.buffers()
        begins = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
        characters = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
        content = ak.contents.NumpyArray(characters, parameters={"__array__": "char"})
        return ak.Array(
            ak.contents.ListOffsetArray(
                ak.index.Index64(begins), content, parameters={"__array__": "string"}
            )
        )

    def _count(self, texts: pa.LargeStringArray) -> None:
        """Open it anew where what it remembers may have passed the limit."""
        self._read += texts.nbytes
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
