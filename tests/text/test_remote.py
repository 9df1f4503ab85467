"""Files behind a server that fails, stalls and truncates are read as if they lay here."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text.reading import compressed, lines, numbered, only, parquet, records, texts, write
from tests.text.server import Server, serving

from penstock.errors import DataError, MissingData, MissingExtra
from penstock.text import remote
from penstock.text.documents import find_files, read_at
from penstock.text.remote import RemoteFile

TRANSIENT = ["429", "503", "500", "408", "close", "cut", "drop", "short", "none"]
MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Some files of many row groups or lines, of a size that takes several requests."""
    words = np.random.default_rng(0).integers(97, 123, (600, 3000), np.uint8)
    made = [bytes(row).decode() for row in words]
    columns = {"text": made, "id": numbered(600)}
    parquet(tmp_path / "a.parquet", columns, rows=200, compression="none", use_dictionary=False)
    data = lines(*({"text": text, "id": i} for i, text in enumerate(made)))
    for suffix in ("", ".gz", ".zst"):
        write(tmp_path / f"a.jsonl{suffix}", compressed(data, suffix))
    write(tmp_path / "bytes.json", bytes(range(256)) * 40)
    return tmp_path


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("PENSTOCK_REMOTE_WAIT", "0.001")
    with serving(folder) as made:
        yield made


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less is read ahead, so that a file takes more requests."""
    monkeypatch.setattr(remote, "AHEAD", 1 << 18)


# ----------------------------------------------------------------------- the same as from this disk


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_whatever_a_server_does_at_times_the_documents_are_those_of_the_file(
    server: Server, folder: Path, name: str, small: None
) -> None:
    expected = texts(folder / name, target=MIB)
    quiet = texts(server.url(name), target=MIB)
    assert quiet == expected
    needed = len(server.gets())
    for fault in TRANSIENT:
        server.requests.clear()
        server.faults.extend([fault, "", fault, fault, "", ""] * 10)
        assert texts(server.url(name), target=MIB) == expected
        answers = [request.answer for request in server.gets()]
        assert answers.count(fault) >= 3
        assert len(answers) <= 8 * needed
        server.faults.clear()


def test_records_and_single_documents_come_through_the_same_troubles(
    server: Server, folder: Path
) -> None:
    for name in ("a.parquet", "a.jsonl"):
        file, address = only(server.url(name)), texts(folder / name).addresses[77]
        server.faults.extend(["503", "cut", "drop", "", "close"])
        assert read_at(file, address) == read_at(only(folder / name), address)
        server.faults.extend(["drop", "", "429", "cut"])
        assert records(server.url(name)) == records(folder / name)
        server.faults.clear()


@pytest.mark.parametrize("fault", ["mute", "stall"])
def test_a_server_that_falls_silent_is_asked_again(
    server: Server, folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_REMOTE_TIMEOUT", "0.5")
    for name in ("a.parquet", "a.jsonl"):
        server.faults.extend(["", fault])
        assert texts(server.url(name)) == texts(folder / name)
    assert server.stalled == 2


def test_a_server_that_stays_silent_is_given_up(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_REMOTE_TIMEOUT", "0.2")
    monkeypatch.setenv("PENSTOCK_REMOTE_ATTEMPTS", "2")
    url = server.url("a.jsonl")
    file = only(url)
    server.always = "stall"
    with pytest.raises(DataError, match=rf"^{url}: reading at byte 0 failed 2 times, .*[Tt]ime"):
        read_at(file, 0)


# --------------------------------------------------------------------------------- what is said


@pytest.mark.parametrize(
    ("name", "place"), [("a.parquet", 0), ("a.jsonl", 1_500_000), ("a.jsonl.gz", 700_000)]
)
@pytest.mark.parametrize("fault", ["500", "429", "cut", "drop", "none"])
def test_a_failure_that_lasts_names_the_file_and_the_byte(
    server: Server, name: str, place: int, fault: str, small: None
) -> None:
    size = only(server.url(name)).size
    server.always, server.from_byte = fault, place
    if name == "a.parquet":  # its footer is at the end, which has to be given
        server.from_byte = size * 2
        server.faults.extend([""] * 5 + [fault] * 100)
    with pytest.raises(DataError) as raised:
        texts(server.url(name))
    said = str(raised.value)
    assert said.startswith(f"{server.url(name)}: reading at byte ")
    assert "failed 6 times, last with " in said
    assert said.endswith("Try again later; nothing read so far is lost.")
    failed = [request for request in server.gets() if request.answer == fault]
    assert len(failed) >= 6
    assert f"at byte {failed[-1].first:,} " in said
    assert len({request.first for request in failed[-6:]}) == 1


def test_after_a_failure_no_more_is_asked_for_than_is_needed(server: Server) -> None:
    with RemoteFile(server.url("a.jsonl"), only(server.url("a.jsonl")).size) as file:
        file.read(1000), file.read(1000)
        server.requests.clear()
        server.faults.append("503")
        file.read(3000)
    # Of the 3,000 bytes 1,000 had come with the second read's.
    asked = [(request.first, request.last) for request in server.gets()]
    assert asked == [(3000, 6999), (3000, 4999)]


def test_attempts_are_counted_from_the_last_byte_that_came(server: Server) -> None:
    """A server that breaks off each time, but gives half of what is asked, is never given up."""
    server.always = "short"
    size = only(server.url("bytes.json")).size
    with RemoteFile(server.url("bytes.json"), size) as file:
        assert file.read() == bytes(range(256)) * 40
    assert len(server.gets()) > 6


@pytest.mark.parametrize(
    ("status", "kind", "said"),
    [
        ("404", MissingData, "was there when files were listed, and is gone"),
        ("403", DataError, r"reading at byte 0 was refused \(.*403.*\)\. Log in"),
        ("400", DataError, r"reading at byte 0 failed \(.*400.*\)\. Check the address"),
    ],
)
def test_what_a_server_refuses_is_not_asked_for_again(
    server: Server, status: str, kind: type[Exception], said: str
) -> None:
    file = only(server.url("a.jsonl"))
    server.requests.clear()
    server.faults.append(status)
    with pytest.raises(kind, match=rf"^{server.url('a.jsonl')}.* ?{said}"):
        read_at(file, 0)
    assert len(server.gets()) == 1


def test_a_file_that_changed_is_not_read_on(server: Server, folder: Path) -> None:
    file = only(server.url("a.jsonl"))
    write(folder / "a.jsonl", b'{"text": "another"}\n')
    with pytest.raises(DataError, match=r"had 1,8.* bytes when files were listed, and has 20 now"):
        read_at(file, 0)


def test_a_server_that_knows_no_ranges_is_one_sentence(server: Server, folder: Path) -> None:
    server.whole = True
    with pytest.raises(DataError, match=r"a\.parquet: reading at byte .* range requests"):
        texts(server.url("a.parquet"))
    write(folder / "none.jsonl", b"")
    assert texts(server.url("none.jsonl")).documents == []


# ------------------------------------------------------------------------------------------ listing


def test_listing_is_tried_again_where_fsspec_would_say_not_found(server: Server) -> None:
    server.always = "503"
    with pytest.raises(DataError, match=r"a\.jsonl: listing failed 6 times, last with .*503"):
        find_files([server.url("a.jsonl")])
    server.always = ""
    server.faults.extend(["503", "close"])
    server.requests.clear()
    assert only(server.url("a.jsonl")).size > MIB
    with pytest.raises(MissingData, match="names no file"):
        find_files([server.url("none.jsonl")])
    server.always = "403"
    with pytest.raises(DataError, match=r"a\.jsonl: listing was refused \(.*403"):
        find_files([server.url("a.jsonl")])


def test_a_host_that_is_not_there_is_one_sentence(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_REMOTE_ATTEMPTS", "2")
    with pytest.raises(DataError, match=r"listing failed 2 times, last with ClientConnector"):
        find_files(["http://127.0.0.1:1/a.jsonl"])


def test_without_aiohttp_its_name_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(MissingExtra, match="aiohttp"):
        find_files(["https://host.invalid/a.jsonl"])


# ----------------------------------------------------------------------------------- as a file


def test_what_is_read_in_turn_is_asked_for_in_large_pieces(server: Server) -> None:
    for name in ("a.parquet", "a.jsonl"):
        size = only(server.url(name)).size
        server.requests.clear()
        texts(server.url(name))
        gets = server.gets()
        assert len(gets) < 10
        asked = sum(each.last - each.first + 1 for each in gets if each.first is not None)
        assert asked < 1.5 * size


def test_two_columns_read_in_turn_keep_what_was_read_ahead_of_each(server: Server) -> None:
    size = only(server.url("a.jsonl")).size
    server.requests.clear()
    with RemoteFile(server.url("a.jsonl"), size) as file:
        for i in range(80):
            for begin in (0, 1_000_000):
                file.seek(begin + i * 1000)
                file.read(1000)
    assert len(server.gets()) <= 2 * 8


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    write(folder / "bytes.json", np.random.default_rng(1).bytes(5000))
    with serving(folder) as made, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_REMOTE_WAIT", "0.0001")
        yield made


STEPS = st.one_of(
    st.tuples(st.just("read"), st.integers(0, 700)),
    st.tuples(st.just("seek"), st.integers(0, 5200)),
    st.tuples(st.just("back"), st.integers(-5000, 0)),
    st.tuples(st.just("on"), st.integers(0, 300)),
    st.tuples(st.just("into"), st.integers(0, 300)),
    st.tuples(st.just("fault"), st.integers(0, 8)),
)


@given(steps=st.lists(STEPS, max_size=30))
def test_any_reads_and_seeks_give_the_bytes_of_the_file(
    standing: Server, steps: list[tuple[str, int]]
) -> None:
    standing.faults.clear()
    data = (standing.folder / "bytes.json").read_bytes()
    here = io.BytesIO(data)
    with RemoteFile(standing.url("bytes.json"), len(data)) as there:

        def both(call: Any) -> None:
            assert call(there) == call(here)

        for step, number in steps:
            match step:
                case "read":
                    both(lambda file, n=number: file.read(n))
                case "seek":
                    both(lambda file, n=number: file.seek(n))
                case "back":
                    both(lambda file, n=number: file.seek(n, os.SEEK_END))
                case "on":
                    both(lambda file, n=number: file.seek(n, os.SEEK_CUR))
                case "into":
                    one, other = bytearray(number), bytearray(number)
                    assert there.readinto(one) == here.readinto(other)
                    assert one == other
                case "fault" if len(standing.faults) < 4:
                    standing.faults.append(TRANSIENT[number])
            both(lambda file: file.tell())
        both(lambda file: file.read())


def test_it_is_a_file_to_arrow_and_closed_for_good(server: Server, folder: Path) -> None:
    data = (folder / "bytes.json").read_bytes()
    file = RemoteFile(server.url("bytes.json"), len(data))
    with pa.PythonFile(file, "r") as source:
        assert source.size() == len(data)
        source.seek(-8, os.SEEK_END)
        assert source.read(100) == data[-8:]
        source.seek(5)
        assert source.read_buffer(7).to_pybytes() == data[5:12]
    assert file.closed
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.read(1)
    file = RemoteFile(server.url("bytes.json"), len(data))
    with file, pytest.raises(ValueError, match="beginning"):
        file.seek(-len(data) - 1, os.SEEK_END)
