"""JSON: Lines, an object, or a list of objects, as batches of documents.

    {"text": "a"}                 [{"text": "a"},
    {"text": "b"}                  {"text": "b"}]
    addresses 0, 14: bytes        addresses 0, 1: places in the list

A `.json` file whose first line is a whole object is JSON Lines under another name, as C4's are.
A list is held whole as bytes, and decoded a batch at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import numpy as np

from penstock.errors import DataError, OutOfBounds
from penstock.text.arrow import strings
from penstock.text.batches import (
    Addresses,
    Policy,
    Records,
    Reject,
    Texts,
    Unit,
    is_utf8,
    refused,
    shown,
)
from penstock.text.files import InputFile, Stream, open_raw, open_stream
from penstock.text.jsontext import (
    Decode,
    Item,
    decode_all,
    ids_of,
    record_decoder,
    split_list,
    text_decoder,
)
from penstock.text.lines import BLOCK, BOM, Block, blocks, lines_of

LARGEST = 2 << 30  # bytes of a JSON document, which is held whole
MOST = 1000  # records in a batch


# --------------------------------------------------------------------------------- JSON documents


def _documents(file: InputFile) -> Iterator[Block]:
    """The object of a JSON file, or those of its list, addressed by their place in it."""
    with open_stream(file) as stream:
        data = _whole(file, stream)
    utf8 = is_utf8(data)
    wrong, rest = None, b""
    items: list[Item] = [data]
    if data.startswith(b"["):
        try:
            items = list(msgspec.json.decode(data, type=list[msgspec.Raw]))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            found, wrong, rest = split_list(data)
            items = list(found)
    elif not data:
        items, wrong = [], "empty, where a JSON object or a list was expected"
    del data
    begin, size = 0, 0
    for i, item in enumerate(items):
        size += len(memoryview(item))
        if size >= BLOCK or i + 1 == len(items):
            yield Block(np.arange(begin, i + 1), items[begin : i + 1], utf8)
            begin, size = i + 1, 0
    if wrong:
        yield Block(np.array([len(items)]), [rest], utf8, None, wrong)


def _whole(file: InputFile, stream: Stream) -> bytes:
    parts, size = [], 0
    while chunk := stream.read(BLOCK):
        parts.append(chunk)
        size += len(chunk)
        if size > LARGEST:
            raise DataError(
                f"{file.path} is a JSON document of more than {LARGEST:,} bytes, which would have "
                "to be held whole: make it JSON Lines (jq -c '.[]')"
            )
    return b"".join(parts).removeprefix(BOM).strip()


def is_lines(file: InputFile) -> bool:
    """Whether each line is a document: JSON Lines, or a .json file that really is that."""
    if file.kind == "jsonl":
        return True
    head = b""
    with open_stream(file) as stream:
        while len(head) < BLOCK and (chunk := stream.read(BLOCK)):
            head += chunk
    first, newline, _ = head.removeprefix(BOM).lstrip().partition(b"\n")
    complete = newline or len(head) < BLOCK
    return first.startswith(b"{") and (not complete or first.rstrip().endswith(b"}"))


# ----------------------------------------------------------------------------------------- batches


def read_records(file: InputFile, unit: Unit, policy: Policy) -> Iterator[Records]:
    """The documents of a unit as dicts."""
    decode = record_decoder()
    lines = is_lines(file)
    for block in lines_of(file, unit) if lines else _documents(file):
        for begin in range(0, len(block.items), MOST):
            part = block.part(begin, begin + MOST)
            addresses, records, rejects = _decoded(file, part, decode, policy, lines=lines)
            if records or rejects:
                yield Records(addresses, records, rejects)


def read_texts(file: InputFile, unit: Unit, field: str, policy: Policy) -> Iterator[Texts]:
    """The texts of a unit: nothing but the field, and the ids, is decoded."""
    decode = text_decoder(field)
    lines = is_lines(file)
    make = partial(_texts, file, decode, field, policy, lines)
    # map lets go of a block as soon as it has been worked on, where a loop would hold it.
    for texts in map(make, lines_of(file, unit) if lines else _documents(file)):
        if len(texts.texts) or texts.rejects:
            yield texts


def _texts(
    file: InputFile, decode: Decode, field: str, policy: Policy, lines: bool, block: Block
) -> Texts:
    addresses, rows, rejects = _decoded(file, block, decode, policy, field, lines=lines)
    ids = None if field == "id" else ids_of([row.id for row in rows])
    return Texts(addresses, strings([row.text for row in rows]), rejects, ids)


def _decoded(
    file: InputFile,
    block: Block,
    decode: Decode,
    policy: Policy,
    field: str | None = None,
    *,
    lines: bool,
) -> tuple[Addresses, list[Any], list[Reject]]:
    kept, rows, bad = (
        ([], [], [(0, block.wrong)])
        if block.wrong
        else decode_all(block.items, decode, utf8=block.utf8, field=field)
    )
    rejects = []
    for i, why in bad:
        address = int(block.addresses[i])
        line = None if block.line is None or not lines else block.line + i
        text = shown(memoryview(block.items[i]))
        reject = Reject(path=file.path, address=address, line=line, reason=why, text=text)
        place = _place(file, address, line, lines=lines) if policy == "error" else ""
        rejects.append(refused(reject, policy, place))
    return block.addresses if kept is None else block.addresses[kept], rows, rejects


def place_of(file: InputFile, address: int, line: int | None) -> str:
    """How an error names the place of a document."""
    return _place(file, address, line, lines=is_lines(file))


def _place(file: InputFile, address: int, line: int | None, *, lines: bool) -> str:
    if not lines:
        return f"document {address}"
    if line is None and "://" not in file.path:
        line = _line_number(file, address)
    return f"byte {address}" if line is None else f"line {line} (byte {address})"


def _line_number(file: InputFile, address: int) -> int:
    """How many lines begin up to here; for an error, which ends the reading anyway."""
    count = 1
    with open_raw(file) as raw:
        while address > 0 and (chunk := raw.read(min(address, BLOCK))):
            count += chunk.count(b"\n")
            address -= len(chunk)
    return count


# ----------------------------------------------------------------------------------- one document


def read_at(file: InputFile, address: int) -> dict[str, Any]:
    """The document at an address that a batch gave."""
    lines = is_lines(file)
    found = _line_at(file, address) if lines else _document_at(file, address)
    _, records, _ = _decoded(file, found, record_decoder(), "error", lines=lines)
    if not records:
        raise OutOfBounds(f"{file.path} has a blank line at byte {address}, and no document")
    document: dict[str, Any] = records[0]
    return document


def _line_at(file: InputFile, address: int) -> Block:
    before = b"\n"  # what precedes the line
    with open_stream(file, skip=max(address - 1, 0)) as stream:
        if address > 0:
            before = stream.read(1)
        # Cut after the address: the line that begins there and no other.
        found = next(blocks(stream, address, address + 1, line=None), None)
    if found is None or before != b"\n" or address < 0:
        raise OutOfBounds(f"{file.path} has no line that begins at byte {address}")
    return found


def _document_at(file: InputFile, address: int) -> Block:
    for block in _documents(file):
        if block.addresses[0] <= address <= block.addresses[-1]:
            i = address - int(block.addresses[0])
            return block.part(i, i + 1)
    raise OutOfBounds(f"{file.path} has no document {address}")
