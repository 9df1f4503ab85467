"""JSON Lines and JSON: what is a document, what is refused and why, and that units add up."""

from __future__ import annotations

import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.text.reading import Read, compressed, lines, only, records, texts, write

from penstock.errors import ConfigError, DataError, OutOfBounds
from penstock.text.documents import read_at, read_records, read_texts, units_of
from penstock.text.jsontext import decode_all, record_decoder, split_list
from penstock.text.lines import blocks

# ---------------------------------------------------------------------------------- what is a line


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_lines_end_as_they_like(tmp_path: Path, suffix: str, newline: bytes, last: bool) -> None:
    data = lines({"text": "a"}, {"text": "b"}, newline=newline, last=last)
    path = write(tmp_path / f"a.jsonl{suffix}", compressed(data, suffix))
    found = texts(path)
    assert found.documents == ["a", "b"]
    assert found.addresses == [0, 13 + len(newline)]


def test_blank_lines_are_no_documents_and_a_byte_order_mark_is_none(tmp_path: Path) -> None:
    data = b"\xef\xbb\xbf" + b'{"text": "a"}\n\n \t\r\n{"text": "b"}\n\n'
    path = write(tmp_path / "a.jsonl", data)
    for read in (texts, records):
        found = read(path, policy="reject")
        assert found.addresses == [0, 22]
        assert not found.rejects
    assert read_at(only(path), 0) == {"text": "a"}
    assert texts(write(path, b"\xef\xbb\xbf")).documents == []


@pytest.mark.parametrize("data", [b"", b"\n", b" \n\r\n"])
def test_an_empty_file_of_lines_has_no_documents(tmp_path: Path, data: bytes) -> None:
    for suffix in ("", ".gz", ".zst"):
        path = write(tmp_path / f"a.jsonl{suffix}", compressed(data, suffix))
        assert texts(path) == Read()
        assert len(units_of([only(path)])) == 1


@pytest.mark.parametrize(
    "text", ["a\0b", "a\u2028b\u2029c\x85d", "\ufeff", "👩‍🚀 é \U0010ffff", ""]
)
def test_text_is_kept_as_it_is(tmp_path: Path, text: str) -> None:
    data = lines({"text": text}) + json.dumps({"text": text}, ensure_ascii=False).encode()
    assert texts(write(tmp_path / "a.jsonl", data)).documents == [text, text]


def test_of_a_key_given_twice_the_last_counts(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "a", "text": "b"}\n')
    assert texts(path).documents == ["b"]
    assert records(path).documents == [{"text": "b"}]


@pytest.mark.parametrize("field", ["text", "a.b", "", "the text", "naïve", "id", "class"])
def test_a_field_may_have_any_name(tmp_path: Path, field: str) -> None:
    path = write(tmp_path / "a.jsonl", lines({"x": 1, field: "value"}))
    assert texts(path, field).documents == ["value"]


def test_ids_are_strings_and_a_document_may_be_without(tmp_path: Path) -> None:
    found: list[Any] = ["a", 10**30, None, 1.5, {"n": [1]}]
    path = write(tmp_path / "a.jsonl", lines({"text": ""}, *({"text": "", "id": i} for i in found)))
    assert texts(path).ids == [None, "a", f"{10**30}", None, "1.5", '{"n":[1]}']
    (batch,) = read_texts(only(path), units_of([only(path)])[0], "id", policy="reject")
    assert batch.ids is None
    assert len(batch.rejects) == 5


def test_what_other_fields_hold_is_not_looked_at_for_texts(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "a", "n": 1e999, "m": [{"text": 5}]}\n')
    assert texts(path).documents == ["a"]
    with pytest.raises(DataError, match="Number out of range"):
        records(path)


def test_integers_of_any_size_that_python_reads_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"n": 123456789012345678901234567890}\n')
    assert records(path).documents == [{"n": 123456789012345678901234567890}]


