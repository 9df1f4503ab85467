"""Parquet as batches of documents: Arrow buffers for one text column, dicts for whole rows.

A row group of any size is read 64 rows at a time through a small buffer: what is held is those rows
and one page a column, never the group. (64 at a time cost 5% of the speed of 1,000 at a time, and
bound what a run of long documents among short ones, or of one repeated, can take.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import DataError, OutOfBounds
from penstock.text.arrow import begins_of, flags, integers
from penstock.text.batches import (
    Addresses,
    Policy,
    Records,
    Reject,
    Texts,
    Unit,
    refused,
    shown,
)
from penstock.text.files import InputFile, open_raw, reading
from penstock.text.jsontext import ids_of

ROWS = 64  # read at a time, at most
READ = 512 << 10  # bytes read at a time, as far as the footer tells
FOOTER = 64 << 10  # bytes at a file's end that are read first
SMALL = 1 << 20  # batches smaller than this are joined; the others are Arrow's own buffers
LARGE = 4 << 20  # batches larger than this are cut
MOST = 1000
PIECES = 8  # of a giant row group at most: to read one, those before it are read and let go

Bad = list[tuple[int, str, str]]  # which row, why, how it begins


@contextmanager
def _opened(file: InputFile) -> Iterator[Any]:
    """The Parquet file, read through a buffer of 1 MiB a column."""
    with open_raw(file) as raw, reading(file):
        source = pa.PythonFile(raw, "r") if "://" in file.path else pa.OSFile(file.path)
        options: dict[str, Any] = {"pre_buffer": False, "buffer_size": 1 << 20}
        with source, pq.ParquetFile(source, **options) as opened:
            names = [f.name for f in opened.schema_arrow if pa.types.is_dictionary(f.type)]
            if not names:
                yield opened
                return
            # Read as what they are, these come through even where a value is no UTF-8.
            options["read_dictionary"] = names
            with pq.ParquetFile(source, metadata=opened.metadata, **options) as again:
                yield again


def footer_of(file: InputFile, field: str) -> tuple[list[int], list[int], bytes]:
    """Rows of each row group, bytes of its texts, and the footer itself, which is all that is read.

    Without a column of that name, bytes are those of all columns.
    """
    with open_raw(file) as raw, reading(file):
        size = min(file.size, FOOTER)
        raw.seek(file.size - size)
        end = raw.read(size)
        wanted = int.from_bytes(end[-8:-4], "little") + 8
        if len(end) < wanted <= file.size:
            raw.seek(file.size - wanted)
            end = raw.read(wanted)
        footer = end[-wanted:]
        metadata = pq.read_metadata(pa.BufferReader(footer))
    groups = [metadata.row_group(g) for g in range(metadata.num_row_groups)]
    sizes = [_size(group, [field]) or int(group.total_byte_size) for group in groups]
    return [group.num_rows for group in groups], sizes, footer


def columns_of(file: InputFile) -> dict[str, str]:
    """The columns, and what those hold that are no text: {"text": "", "id": "int64"}."""
    with _opened(file) as opened:
        return {each.name: _other_than_text(each.type) for each in opened.schema_arrow}


def _other_than_text(kind: Any) -> str:
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return "" if _is_string(kind) or _is_binary(kind) or pa.types.is_null(kind) else str(kind)


def units_of(file: InputFile, index: int, target_bytes: int) -> list[Unit]:
    """Consecutive row groups of about `target_bytes` together; giant ones in pieces.

    To begin inside a row group, all before is decoded and thrown away. That is 15 to 50 times
    quicker than what is done with documents afterwards, so at most 8 pieces cost at most 25%; and
    only groups of more than 4 × `target_bytes` are cut.
    """
    units: list[Unit] = []
    with _opened(file) as opened:
        groups = [opened.metadata.row_group(g) for g in range(opened.metadata.num_row_groups)]
    begin, size = 0, 0
    for g, group in enumerate(groups):
        large = group.total_byte_size
        if g > begin and size + large > target_bytes:
            units.append(Unit(file=index, begin=begin, end=g))
            begin, size = g, 0
        size += large
        pieces = min(PIECES, -(-large // (2 * target_bytes)), group.num_rows)
        if large > 4 * target_bytes and pieces > 1:
            cuts = [group.num_rows * i // pieces for i in range(pieces)] + [-1]
            for row, end in pairwise(cuts):
                units.append(Unit(file=index, begin=g, end=g + 1, row_begin=row, row_end=end))
            begin, size = g + 1, 0
    if begin < len(groups) or not units:
        units.append(Unit(file=index, begin=begin, end=len(groups)))
    return units


def _batches(
    file: InputFile, opened: Any, unit: Unit, columns: list[str] | None
) -> Iterator[tuple[int, Any]]:
    """The rows of a unit as record batches, each with the number of its first row in the file."""
    metadata = opened.metadata
    groups = [metadata.row_group(g) for g in range(min(unit.end, metadata.num_row_groups))]
    base = sum(group.num_rows for group in groups[: unit.begin])
    rows = sum(group.num_rows for group in groups[unit.begin :])
    stop = rows if unit.row_end < 0 else unit.row_end
    if unit.end > metadata.num_row_groups or stop > rows:
        raise DataError(f"{file.path} has lost rows since files were listed: list them again")
    if rows == 0:
        return
    size = sum(_size(group, columns) for group in groups[unit.begin :])
    batch_size = max(1, min(ROWS, READ * rows // max(size, 1)))
    at = 0
    for batch in opened.iter_batches(
        batch_size=batch_size,
        row_groups=list(range(unit.begin, unit.end)),
        columns=columns,
        use_threads=False,
    ):
        begin, end = max(unit.row_begin - at, 0), min(stop - at, batch.num_rows)
        if begin < end:
            yield base + at + begin, batch.slice(begin, end - begin)
        at += batch.num_rows
        if at >= stop:
            return
    raise DataError(f"{file.path} ends after {base + at:,} rows, where {base + stop:,} were stated")


def _size(group: Any, columns: list[str] | None) -> int:
    if columns is None:
        return int(group.total_byte_size)
    chunks = [group.column(c) for c in range(group.num_columns)]
    return sum(c.total_uncompressed_size for c in chunks if c.path_in_schema in columns)


def _refused(
    file: InputFile, policy: Policy, first: int, bad: list[tuple[int, str, str]]
) -> list[Reject]:
    """What is wrong with rows, counted from `first` on, as rejects or as an error."""
    rejects = []
    for i, why, text in bad:
        address = first + i
        reject = Reject(path=file.path, address=address, line=None, reason=why, text=text)
        rejects.append(refused(reject, policy, f"row {address}"))
    return rejects


# ------------------------------------------------------------------------------------ one column


def read_texts(file: InputFile, unit: Unit, field: str, policy: Policy) -> Iterator[Texts]:
    """The texts of a unit, as far as can be in the buffers that Arrow read them into."""
    with _opened(file) as opened:
        names = opened.schema_arrow.names
        if names.count(field) > 1:
            raise DataError(f"{file.path} has {names.count(field)} columns named {field!r}")
        has_id = field != "id" and names.count("id") == 1
        columns = [name for name in (field, "id") if name in names and (name == field or has_id)]
        held: list[Texts] = []
        size = count = 0
        # A column at least has to be read for there to be rows.
        for first, batch in _batches(file, opened, unit, columns or names[:1]):
            made = _texts(file, batch, field, first, policy, names)
            held.append(made)
            size += made.texts.nbytes
            count += batch.num_rows
            if size >= SMALL or count + ROWS > MOST:
                yield from _cut(_joined(held))
                held, size, count = [], 0, 0
        if held:
            yield from _cut(_joined(held))


def _texts(
    file: InputFile, batch: Any, field: str, first: int, policy: Policy, names: list[str]
) -> Texts:
    rows = batch.num_rows
    bad: Bad
    if field in names:
        texts, bad = as_text(batch.column(batch.schema.names.index(field)), field)
    else:
        why = f"no column {field!r}; its columns: {', '.join(map(repr, names[:8]))}"
        texts, bad = pa.nulls(rows, pa.large_string()), [(i, why, "") for i in range(rows)]
    rejects = _refused(file, policy, first, bad)
    addresses = np.arange(first, first + rows)
    ids = None
    if field != "id" and "id" in names:
        ids = _ids(batch.column(batch.schema.names.index("id")))
    if bad:
        kept = np.delete(np.arange(rows), [i for i, _, _ in bad])
        addresses, places = addresses[kept], integers(kept)
        texts, ids = texts.take(places), None if ids is None else ids.take(places)
    return Texts(addresses, texts, rejects, ids)


def as_text(column: pa.Array, field: str) -> tuple[pa.LargeStringArray, Bad]:
    r"""A column as text, and what is wrong with some of its rows (whose text is undefined).

    >>> texts, bad = as_text(pa.array([b"ab", None, b"c\xff"]), "text")
    >>> texts[0].as_py(), [row[:2] for row in bad]
    ('ab', [(1, "'text' is null, where text was expected"), (2, 'invalid UTF-8 at its byte 1')])
    """
    column = _plain(column)
    plain = column.type
    if not (_is_string(plain) or _is_binary(plain) or pa.types.is_null(plain)):
        why = f"{field!r} is {column.type}, where text was expected"
        bad = [(i, why, shown(str(value))) for i, value in enumerate(column)]
        return pa.nulls(len(column), pa.large_string()), bad
    if pa.types.is_fixed_size_binary(plain):
        column = column.cast(pa.binary())
    binary = column.cast(pa.large_binary())
    texts = binary.view(pa.large_string())
    bad = []
    if texts.null_count:
        nulls = np.flatnonzero(flags(texts.is_null())).tolist()
        bad = [(i, f"{field!r} is null, where text was expected", "") for i in nulls]
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        bad = sorted(bad + _not_utf8(binary))
    return texts, bad


def _plain(column: Any) -> Any:
    """A column without the dictionary or the extension around its values."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_dictionary(column.type):
        # Arrow's own decoding refuses the whole column where one value is no UTF-8.
        column = column.dictionary.take(column.indices)
    return column


