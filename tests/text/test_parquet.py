"""Parquet: columns of every kind of text, rows as dicts, units that add up, bounded memory."""

from __future__ import annotations

import datetime as dt
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text.reading import numbered, only, parquet, records, texts, write

from penstock.errors import DataError, OutOfBounds
from penstock.text.documents import Unit, read_at, read_records, read_texts, units_of
from penstock.text.parquet import PIECES

TEXTS = ["a", "naïve 日本", "", "a\0b", "👩‍🚀"] * 40
DICTIONARY = [pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int32(), pa.large_binary())]


def column(values: list[str | None], kind: pa.DataType) -> pa.Array:
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    raw = [v.encode() if v is not None and "binary" in str(plain) else v for v in values]
    made = pa.array(raw, plain)
    return made.dictionary_encode().cast(kind) if kind != plain else made


# ------------------------------------------------------------------------------------------- texts


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip"])
@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.large_binary(),
        pa.binary_view(),
        *DICTIONARY,
    ],
    ids=str,
)
def test_a_text_column_of_any_kind_is_text(
    tmp_path: Path, kind: pa.DataType, compression: str
) -> None:
    made = {"n": list(range(len(TEXTS))), "text": column(TEXTS, kind)}
    path = parquet(tmp_path / "a.parquet", made, rows=70, compression=compression)
    found = texts(path)
    assert found.documents == TEXTS
    assert found.addresses == list(range(len(TEXTS)))
    assert [r["text"] for r in records(path).documents] == TEXTS
    assert read_at(only(path), 71) == {"n": 71, "text": TEXTS[71]}


def test_other_spellings_of_binary_are_text_too(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", {"text": pa.array([b"abc", b"def"], pa.binary(3))})
    assert texts(path).documents == ["abc", "def"]


def test_text_comes_in_the_buffers_that_arrow_read_it_into(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", {"text": pa.array(["x" * 10_000] * 640)})
    file = only(path)
    before = pa.default_memory_pool().bytes_allocated()
    batches = list(read_texts(file, units_of([file])[0], "text"))
    held = pa.default_memory_pool().bytes_allocated() - before
    size = sum(batch.texts.nbytes for batch in batches)
    assert size > 6_400_000
    assert held < 1.5 * size


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.string_view(), *DICTIONARY], ids=str)
def test_rows_that_hold_no_text_are_refused_and_the_others_kept(
    tmp_path: Path, kind: pa.DataType
) -> None:
    values: list[str | None] = ["a", None, "b"] * 200
    path = parquet(tmp_path / "a.parquet", {"text": column(values, kind)}, rows=170)
    found = texts(path, policy="reject", target=1)
    assert found.documents == ["a", "b"] * 200
    assert found.addresses == [i for i in range(600) if i % 3 != 1]
    assert [r.address for r in found.rejects] == list(range(1, 600, 3))
    assert {r.reason for r in found.rejects} == {"'text' is null, where text was expected"}
    with pytest.raises(DataError, match=r"a\.parquet, row 1: 'text' is null"):
        texts(path)


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.binary(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())],
    ids=str,
)
def test_bytes_that_are_no_utf8_are_refused_whatever_the_column_claims(
    tmp_path: Path, kind: pa.DataType
) -> None:
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    raw = pa.array([b"ok", b"caf\xe9", b"\xed\xa0\x80", None], pa.binary())
    made = raw.cast(pa.binary_view()).view(plain) if "view" in str(plain) else raw.view(plain)
    if plain != kind:
        made = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, None], pa.int8()), made[:3])
    path = parquet(tmp_path / "a.parquet", {"text": made})
    found = texts(path, policy="reject")
    assert found.documents == ["ok"]
    assert [(r.address, r.reason) for r in found.rejects] == [
        (1, "invalid UTF-8 at its byte 3"),
        (2, "invalid UTF-8 at its byte 0"),
        (3, "'text' is null, where text was expected"),
    ]
    assert found.rejects[0].text == "caf\ufffd"
    with pytest.raises(DataError, match="row 1: invalid UTF-8"):
        texts(path)


def test_strings_that_are_no_utf8_are_refused_in_records_with_their_column(tmp_path: Path) -> None:
    bad = pa.array([b"ok", b"caf\xe9", b"ok"], pa.binary()).view(pa.string())
    for made in (bad, pa.StructArray.from_arrays([bad], ["inner"])):
        path = parquet(tmp_path / "a.parquet", {"n": [1, 2, 3], "x": made})
        found = records(path, policy="reject")
        assert [r["n"] for r in found.documents] == [1, 3]
        assert found.addresses == [0, 2]
        assert "invalid UTF-8 at byte 3 of 'x'" in found.rejects[0].reason
        with pytest.raises(DataError, match="row 1: invalid UTF-8"):
            records(path)


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (pa.array([1, 2]), "int64"),
        (pa.array([["a"], ["b"]]), "list<"),
        (pa.array([{"a": "b"}] * 2), "struct<"),
        (pa.nulls(2), "null"),
        (pa.array([1, 1]).dictionary_encode(), "int64"),
    ],
)
def test_a_column_of_another_type_is_refused_row_by_row(
    tmp_path: Path, made: pa.Array, kind: str
) -> None:
    path = parquet(tmp_path / "a.parquet", {"text": made})
    found = texts(path, policy="reject")
    assert found.documents == []
    assert len(found.rejects) == 2
    assert kind in found.rejects[0].reason