# ------------------------------------------------------------------------------- what is refused

GOOD = b'{"text": "good"}'
BAD = {
    "cut short": (b'{"text": "a', "not JSON: it ends too early"),
    "no JSON": (b"text", "not JSON: "),
    "two on a line": (b'{"text": "a"} {"text": "b"}', "not JSON: trailing characters"),
    "NaN": (b'{"text": "a", "x": NaN}', "not JSON: NaN and Infinity are not, at its byte 19"),
    "-Infinity": (b'{"x": -Infinity, "text": "a"}', "not JSON: NaN and Infinity are not"),
    "raw NUL": (b'{"text": "a\0b"}', "not JSON: invalid character"),
    "single quotes": (b"{'text': 'a'}", "not JSON: "),
    "not UTF-8": (b'{"text": "caf\xe9"}', "invalid UTF-8 at its byte 13"),
    "elsewhere not UTF-8": (b'{"text": "a", "x": "\xff"}', "invalid UTF-8 at its byte 20"),
    "UTF-8 of a surrogate": (b'{"text": "\xed\xa0\x80"}', "invalid UTF-8"),
    "UTF-16": ('{"text": "a"}'.encode("utf-16"), "(UTF-16, it seems)"),
    "lone surrogate": (rb'{"text": "\ud800"}', r"half of a surrogate pair, \ud800"),
    "lone low one": (rb'{"text": "a\uDC00b"}', r"half of a surrogate pair, \uDC00"),
    "two high ones": (rb'{"text": "\ud83d\ud83d\ude00"}', r"half of a surrogate pair, \ud83d"),
    "one in another field": (rb'{"text": "\\ud83d", "x": "\ud83e"}', r"pair, \ud83e"),
    "a list": (b'["text"]', "a list, where an object was expected"),
    "text alone": (b'"text"', "text, where an object was expected"),
    "null alone": (b"null", "null, where an object was expected"),
    "number alone": (b"1" * 5000, "out of range"),
    "a bomb": (b"[" * 100_000, "nested too deeply"),
    "a closed bomb": (
        b'{"text": "a", "x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "nested too deeply",
    ),
    "a bomb of objects": (b'{"x":' * 100_000, "nested too deeply"),
}
BAD_TEXT = {
    "no field": (b'{"body": "a", "id": 3}', "no field 'text'; its fields: 'body', 'id'"),
    "no fields": (b"{}", "no field 'text'; its fields: none"),
    "null": (b'{"text": null}', "'text' is null, where text was expected"),
    "a number": (b'{"text": 5}', "'text' is a number, where text was expected"),
    "a boolean": (b'{"text": true}', "'text' is a boolean, where"),
    "an object": (b'{"text": {"a": 1}}', "'text' is an object, where"),
    "text in a list": (b'{"text": ["a"]}', "'text' is a list, where"),
}


