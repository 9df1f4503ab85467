"""What encodes: engines, the pools that lend them to threads, and the JSON that opens each kind.

    contents = Contents(definition)
    pool = Pool(lambda: Fast(contents.get("text", fast=True), memory_limit=256 << 20))
    with pool.borrow() as engine:
        engine.encode(texts)

An engine belongs to one thread at a time and to one process: threads take from a pool, and a forked
child opens its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, DataError
from penstock.text.definition import Definition, sealed

if TYPE_CHECKING:
    import pyarrow as pa

Specials = Literal["text", "parse"]
MODES: tuple[Specials, ...] = ("text", "parse")
Ids = npt.NDArray[np.uint32]
Offsets = npt.NDArray[np.int64]


class Engine(Protocol):
    """One backend's object, used by one thread at a time."""

    def encode(self, texts: pa.LargeStringArray) -> tuple[Ids, Offsets]:
        """Ids and offsets."""


E = TypeVar("E", bound=Engine)


class Pool(Generic[E]):
    """Engines of one process, opened when all others are in use."""

    def __init__(self, opener: Callable[[], E]) -> None:
        self._opener = opener
        self._pid, self._free = os.getpid(), list[E]()

    @contextmanager
    def borrow(self) -> Iterator[E]:
        """An engine for this thread alone; one that failed is not used again."""
        if self._pid != os.getpid():  # forked: the parent's may be in the middle of something
            self._pid, self._free = os.getpid(), []
        free = self._free
        try:
            engine = free.pop()
        except IndexError:
            engine = self._opener()
        yield engine
        free.append(engine)


class Contents:
    """A definition as each backend opens it; made when it is first asked for, and kept as JSON.

    (As objects a vocabulary of 128,000 takes some 50 MB more.)
    """

    def __init__(self, definition: Definition) -> None:
        try:
            self._content = msgspec.json.encode(definition.content)
        except UnicodeEncodeError as error:
            raise DataError(
                f"{definition.path} holds half of a surrogate pair, which is no character: {error}"
            ) from None
        self._pattern = definition.fast_pattern
        self._made: dict[tuple[Specials, bool], bytes] = {}

    def decoded(self) -> dict[str, Any]:
        """The content as the definition had it."""
        found: dict[str, Any] = msgspec.json.decode(self._content)
        return found

    def get(self, specials: Specials, *, fast: bool) -> bytes:
        """The tokenizer.json that a backend opens for one way to take special tokens."""
        which = specials, fast
        if which not in self._made:
            self._made[which] = self._text(specials, fast=fast)
        return self._made[which]

    def _text(self, specials: Specials, *, fast: bool) -> bytes:
        other_regex = fast and self._pattern is not None
        if specials == "parse" and not other_regex:
            return self._content
        content = self.decoded()
        if specials == "text":
            content = sealed(content, keep=not fast)
        if other_regex:
            content["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": self._pattern}
        return msgspec.json.encode(content)


def mode(specials: str) -> Specials:
    """The way to take special tokens that is called so."""
    for each in MODES:
        if each == specials:
            return each
    raise ConfigError(f"specials is 'text' or 'parse', not {specials!r}")