def test_a_missing_column_is_refused_naming_those_there_are(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", {"body": numbered(3000), "id": numbered(3000)})
    found = texts(path, policy="reject")
    assert [r.address for r in found.rejects] == list(range(3000))
    assert found.documents == []
    with pytest.raises(DataError, match="row 0: no column 'text'; its columns: 'body', 'id'"):
        texts(path)


def test_a_column_with_a_dot_is_no_path_into_a_struct(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", {"a.b": ["flat"], "a": [{"b": "deep"}]})
    assert texts(path, "a.b").documents == ["flat"]
    path = parquet(tmp_path / "b.parquet", {"a": [{"b": "deep"}]})
    assert "no column 'a.b'" in texts(path, "a.b", policy="reject").rejects[0].reason


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="2 columns named 'text'"):
        texts(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (["x", None, "z"], ["x", None, "z"]),
        ([1, None, 3], ["1", None, "3"]),
        ([b"ab", b"\xff\x01", None], ["ab", "ff01", None]),
        ([[1], None, [2, 3]], ["[1]", None, "[2,3]"]),
        ([1.5, None, 2.0], ["1.5", None, "2.0"]),
        ([None, None, None], [None, None, None]),
        (pa.array(["x", None, "x"]).dictionary_encode(), ["x", None, "x"]),
        (pa.array([b"x", None, b"\xff"]).view(pa.string()), ["x", None, "ff"]),
        (pa.array([10**15, None, 0], pa.timestamp("s")), [None, None, "1970-01-01T00:00:00"]),
    ],
    ids=str,
)
def test_ids_are_strings_whatever_their_column(
    tmp_path: Path, ids: list[Any], expected: list[str | None]
) -> None:
    path = parquet(tmp_path / "a.parquet", {"id": pa.array(ids), "text": ["a", "b", "c"]})
    assert texts(path).ids == expected
    path = parquet(tmp_path / "a.parquet", {"id": pa.array(ids), "text": ["a", None, "c"]})
    assert texts(path, policy="reject").ids == [expected[0], expected[2]]


# ----------------------------------------------------------------------------------------- records


def test_nested_columns_are_lists_and_dicts(tmp_path: Path) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"question {i}", "parts": [{"type": "text"}]},
                {"role": "assistant", "content": None, "parts": []},
            ][: i % 3],
            "score": i / 2,
            "flags": None if i % 2 else [True, False],
        }
        for i in range(300)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=99)
    assert records(tmp_path / "a.parquet").documents == rows
    assert read_at(only(tmp_path / "a.parquet"), 299) == rows[299]