@pytest.mark.parametrize(("line", "reason"), BAD.values(), ids=BAD)
def test_a_bad_line_is_refused_by_both_readers_with_the_others_kept(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    line = line.replace(b"\n", b"")
    path = write(tmp_path / "a.jsonl", lines(GOOD, b"", line, GOOD))
    for read in (texts, records):
        found = read(path, policy="reject")
        assert found.addresses == [0, 18 + len(line) + 1]
        (reject,) = found.rejects
        assert reason in reject.reason
        assert (reject.address, reject.line, reject.path) == (18, 3, str(path))
        assert reject.text == line[:800].decode(errors="replace")[:200]
        with pytest.raises(DataError, match=r"a\.jsonl, line 3 \(byte 18\): ") as error:
            read(path)
        assert reason in str(error.value)
        assert "policy 'reject'" in str(error.value)
    with pytest.raises(DataError, match=r"line 3"):
        read_at(only(path), 18)


@pytest.mark.parametrize(("line", "reason"), BAD_TEXT.values(), ids=BAD_TEXT)
def test_a_text_that_is_none_is_refused_where_texts_are_asked_for(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    path = write(tmp_path / "a.jsonl", lines(GOOD, line, GOOD))
    found = texts(path, policy="reject")
    assert found.documents == ["good", "good"]
    assert [(r.address, r.line) for r in found.rejects] == [(17, 2)]
    assert reason in found.rejects[0].reason
    assert records(path).documents[1] == json.loads(line)


@pytest.mark.parametrize(("line", "reason"), {**BAD, **BAD_TEXT}.values(), ids={**BAD, **BAD_TEXT})
def test_an_element_of_a_list_is_refused_alone(tmp_path: Path, line: bytes, reason: str) -> None:
    whole = {"cut short", "two on a line", "raw NUL", "UTF-16", "a bomb", "a bomb of objects"}
    path = write(tmp_path / "a.json", b"[" + b", ".join([GOOD, line, GOOD]) + b"]")
    found = texts(path, policy="reject")
    assert found.documents[:1] == ["good"]
    assert found.rejects
    if line not in {BAD[name][0] for name in whole}:
        assert found.addresses == [0, 2]
        assert [(r.address, r.line) for r in found.rejects] == [(1, None)]
        assert reason in found.rejects[0].reason
    with pytest.raises(DataError, match=r"a\.json, document 1: "):
        texts(path)


def test_an_error_far_into_a_file_still_names_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines(*[GOOD] * 5000, b"{", GOOD))
    with pytest.raises(DataError, match=r"line 5001 \(byte 85000\)"):
        texts(path, target=9999)
    (reject,) = texts(path, target=9999, policy="reject").rejects
    assert (reject.line, reject.address) == (None, 85000)


def test_a_policy_is_one_of_two(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b"{}\n")
    unit = units_of([only(path)])[0]
    with pytest.raises(ConfigError, match="'skip': it is one of error, reject"):
        read_records(only(path), unit, policy="skip")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least 1"):
        units_of([only(path)], target_bytes=0)


def test_a_file_that_became_shorter_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines(*[GOOD] * 100))
    file = only(path)
    write(path, lines(*[GOOD] * 50))
    with pytest.raises(DataError, match="has become shorter"):
        [list(read_texts(file, unit, "text")) for unit in units_of([file], target_bytes=200)]


# --------------------------------------------------------------------------------- JSON documents


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_file_is_an_object_or_a_list(
    tmp_path: Path, suffix: str, bom: bytes, indent: int | None
) -> None:
    documents = [{"text": f"text {i}", "id": i, "deep": {"a": [1, "]"]}} for i in range(3000)]
    path = tmp_path / f"a.json{suffix}"
    write(path, compressed(bom + json.dumps(documents, indent=indent).encode(), suffix))
    found = records(path)
    assert found.documents == documents
    assert found.addresses == list(range(3000))
    assert texts(path).documents == [d["text"] for d in documents]
    assert read_at(only(path), 2999) == documents[2999]
    write(path, compressed(bom + json.dumps(documents[0], indent=indent).encode(), suffix))
    assert records(path).documents == documents[:1]
    assert read_at(only(path), 0) == documents[0]


@pytest.mark.parametrize("last", [True, False])
def test_a_json_file_may_really_be_lines_as_c4_is(tmp_path: Path, last: bool) -> None:
    data = lines({"text": "a"}, {"text": "b"}, last=last)
    path = write(tmp_path / "a.json.gz", compressed(data, ".gz"))
    assert texts(path).addresses == [0, 14]
    assert read_at(only(path), 14) == {"text": "b"}
    write(path, compressed(lines({"text": "x" * 2_000_000}, {"text": "b"}, last=last), ".gz"))
    assert texts(path).documents[1:] == ["b"]


