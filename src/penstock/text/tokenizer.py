"""Tokenizers: documents in, ragged ids out, the same ids from every backend.

    tokenizer = open_tokenizer("tokenizers/mine")
    ids, offsets = tokenizer.encode(["Hello", "world"])      # (n,) uint32, (3,) int64
    tokenizer.decode(ids[offsets[1]:])                       # "world"

BOS and EOS are never added here: framing belongs to the recipe. Text that spells a special token is
text (specials="text"), so that a document about "</s>" does not end there; chat templates write the
real ones and ask for specials="parse". Only added tokens that are marked special are meant: the
others match always.

The fast backend serves where its ids equal the reference's on the hard set and on a sample of the
input. An engine belongs to one thread at a time and to one process: threads take from a pool, a
forked child opens its own, and a pickled tokenizer is its path and its options.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import ConfigError, DataError, MissingExtra, OutOfBounds
from penstock.text.definition import Definition, content_hash
from penstock.text.engines import MODES, Contents, Ids, Offsets, Pool, Specials, mode
from penstock.text.fast import Fast
from penstock.text.hard_set import hard_set
from penstock.text.marks import normalises, rows_with_newer_marks
from penstock.text.reference import Reference
from penstock.text.strings import large_strings, replace_rows, split_rows
from penstock.text.tokenizer_files import define

Backend = Literal["gigatoken", "tokenizers"]
Texts: TypeAlias = pa.Array | pa.ChunkedArray | Sequence[str] | Sequence[bytes]

MEMORY_LIMIT = 256 << 20


class Tokenizer(Protocol):
    """What encodes documents."""

    name: str
    backend: str  # "gigatoken" | "tokenizers"
    eos_id: int | None
    bos_id: int | None
    pad_id: int | None
    vocab_size: int  # largest id + 1
    specials: dict[str, int]  # added tokens marked special, by text
    chat_template: str | None
    special_tokens_map: dict[str, str]  # "eos_token" -> "</s>"

    @property
    def content_hash(self) -> str:
        """Of what decides ids."""

    def encode(self, texts: Texts, *, specials: Specials = "text") -> tuple[Ids, Offsets]:
        """All texts' ids, and offsets (texts + 1): text i is ids[offsets[i]:offsets[i + 1]]."""

    def encode_spans(
        self, texts: Sequence[str], *, specials: Specials = "text"
    ) -> tuple[Ids, Offsets, npt.NDArray[np.int64]]:
        """`encode`, and each token's characters [begin, end) in its text: (ids, 2)."""

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text of ids, special tokens spelt out."""


class FileTokenizer:
    """The tokenizer of a definition, on one backend.

    `alone`: no other thread of the process has anything to do, so the interpreter may be held.
    """

    def __init__(
        self,
        name: str,
        definition: Definition,
        backend: Backend,
        *,
        threads: int,
        memory_limit: int,
        trust_pickle: bool,
        alone: bool = False,
    ) -> None:
        self.name = name
        self.backend: str = backend
        self.eos_id, self.bos_id = definition.eos_id, definition.bos_id
        self.pad_id = definition.pad_id
        self.vocab_size, self.specials = definition.vocab_size, definition.specials
        self.chat_template = definition.chat_template
        self.special_tokens_map = dict(definition.named)
        self._path, self._trust_pickle = definition.path, trust_pickle
        self._threads, self._memory_limit, self._alone = threads, memory_limit, alone
        self._contents = Contents(definition)
        self._hash = ""  # until it is asked for
        self._normalises = normalises(definition.content)
        self._open_pools()

    def _open_pools(self) -> None:
        self._references = {each: self._reference_pool(each) for each in MODES}
        self._fasts = {each: self._fast_pool(each) for each in MODES}

    def _reference_pool(self, specials: Specials) -> Pool[Reference]:
        return Pool(lambda: Reference(self._contents.get(specials, fast=False), self.name))

    def _fast_pool(self, specials: Specials) -> Pool[Fast]:
        limit, alone = self._memory_limit, self._alone and self._threads == 1
        return Pool(
            lambda: Fast(self._contents.get(specials, fast=True), memory_limit=limit, alone=alone)
        )

    @property
    def content_hash(self) -> str:
        """SHA-256 of what decides ids."""
        if not self._hash:
            self._hash = content_hash(self._contents.decoded())
        return self._hash

    def on(self, backend: Backend) -> FileTokenizer:
        """The same tokenizer on another backend."""
        return Whole({**self.whole().state, "backend": backend}).open()

    def warm_up(self) -> None:
        """Open what encodes plain text, before there is any."""
        pools: Any = self._fasts if self.backend == "gigatoken" else self._references
        with pools["text"].borrow():
            pass

    def whole(self) -> Whole:
        """The tokenizer with all that it holds, to be pickled as that."""
        self._contents.get("text", fast=self.backend == "gigatoken")  # once, for all copies
        engines = ("_references", "_fasts")
        return Whole({name: value for name, value in vars(self).items() if name not in engines})

    def encode(self, texts: Texts, *, specials: Specials = "text") -> tuple[Ids, Offsets]:
        """All texts' ids, and offsets (texts + 1): text i is ids[offsets[i]:offsets[i + 1]]."""
        return self._encode(self.backend, large_strings(texts), specials)

    def _encode(
        self, backend: str, texts: pa.LargeStringArray, specials: Specials
    ) -> tuple[Ids, Offsets]:
        pools = self._fasts if backend == "gigatoken" else self._references
        pool: Pool[Any] = pools[mode(specials)]

        def run(rows: pa.LargeStringArray) -> tuple[Ids, Offsets]:
            with pool.borrow() as engine:
                found: tuple[Ids, Offsets] = engine.encode(rows)
            if backend == "gigatoken" and self._normalises:
                marked = rows_with_newer_marks(rows)
                if marked.size:
                    instead = self._encode("tokenizers", rows.take(marked), specials)
                    return replace_rows(*found, marked, *instead)
            return found

        parts = split_rows(texts, self._threads)
        if len(parts) == 1:
            return run(texts)
        with ThreadPoolExecutor(len(parts)) as threads:
            done = list(threads.map(run, parts))
        counts = np.concatenate([np.diff(offsets) for _, offsets in done])
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return np.concatenate([ids for ids, _ in done]), offsets

    def encode_spans(
        self, texts: Sequence[str], *, specials: Specials = "text"
    ) -> tuple[Ids, Offsets, npt.NDArray[np.int64]]:
        """`encode`, and each token's characters [begin, end) in its text: (ids, 2)."""
        large_strings(texts)
        with self._references[mode(specials)].borrow() as engine:
            return engine.encode_spans(texts)

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text of ids, special tokens spelt out."""
        array = np.asarray(ids).reshape(-1)
        if array.size and (array.dtype.kind not in "iu" or array.min() < 0):
            raise ConfigError(
                f"ids to decode are whole numbers from 0, not {array.dtype} {array[:5]}"
            )
        if array.size and array.max() >= self.vocab_size:
            raise OutOfBounds(f"id {array.max()} is past {self.name}'s {self.vocab_size} tokens")
        with self._references["parse"].borrow() as engine:
            return engine.decode(array.tolist())

    def check(self, added: Sequence[tuple[str, int]]) -> None:
        """Refuse files whose added tokens are not the ones that `tokenizers` would give."""
        with self._references["parse"].borrow() as engine:
            for token, stated in added:
                given = engine.id_of(token)
                if given != stated:
                    raise DataError(
                        f"{self._path} says that {token!r} is {stated}, and opened it becomes "
                        f"{given}: ids of added tokens must follow the vocabulary's without a gap"
                    )

    def check_fast(self, added: Sequence[tuple[str, int]], sample: Sequence[str]) -> None:
        """Refuse a fast backend that gives other ids than the reference, naming the first text."""
        hard = hard_set(token for token, _ in added)
        for specials, texts in zip(MODES, ([*hard, *sample], hard), strict=True):
            rows = large_strings(texts)
            found, stops = self._encode("gigatoken", rows, specials)
            wanted, ends = self._encode("tokenizers", rows, specials)
            for i, text in enumerate(texts):
                if not np.array_equal(
                    wanted[ends[i] : ends[i + 1]], found[stops[i] : stops[i + 1]]
                ):
                    shown = text if len(text) <= 60 else text[:60] + "…"
                    raise ConfigError(f"gigatoken and tokenizers give different ids for {shown!r}")

    def using(self, threads: int) -> FileTokenizer:
        """This tokenizer, cutting what it encodes into so many parts; engines are shared."""
        other = copy(self)
        other._threads = threads  # noqa: SLF001 - of this class
        return other

    def __reduce__(self) -> tuple[Callable[..., FileTokenizer], tuple[Any, ...]]:
        options = (self._threads, self._memory_limit, self._trust_pickle, self._alone)
        return _reopen, (self.name, self._path, self.backend, self.content_hash, *options)

    def __repr__(self) -> str:
        return f"<tokenizer {self.name}: {self.vocab_size:,} tokens, by {self.backend}>"


@dataclass(frozen=True, slots=True)
class Whole:
    """A tokenizer without its engines: opened in another process it is what it was here.

    (A tokenizer that is pickled as such is its path, and refuses files that have changed.)
    """

    state: dict[str, Any]

    def open(self) -> FileTokenizer:
        """The tokenizer again; its engines are opened when they are first used."""
        found = FileTokenizer.__new__(FileTokenizer)
        vars(found).update(self.state)
        found._open_pools()  # noqa: SLF001 - its own constructor, as it were
        return found


def _reopen(
    name: str,
    path: str,
    backend: Backend,
    expected: str,
    threads: int,
    memory_limit: int,
    trust_pickle: bool,
    alone: bool,
) -> FileTokenizer:
    """The tokenizer that another process pickled, if its files are still the same."""
    definition = define(path, trust_pickle=trust_pickle)
    tokenizer = FileTokenizer(
        name,
        definition,
        backend,
        threads=threads,
        memory_limit=memory_limit,
        trust_pickle=trust_pickle,
        alone=alone,
    )
    if tokenizer.content_hash != expected:
        raise DataError(f"{path} has changed since it was opened: open it anew")
    return tokenizer


def open_tokenizer(
    path: str | os.PathLike[str],
    *,
    backend: Literal["auto", "fast", "reference"] = "auto",
    trust_pickle: bool = False,
    sample: Sequence[str] = (),
    threads: int = 1,
    memory_limit: int = MEMORY_LIMIT,
    alone: bool = False,
) -> FileTokenizer:
    """A tokenizer from a folder, a tokenizer.json, a .tiktoken file, or a name of the Hub.

    The fast backend has to be installed, and to give the reference's ids on the hard set and on
    `sample`: where it does not, "auto" takes the reference, with a warning that says why, and
    "fast" is an error. A pickle (nanochat's) is opened only with trust_pickle=True, since that runs
    what is in it. The fast backend forgets its words when they may have passed `memory_limit`
    bytes. With `alone` it may hold the interpreter while it encodes, which is faster where no other
    thread has anything to do.
    """
    opening = Opening(
        path,
        backend=backend,
        trust_pickle=trust_pickle,
        threads=threads,
        memory_limit=memory_limit,
        alone=alone,
    )
    opening.compare(sample)
    return opening.settled()


class Opening:
    """A tokenizer that can be used while its fast backend is still being compared.

    `first` is there at once. What it gave counts only if `settled()` is that very tokenizer: where
    the comparison fails, it is the reference, or an error.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        backend: Literal["auto", "fast", "reference"],
        trust_pickle: bool = False,
        threads: int = 1,
        memory_limit: int = MEMORY_LIMIT,
        alone: bool = False,
    ) -> None:
        if backend not in ("auto", "fast", "reference"):
            raise ConfigError(f"backend is 'auto', 'fast' or 'reference', not {backend!r}")
        if threads < 1 or memory_limit < 1:
            raise ConfigError(
                f"threads and memory_limit are at least 1, not {threads} and {memory_limit}"
            )
        definition = define(path, trust_pickle=trust_pickle)
        self._added = definition.added  # of all of it, which may be large, only this is kept
        self._backend = backend
        self.first = FileTokenizer(
            os.fspath(path),
            definition,
            "tokenizers" if backend == "reference" else "gigatoken",
            threads=threads,
            memory_limit=memory_limit,
            trust_pickle=trust_pickle,
            alone=alone,
        )
        self._settled: FileTokenizer | None = None
        self._failure: Exception | None = None
        self._comparing: threading.Thread | None = None

    def compare(self, sample: Sequence[str]) -> None:
        """Begin to compare, on a thread, the hard set and a sample of the input."""
        self._comparing = threading.Thread(target=self._compare, args=(sample,))
        self._comparing.start()

    def _compare(self, sample: Sequence[str]) -> None:
        try:
            self.first.check(self._added)
            if self._backend != "reference":
                self.first.check_fast(self._added, sample)
        except Exception as error:  # noqa: BLE001 - raised by `settled`, in the caller's thread
            self._failure = error

    def settled(self) -> FileTokenizer:
        """The tokenizer to keep, once the comparison has ended."""
        assert self._comparing is not None, "compare() comes first"
        self._comparing.join()
        if self._settled is None:
            self._settled = self._judged()
        return self._settled

    def _judged(self) -> FileTokenizer:
        error = self._failure
        if error is None:
            return self.first
        if self._backend != "auto" or not isinstance(error, MissingExtra | ConfigError):
            raise error
        warnings.warn(f"{self.first.name} is read by the slower backend: {error}", stacklevel=4)
        return self.first.on("tokenizers")