def _is_string(kind: Any) -> bool:
    t = pa.types
    return bool(t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind))


def _is_binary(kind: Any) -> bool:
    t = pa.types
    variable = t.is_binary(kind) or t.is_large_binary(kind) or t.is_binary_view(kind)
    return bool(variable or t.is_fixed_size_binary(kind))


def _not_utf8(column: Any) -> Bad:
    bad: Bad = []
    for i, value in enumerate(column):
        raw = value.as_py()
        try:
            str(raw or b"", "utf-8")
        except UnicodeDecodeError as error:
            bad.append((i, f"invalid UTF-8 at its byte {error.start}", shown(raw)))
    return bad


def _ids(column: Any) -> pa.LargeStringArray:
    """The column of ids as text; an id that cannot be read is none."""
    column = _plain(column)
    if _is_string(column.type) or pa.types.is_integer(column.type):
        ids = column.cast(pa.large_string())
        try:
            ids.validate(full=True)
            return ids
        except pa.ArrowInvalid:
            column = ids.cast(pa.large_binary())
    try:
        values = _values(column)
    except _WRONG:
        values = _values_one_by_one(column, "id", {})
    ids = ids_of([_text_or_bytes(value) for value in values])
    return pa.nulls(len(column), pa.large_string()) if ids is None else ids


