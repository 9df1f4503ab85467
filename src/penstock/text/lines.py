"""A file of lines as blocks of whole lines, each with the byte at which it begins.

    blocks(stream, begin, end)  →  Block(addresses [0, 14], items [b'{"text": "a"}', ...]), ...

A line belongs to the unit in which it begins, so units may be cut at any byte. A block is 512 KiB
(which stays in a core's cache: half again as fast as 4 MiB), or one line where that is longer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.errors import DataError
from penstock.text.batches import Addresses, Unit, is_utf8
from penstock.text.files import InputFile, Stream, open_raw, open_stream
from penstock.text.jsontext import Item

BLOCK = 512 << 10
LONGEST = 256 << 20  # bytes of a line; beyond, it is refused, unread: a zip bomb is one line
BOM = b"\xef\xbb\xbf"
_FOREVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Block:
    """Documents as they are written, with their addresses."""

    addresses: Addresses  # (n,)
    items: list[Item]  # (n,)
    utf8: bool  # all of it
    line: int | None = None  # number of the first, from 1 on; counted where items are lines
    wrong: str | None = None  # what is wrong with its one item, where that needs no looking

    def part(self, begin: int, end: int) -> Block:
        """Some of the documents."""
        line = None if self.line is None else self.line + begin
        return Block(self.addresses[begin:end], self.items[begin:end], self.utf8, line, self.wrong)


def blocks(
    stream: Stream,
    begin: int = 0,
    end: int = _FOREVER,
    *,
    line: int | None = 1,
    head: bytes = b"",
    block: int = BLOCK,
    longest: int = LONGEST,
) -> Iterator[Block]:
    r"""The lines that begin in [begin, end); the stream stands at `begin`, a line's beginning.

    `head` are bytes from there on that were read already.

    >>> import io
    >>> for found in blocks(io.BytesIO(b"ab\ncd\n\nef"), block=4):
    ...     print(found.addresses.tolist(), found.items, found.line)
    [0] [b'ab'] 1
    [3, 6] [b'cd', b''] 2
    [7] [b'ef'] 4
    """
    assert longest >= block
    parts: list[bytes] = []
    held = 0  # bytes of the line that has begun and not ended
    while begin < end:
        chunk, head = head or stream.read(block), b""
        if not chunk and not held:
            return
        first, cut = chunk.find(b"\n"), chunk.rfind(b"\n") + 1
        if chunk and not cut:
            if held <= longest:  # what is longer is only measured
                parts.append(chunk)
            held += len(chunk)
            continue
        if held + max(first, 0) > longest:
            cut = first + 1  # the other lines of this chunk come next
            found = [_overlong(parts[0], begin, line, longest)]
            size = held + cut
        else:
            parts.append(chunk[:cut])
            block_found, size = _block(parts, begin, end, line)
            found = [block_found]
            del block_found
        parts, held, head = [], 0, chunk[cut:]
        begin += size
        line = None if line is None else line + len(found[0].items)
        yield found.pop()  # a long line is not held on to while it is worked on
        if not chunk:
            return


def _overlong(begins: bytes, begin: int, line: int | None, longest: int) -> Block:
    wrong = f"a line of more than {longest:,} bytes"
    return Block(np.array([begin]), [begins[:BLOCK]], False, line, wrong)  # noqa: FBT003


def _block(parts: list[bytes], begin: int, end: int, line: int | None) -> tuple[Block, int]:
    """The lines of whole lines, but for those that begin at `end` or later; and their bytes."""
    whole = b"".join(parts)
    parts.clear()
    if begin + len(whole) > end:
        past = whole.find(b"\n", max(end - begin - 1, 0)) + 1
        whole = whole[: past or len(whole)]
    size, utf8 = len(whole), is_utf8(whole)
    lines: list[Item] = list(whole.split(b"\n"))
    if whole.endswith(b"\n"):
        lines.pop()
    del whole
    lengths = np.fromiter(map(len, lines), np.int64, len(lines))
    addresses = begin + np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths[:-1] + 1)))
    if begin == 0:
        lines[0] = bytes(lines[0]).removeprefix(BOM)
    return Block(addresses, lines, utf8, line), size


def lines_of(file: InputFile, unit: Unit) -> Iterator[Block]:
    """The lines of a unit."""
    if file.compression or file.kind == "json":
        with open_stream(file) as stream:
            yield from blocks(stream)
        return
    with open_raw(file) as raw:
        begin, head, line = unit.begin, b"", None if unit.begin else 1
        if begin:
            # The line that begins at `begin` follows a newline; one that begins earlier is
            # another unit's, however far it reaches.
            raw.seek(begin - 1)
            while begin <= unit.end:
                head = raw.read(BLOCK)
                newline = head.find(b"\n")
                if newline >= 0 or not head:
                    break
                begin += len(head)
            begin, head = begin + newline, head[newline + 1 :]
        yield from blocks(raw, begin, unit.end, line=line, head=head)
        if raw.seek(0, os.SEEK_END) < unit.end:
            raise DataError(
                f"{file.path} had {file.size:,} bytes when files were listed, and has become "
                "shorter: list the input again"
            )