def test_maps_are_dicts_and_one_with_a_key_twice_is_refused(tmp_path: Path) -> None:
    maps = pa.array([[("a", 1)], [("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64()))
    found = records(parquet(tmp_path / "a.parquet", {"m": maps}), policy="reject")
    assert found.documents == [{"m": {"a": 1}}]
    assert "'m' cannot be read" in found.rejects[0].reason


def test_times_are_kept_to_the_microsecond(tmp_path: Path) -> None:
    at = pa.array([1_700_000_000_123_456_789], pa.timestamp("ns"))
    (found,) = records(parquet(tmp_path / "a.parquet", {"at": at})).documents
    assert found["at"] == dt.datetime(2023, 11, 14, 22, 13, 20, 123456)  # noqa: DTZ001


def test_binary_is_text_where_it_can_be(tmp_path: Path) -> None:
    made = {"b": [b"text", b"\xff\x00"], "deep": [[{"x": b"text"}], [{"x": b"\xff"}]]}
    assert records(parquet(tmp_path / "a.parquet", made)).documents == [
        {"b": "text", "deep": [{"x": "text"}]},
        {"b": b"\xff\x00", "deep": [{"x": b"\xff"}]},
    ]


# ------------------------------------------------------------------------------------------- units


@given(
    sizes=st.lists(st.integers(0, 40), max_size=6),
    target=st.integers(1, 4000),
    data=st.data(),
)
def test_units_of_any_size_give_every_row_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], target: int, data: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "units.parquet"
    all_of = numbered(sum(sizes))
    with pq.ParquetWriter(path, pa.schema([("text", pa.string())])) as writer:
        at = 0
        for size in sizes:
            writer.write_table(pa.table({"text": pa.array(all_of[at : at + size], pa.string())}))
            at += size
    file = only(path)
    units = units_of([file], target_bytes=target)
    assert units == units_of([file], target_bytes=target)
    for found in (texts(path, target=target), records(path, target=target)):
        assert found.addresses == list(range(len(all_of)))
    assert texts(path, target=target).documents == all_of
    if all_of:
        row = data.draw(st.integers(0, len(all_of) - 1))
        assert read_at(file, row) == {"text": all_of[row]}


def test_row_groups_are_taken_together_and_giant_ones_cut(tmp_path: Path) -> None:
    made = {"text": [f"{i:0100d}" for i in range(1000)]}
    small = only(parquet(tmp_path / "a.parquet", made, rows=10, compression="none"))
    units = units_of([small], target_bytes=12_000)
    assert 8 <= len(units) <= 15
    assert [u.begin for u in units[1:]] == [u.end for u in units[:-1]]
    assert {(u.row_begin, u.row_end) for u in units} == {(0, -1)}
    giant = only(parquet(tmp_path / "b.parquet", made, compression="none"))
    for target, pieces in ((100_000, 1), (25_000, 3), (100, PIECES)):
        units = units_of([giant], target_bytes=target)
        assert len(units) == pieces
        assert [u.row_begin for u in units[1:]] == [u.row_end for u in units[:-1]]


def test_a_file_of_no_rows_has_no_documents(tmp_path: Path) -> None:
    none = pa.array([], pa.string())
    path = parquet(tmp_path / "a.parquet", {"text": none})
    assert texts(path).documents == records(path).documents == []
    assert len(units_of([only(path)])) == 1


def test_a_row_that_is_not_there_is_out_of_bounds(tmp_path: Path) -> None:
    file = only(parquet(tmp_path / "a.parquet", {"text": ["a", "b"]}))
    for row in (-1, 2):
        with pytest.raises(OutOfBounds, match="has 2 rows"):
            read_at(file, row)
    for unit in (Unit(file=0, begin=0, end=2), Unit(file=0, begin=0, end=1, row_end=3)):
        with pytest.raises(DataError, match="has lost rows"):
            list(read_texts(file, unit, "text"))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", {"text": numbered(5000)}, compression="zstd")
    whole = path.read_bytes()
    bad_page = whole[:100] + b"\xff" * 200 + whole[300:]
    for damaged in (b"", b"PAR1", whole[:-1], whole[: len(whole) // 2], bad_page, b"text\n" * 9):
        write(path, damaged)
        for policy in ("error", "reject"):
            with pytest.raises(DataError, match=r"a\.parquet is cut short, damaged"):
                texts(path, policy=policy)


# ------------------------------------------------------------------------------------------ memory


def peak_of(path: Path, *, whole_rows: bool, target: int = 1 << 40) -> tuple[int, int, int]:
    """Rows, and at most how many bytes Arrow and Python held between batches or at any time."""
    file = only(path)
    before = pa.total_allocated_bytes()
    rows = arrow = 0
    tracemalloc.start()
    try:
        for unit in units_of([file], target_bytes=target):
            read = read_records(file, unit) if whole_rows else read_texts(file, unit, "text")
            for batch in read:
                rows += len(batch.addresses)
                arrow = max(arrow, pa.total_allocated_bytes() - before)
        python = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return rows, arrow, python


def giant(path: Path, megabytes: int, **options: Any) -> int:
    """One row group of about so many megabytes of words; the number of its rows."""
    rng = np.random.default_rng(7)
    words = np.array([f"{w:x}" for w in rng.integers(0, 1 << 60, 5000)])
    with pq.ParquetWriter(path, pa.schema([("text", pa.string())]), **options) as writer:
        made = [" ".join(rng.choice(words, 250)) for _ in range(megabytes * 1_000_000 // 4000)]
        writer.write_table(pa.table({"text": made}), row_group_size=1 << 40)
    assert pq.ParquetFile(path).num_row_groups == 1
    return len(made)


@pytest.mark.parametrize("whole_rows", [False, True])
def test_a_giant_row_group_is_never_held(tmp_path: Path, whole_rows: bool) -> None:
    count = giant(tmp_path / "a.parquet", 30)
    rows, arrow, python = peak_of(tmp_path / "a.parquet", whole_rows=whole_rows)
    assert rows == count
    assert arrow < 12 << 20
    assert python < 4 << 20


@pytest.mark.long
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_row_group_of_200_mb_is_never_held(tmp_path: Path, compression: str) -> None:
    count = giant(tmp_path / "a.parquet", 200, compression=compression)
    for target in (1 << 40, 16 << 20):
        rows, arrow, python = peak_of(tmp_path / "a.parquet", whole_rows=False, target=target)
        assert rows == count
        assert arrow < 12 << 20
        assert python < 4 << 20


def test_long_documents_repeated_do_not_pile_up(tmp_path: Path) -> None:
    # 300 rows that are one dictionary entry of 500 kB: 150 MB of text in a small file.
    path = parquet(tmp_path / "a.parquet", {"text": ["x" * 500_000] * 300})
    assert path.stat().st_size < 100_000
    rows, arrow, _ = peak_of(path, whole_rows=False)
    assert rows == 300
    assert arrow < 70 << 20
    assert max(
        b.texts.nbytes for b in read_texts(only(path), Unit(file=0, begin=0, end=1), "text")
    ) < (5 << 20)