def _joined(held: list[Texts]) -> Texts:
    if len(held) == 1:
        return held[0]
    ids = None if held[0].ids is None else pa.concat_arrays([part.ids for part in held])
    return Texts(
        np.concatenate([part.addresses for part in held]),
        pa.concat_arrays([part.texts for part in held]),
        [reject for part in held for reject in part.rejects],
        ids,
    )


def _cut(batch: Texts) -> Iterator[Texts]:
    """A batch in slices that are not too large, or of one text."""
    count = len(batch.texts)
    if batch.texts.nbytes <= LARGE:
        if count or batch.rejects:
            yield batch
        return
    ends = begins_of(batch.texts)
    begin, rejects = 0, batch.rejects
    while begin < count:
        end = max(begin + 1, int(np.searchsorted(ends, ends[begin] + LARGE, side="right")) - 1)
        ids = None if batch.ids is None else batch.ids[begin:end]
        yield Texts(batch.addresses[begin:end], batch.texts[begin:end], rejects, ids)
        begin, rejects = end, []


# ------------------------------------------------------------------------------------ whole rows


def read_records(file: InputFile, unit: Unit, policy: Policy) -> Iterator[Records]:
    """The rows of a unit as dicts; lists and structs are Python's, maps are dicts.

    Binary values that are UTF-8 are text, since many writers do not annotate their strings.
    """
    with _opened(file) as opened:
        for first, batch in _batches(file, opened, unit, None):
            records, bad = _records(batch)
            rejects = _refused(file, policy, first, bad)
            addresses: Addresses = np.arange(first, first + batch.num_rows)
            if bad:
                addresses = np.delete(addresses, [i for i, _, _ in bad])
            yield Records(addresses, records, rejects)