def test_an_empty_list_has_no_documents_but_an_empty_file_is_no_json(tmp_path: Path) -> None:
    assert texts(write(tmp_path / "a.json", b" [ ] \n")) == Read()
    for data in (b"", b" \n", b"\xef\xbb\xbf"):
        path = write(tmp_path / "a.json", data)
        with pytest.raises(DataError, match="empty, where a JSON object or a list was expected"):
            texts(path)
        assert len(texts(path, policy="reject").rejects) == 1


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'[{"text": "a"}, {"text": "b', "the list does not end"),
        (b'[{"text": "a"}, {"text": "b"}', "the list does not end"),
        (b'[{"text": "a"},]', "not JSON"),
        (b'[{"text": "a"}, , ]', "not JSON"),
        (b'[{"text": "a"}] [{"text": "b"}]', "something follows the end of the list"),
    ],
)
def test_a_damaged_list_gives_what_is_whole_and_refuses_the_rest(
    tmp_path: Path, data: bytes, reason: str
) -> None:
    found = texts(write(tmp_path / "a.json", data), policy="reject")
    assert found.documents == ["a"]
    assert all(reason in reject.reason and reject.address >= 1 for reject in found.rejects)
    assert found.rejects


@given(st.lists(st.recursive(st.text() | st.integers(), st.lists, max_leaves=5)), st.data())
def test_splitting_a_list_finds_what_the_parser_finds(values: list[Any], data: Any) -> None:
    indent = data.draw(st.sampled_from([None, 1]))
    items, wrong, _ = split_list(json.dumps(values, indent=indent).encode())
    assert wrong is None
    assert [json.loads(item) for item in items] == values


@given(st.binary(max_size=60) | st.text('[]{}",\\a', max_size=60).map(str.encode))
def test_splitting_takes_any_bytes(data: bytes) -> None:
    split_list(b"[" + data)


# ------------------------------------------------------------------------------------------- units

WRITTEN = st.one_of(
    st.sampled_from([b"", b" ", b"\r", b"{", b"[1]", b"{}", b'{"text": "\xff"}']),
    st.text(max_size=30).map(lambda text: json.dumps({"text": text}).encode()),
    st.text(max_size=30).map(
        lambda text: json.dumps({"n": 1, "text": text}, ensure_ascii=False).encode(errors="replace")
    ),
)


def plainly(data: bytes) -> tuple[list[tuple[int, str]], list[int]]:
    """Addresses and texts, and addresses of rejects: the naive way."""
    good, bad, address = [], [], 0
    for line in data.split(b"\n"):
        stripped = line.removeprefix(b"\xef\xbb\xbf") if address == 0 else line
        if stripped.strip():
            try:
                good.append((address, json.loads(stripped.decode())["text"]))
            except (ValueError, KeyError, TypeError):
                bad.append(address)
        address += len(line) + 1
    return good, bad


@given(
    st.lists(WRITTEN, max_size=12),
    st.sampled_from([b"\n", b"\r\n"]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 80),
)
@example([b"", b""], b"\n", True, False, 1)
def test_units_of_any_size_give_every_document_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[bytes],
    newline: bytes,
    last: bool,
    bom: bool,
    target: int,
) -> None:
    data = b"\xef\xbb\xbf" * bom + lines(*documents, newline=newline, last=last)
    path = write(tmp_path_factory.getbasetemp() / "units.jsonl", data)
    good, bad = plainly(data)
    found = texts(path, policy="reject", target=target)
    assert list(zip(found.addresses, found.documents, strict=True)) == good
    assert [reject.address for reject in found.rejects] == bad
    for address, text in good:
        assert read_at(only(path), address)["text"] == text


@given(st.binary(max_size=200).map(lambda b: b.replace(b"x", b"\n")), st.integers(1, 9), st.data())
def test_blocks_are_the_lines_of_their_range_whatever_the_size_read(
    data: bytes, size: int, draw: Any
) -> None:
    starts = [0] + [i + 1 for i, byte in enumerate(data) if byte == 10]
    begin = draw.draw(st.sampled_from(starts))
    end = draw.draw(st.integers(0, len(data) + 3))
    found = list(blocks(io.BytesIO(data[begin:]), begin, end, block=size, line=1))
    pairs = [p for b in found for p in zip(b.addresses.tolist(), b.items, strict=True)]
    expected = [
        (start, data[start:].split(b"\n")[0])
        for start in starts
        if begin <= start < min(end, len(data))
    ]
    if begin == 0 and expected:
        expected[0] = (0, bytes(expected[0][1]).removeprefix(b"\xef\xbb\xbf"))
    assert pairs == expected
    numbers = [b.line + i for b in found for i in range(len(b.items)) if b.line]
    assert numbers == list(range(1, len(expected) + 1))
    assert all(b.utf8 for b in found if all(is_text(item) for item in b.items))


def is_text(raw: Any) -> bool:
    try:
        bytes(raw).decode()
    except UnicodeDecodeError:
        return False
    return True


def test_a_line_that_is_too_long_is_refused_unread_and_the_next_is_found() -> None:
    for block in (3, 7, 10):
        data = b"ab\n" + b"x" * 40 + b"\ncd\n" + b"y" * 11
        found = list(blocks(io.BytesIO(data), block=block, longest=10))
        got = [
            (int(a), bytes(i) if b.wrong is None else b.wrong, b.line)
            for b in found
            for a, i in zip(b.addresses, b.items, strict=True)
        ]
        wrong = "a line of more than 10 bytes"
        assert got == [(0, b"ab", 1), (3, wrong, 2), (44, b"cd", 3), (47, wrong, 4)]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_an_address_where_no_line_begins_is_out_of_bounds(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a.jsonl{suffix}", compressed(lines(GOOD, b"", GOOD), suffix))
    file = only(path)
    assert read_at(file, 18) == {"text": "good"}
    for address in (-1, 1, 19, 17, 35, 1000):
        with pytest.raises(OutOfBounds):
            read_at(file, address)
    with pytest.raises(OutOfBounds):
        read_at(only(write(tmp_path / "a.json", b"[{}]")), 1)


def test_batches_of_records_are_bounded(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines(*({"n": i} for i in range(20_000))))
    file = only(path)
    sizes = [len(b.records) for b in read_records(file, units_of([file])[0])]
    assert sum(sizes) == 20_000
    assert max(sizes) <= 1000


# ------------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_long_line_among_short_ones_takes_a_small_multiple_of_itself(
    tmp_path: Path, suffix: str
) -> None:
    long_line(tmp_path, suffix, 20 << 20)


@pytest.mark.long
def test_a_line_of_100_mb_takes_a_small_multiple_of_itself(tmp_path: Path) -> None:
    long_line(tmp_path, "", 100 << 20)


def long_line(folder: Path, suffix: str, size: int) -> None:
    short = lines(*({"text": f"{i}"} for i in range(50_000)))
    data = compressed(short + lines({"text": "x" * size}) + short, suffix)
    path = write(folder / f"a.jsonl{suffix}", data)
    del data
    file = only(path)
    tracemalloc.start()
    try:
        count = longest = 0
        for unit in units_of([file]):
            for batch in read_texts(file, unit, "text"):
                count += len(batch.texts)
                longest = max(longest, batch.texts.nbytes)
                del batch
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 100_001
    assert longest > size
    # The line in the block, by itself, as a string, and as the bytes that Arrow is given.
    assert peak < 4.2 * size


def test_decoding_at_once_and_one_by_one_agree() -> None:
    items = [b'{"a": 1}', b'{"b": [2]}']
    decode = record_decoder()
    at_once = decode_all(items, decode, utf8=True)
    one_by_one = decode_all(items, decode, utf8=False)
    assert at_once[1] == one_by_one[1] == [msgspec.json.decode(item) for item in items]
    assert (at_once[0], one_by_one[0]) == (None, [0, 1])