def _records(batch: Any) -> tuple[list[dict[str, Any]], Bad]:
    names = batch.schema.names
    values: list[list[Any]] = []
    wrong: dict[int, tuple[str, str]] = {}
    for name, column in zip(names, batch.columns, strict=True):
        try:
            found = _values(column)
        except _WRONG:
            found = _values_one_by_one(column, name, wrong)
        if "binary" in str(column.type):
            found = [_text_or_bytes(value) for value in found]
        values.append(found)
    rows = zip(*values, strict=True) if values else iter([()] * batch.num_rows)
    records = [dict(zip(names, row, strict=True)) for i, row in enumerate(rows) if i not in wrong]
    return records, [(i, *wrong[i]) for i in sorted(wrong)]


# Invalid UTF-8; a date beyond year 9999; a map that has a key twice.
_WRONG = (UnicodeDecodeError, ValueError, OverflowError, KeyError)


def _values(column: Any) -> list[Any]:
    """A column as Python objects; of nanoseconds, which Python has not, microseconds are kept."""
    t = pa.types
    kind = column.type
    if t.is_timestamp(kind) and kind.unit == "ns":
        column = column.cast(pa.timestamp("us", kind.tz), safe=False)
    elif t.is_time(kind) and kind.unit == "ns":
        column = column.cast(pa.time64("us"), safe=False)
    elif t.is_duration(kind) and kind.unit == "ns":
        column = column.cast(pa.duration("us"), safe=False)
    values: list[Any] = column.to_pylist(maps_as_pydicts="strict")
    return values


def _values_one_by_one(column: Any, name: str, wrong: dict[int, tuple[str, str]]) -> list[Any]:
    values: list[Any] = []
    for i in range(len(column)):
        try:
            values += _values(column[i : i + 1])
        except _WRONG as error:
            values.append(None)
            if isinstance(error, UnicodeDecodeError):
                why, text = f"invalid UTF-8 at byte {error.start} of {name!r}", shown(error.object)
            else:
                why, text = f"{name!r} cannot be read: {error}", ""
            wrong.setdefault(i, (why, text))
    return values


def _text_or_bytes(value: Any) -> Any:
    r"""Bytes that are UTF-8 as text, in lists and dicts too; all else as it is.

    >>> _text_or_bytes([{"a": b"b"}, b"\xff"])
    [{'a': 'b'}, b'\xff']
    """
    match value:
        case bytes():
            try:
                return value.decode()
            except UnicodeDecodeError:
                return value
        case list():
            return [_text_or_bytes(each) for each in value]
        case dict():
            return {key: _text_or_bytes(each) for key, each in value.items()}
    return value


def read_at(file: InputFile, address: int) -> dict[str, Any]:
    """The row of that number in the file, as a dict."""
    row = address
    with _opened(file) as opened:
        counts = [
            opened.metadata.row_group(g).num_rows for g in range(opened.metadata.num_row_groups)
        ]
    for g, count in enumerate(counts):
        if 0 <= row < count:
            unit = Unit(file=0, begin=g, end=g + 1, row_begin=row, row_end=row + 1)
            return next(read_records(file, unit, "error")).records[0]
        row -= count
    raise OutOfBounds(f"{file.path} has {sum(counts):,} rows, and no row {address}")
