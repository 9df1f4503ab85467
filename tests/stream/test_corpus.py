"""Corpora: units tile them, footers are read once, and whatever a file holds is no surprise."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.stream.support import (
    PACKINGS,
    documents,
    encoded,
    lines,
    make,
    rows_of,
    taken,
    texts_of,
    write_lines,
    write_list,
    write_parquet,
)

from penstock.errors import DataError, MissingData, StateMismatch
from penstock.stream import corpus as corpus_module
from penstock.stream import reading
from penstock.stream.corpus import cut, open_corpus
from penstock.stream.reading import Docs, Reader
from penstock.text.batches import Unit

# --- units


@given(
    groups=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 400)), max_size=12),  # rows, bytes
    target=st.integers(1, 500),
    limits=st.tuples(*[st.integers(1, 600)] * 3),
    pieces=st.integers(1, 9),
)
def test_units_tile_the_rows(
    groups: list[tuple[int, int]], target: int, limits: tuple[int, int, int], pieces: int
) -> None:
    rows = [count for count, _ in groups]
    sizes = [size for _, size in groups]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(("JOINED", "LARGEST", "KEPT"), limits, strict=True):
            patch.setattr(corpus_module, name, value)
        patch.setattr(corpus_module, "PIECES", pieces)
        units = list(cut(rows, sizes, target))
    seen = []
    for begin, end, first, last in units:
        assert 0 <= begin < end <= len(rows)
        count = sum(rows[begin:end])
        assert first < (count if last < 0 else last) <= count, "no unit without a row"
        assert end - begin == 1 or (first, last) == (0, -1), "slices are of one row group"
        base = sum(rows[:begin])
        seen += range(base + first, base + (count if last < 0 else last))
    assert seen == list(range(sum(rows)))


@given(size=st.integers(0, 5000), target=st.integers(1, 700))
def test_units_of_lines_tile_the_bytes(size: int, target: int) -> None:
    for name, whole in (("a.jsonl", False), ("a.jsonl.gz", True), ("a.json", True)):
        kind = "json" if name.endswith("json") else "jsonl"
        compression = "gzip" if name.endswith("gz") else None
        file = corpus_module.InputFile(
            path=name,
            kind=kind,  # type: ignore[arg-type]
            compression=compression,  # type: ignore[arg-type]
            size=size,
            stamp="",
        )
        footer = corpus_module.Footer((), (), "")
        units = list(corpus_module.units_of(file, footer, 5, target))
        assert all(unit.file == 5 and unit.begin < unit.end for unit in units)
        ends = [0, *(unit.end for unit in units)]
        assert [unit.begin for unit in units] == ends[:-1]
        assert ends[-1] == size
        assert len(units) <= 1 or not whole


def test_there_are_eight_units_a_lane_where_documents_suffice(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", documents(2000), group=2000)
    for lanes in (1, 6, 60):
        assert len(open_corpus(path, "text", lanes=lanes).units) >= 8 * lanes
    small = write_parquet(tmp_path / "b.parquet", documents(2000), group=10)
    units = open_corpus(small, "text", lanes=1).units
    assert 8 <= len(units) <= 40, "small row groups are joined"


# --- files and rows of all sorts


def read_all(paths: Any, **options: Any) -> list[str]:
    """The texts of a stream, which comes to all of them in its first epoch."""
    with make(paths, lanes=1, shuffle=False, **options) as stream:
        expected = [text for unit in texts_of(stream) for text in unit]
        ids = [each for each in encoded(expected) if each]
        run = [token for each in ids for token in each]
        with make(paths, "concat", lanes=1, shuffle=False, **options) as joined:
            count = len(run) // 16
            found = [
                token for _ in range(count) for token in joined.share.draw(1, "u2")[0][0].tolist()
            ]
        assert found == run[: count * 16]
    return expected


def test_one_document_and_one_longer_than_many_rows(tmp_path: Path) -> None:
    for number, texts in enumerate([["one"], [" ".join(documents(20, empty=0))], [*"abcde"]]):
        path = write_parquet(tmp_path / f"{number}.parquet", texts)
        for packing in PACKINGS:
            lanes = 240 if number == 2 and packing == "chunked" else 12
            with make(path, packing, lanes=lanes, buffer_size=2) as stream:
                assert len(stream.corpus.units) == len(texts)
                rows = taken(stream, lanes + 10)
            with make(path, packing, lanes=lanes, buffer_size=2, rank=1, world=2) as other:
                assert taken(other, 10) == rows[1:20:2]


def test_empty_documents_files_and_row_groups_are_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    write_parquet(folder / "a.parquet", [])
    write_parquet(folder / "b.parquet", ["", "", "one", "", ""], group=2)
    schema = pa.schema([("text", pa.string())])
    with pq.ParquetWriter(folder / "c.parquet", schema) as writer:
        for texts in ([], ["two"], [], [], ["", "three"], []):
            writer.write_table(pa.table({"text": pa.array(texts, pa.string())}))
    write_lines(folder / "d.jsonl", [])
    write_lines(folder / "e.jsonl", ["", "four"])
    (folder / "f.jsonl").write_bytes(b"\n\n  \n\n")
    write_lines(folder / "g.jsonl.gz", [])
    write_list(folder / "h.json", [])
    (folder / "i.json").write_bytes(b"")
    (folder / "j.jsonl").write_bytes(b"\n\n" + lines(["five"]) + b"\n\n")
    write_list(folder / "k.json", ["", "six"])
    words = {"one", "two", "three", "four", "five", "six"}
    assert set(read_all(folder)) == words | {""}
    for packing in PACKINGS:
        for lanes in (1, 12):
            for shuffle in (True, False):
                with make(folder, packing, lanes=lanes, shuffle=shuffle) as stream:
                    taken(stream, 30)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_without_any_token_each_rank_says_so_at_once(
    tmp_path: Path, packing: str, shuffle: bool
) -> None:
    write_parquet(tmp_path / "a.parquet", [""] * 20, group=3)
    write_lines(tmp_path / "b.jsonl", [""] * 5)
    (tmp_path / "c.jsonl").write_bytes(b"\n\n\n")
    for rank in range(3):
        for threads in (1, 4):
            with make(
                tmp_path, packing, rank=rank, world=3, threads=threads, shuffle=shuffle
            ) as stream:
                for _ in range(2):
                    with pytest.raises(MissingData, match="corpus of 3 files holds no document"):
                        stream.next_batch()


def test_a_corpus_of_empty_files_says_so(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", [])
    with pytest.raises(MissingData, match=r"a\.parquet holds no document"):
        make(tmp_path / "a.parquet")
    write_lines(tmp_path / "b.jsonl", [])
    with pytest.raises(MissingData, match="corpus of 2 files holds no document"):
        make(tmp_path)
    with pytest.raises(MissingData, match="does not exist"):
        make(tmp_path / "none")


def test_hostile_texts_come_through(tmp_path: Path) -> None:
    eos = "<|endoftext|>"
    texts = [eos, f"a{eos}b{eos}", "\x00", "a\x00b", "x" * 2000, " " * 500, "\ufffe\u2028", "é"]
    for path in (
        write_parquet(tmp_path / "a.parquet", texts, group=3),
        write_lines(tmp_path / "b.jsonl", texts),
        write_list(tmp_path / "c.json", texts),
    ):
        assert read_all(path) == texts
        for packing in PACKINGS:
            with make(path, packing, lanes=2) as stream:
                taken(stream, 50)
    large = write_lines(tmp_path / "large/a.jsonl", ["x" * 1_000_000, "one"])
    assert len(read_all(large)) == 2


def test_urls_read_as_paths_do(tmp_path: Path) -> None:
    import fsspec

    path = write_parquet(tmp_path / "a.parquet", documents(40))
    text = write_lines(tmp_path / "b.jsonl", documents(20, seed=1))
    memory = fsspec.filesystem("memory")
    for each in (path, text):
        memory.pipe(f"/streams/{each.name}", each.read_bytes())
    for packing in PACKINGS:
        rows = []
        for paths in (tmp_path, f"file://{tmp_path}", "memory://streams"):
            with make(paths, packing, threads=2) as stream:
                state = stream.state_dict()
                rows.append((taken(stream, 80), state["identity"]))
        assert rows[0] == rows[1] == rows[2]
    memory.rm("/streams", recursive=True)


# --- large row groups


@pytest.mark.parametrize(("kept", "chunk"), [(1 << 20, 500), (1000, 500), (1000, 1 << 20)])
def test_slices_of_giant_row_groups_are_what_a_naive_reading_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int, chunk: int
) -> None:
    for module, name, value in [
        (corpus_module, "LARGEST", 700),
        (corpus_module, "KEPT", kept),
        (reading, "KEPT", kept),
        (corpus_module, "PIECES", 3),
        (reading, "CHUNK", chunk),
        (corpus_module, "JOINED", 400),
    ]:
        monkeypatch.setattr(module, name, value)
    texts = documents(300, seed=3)
    path = write_parquet(tmp_path / "a.parquet", texts, group=130)
    corpus = open_corpus(path, "text", lanes=1)
    reader = Reader(corpus, "text", "error")
    for how in ("chunks", "batches"):
        found, most = [], 0
        for unit in corpus.units:
            parts = list(reader.chunks(unit) if how == "chunks" else reader.batches(unit, 7))
            assert parts
            begin = 0
            for part in parts:
                assert part.first == begin
                begin += len(part)
                assert part.texts.to_pylist() == [texts[row] for row in part.addresses.tolist()]
            check_cuts(parts, chunk if how == "chunks" else None)
            most = max(most, len(parts))
            found += [row for part in parts for row in part.addresses.tolist()]
        assert found == list(range(300))
        assert most > 1 or (how == "chunks" and chunk > 1000)
    assert len(corpus.units) > 6
    for packing in PACKINGS:
        with make(path, packing, lanes=4, threads=3) as stream:
            rows = taken(stream, 100)
            state = stream.state_dict()
            more = taken(stream, 100)
        with make(path, packing, lanes=4) as again:
            assert taken(again, 60) == rows[:60]
            again.load_state_dict(state)
            assert taken(again, 100) == more


def check_cuts(parts: list[Docs], chunk: int | None) -> None:
    """Chunks close at the first document that fills them; batches are whole."""
    for part in parts[:-1]:
        if chunk is None:
            assert len(part) == 7
            continue
        sizes = [len(text.encode()) for text in part.texts.to_pylist()]
        assert sum(sizes) >= chunk > sum(sizes[:-1])


def test_what_a_footer_understates_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One text repeated is stored once: the footer tells a thousandth of what comes out."""
    monkeypatch.setattr(reading, "KEPT", 100_000)
    texts = ["word " * 800] * 990 + documents(10, empty=0)
    path = write_parquet(tmp_path / "a.parquet", texts, group=1000)
    corpus = open_corpus(path, "text", lanes=2)
    assert corpus.bytes < 50_000
    assert len(corpus.units) > 2
    reader = Reader(corpus, "text", "error")
    found = [text for unit in corpus.units for docs in reader.chunks(unit) for text in docs.texts]
    assert [str(text) for text in found] == texts
    assert sum(size for size, _ in reader._kept._found.values()) == 0


def test_a_row_group_that_is_held_is_decoded_once_for_all_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet(tmp_path / "a.parquet", documents(400), group=400)
    reads: list[Unit] = []
    real = reading.read_texts
    lock = threading.Lock()

    def counted(file: Any, unit: Unit, *args: Any, **options: Any) -> Any:
        with lock:
            reads.append(unit)
        return real(file, unit, *args, **options)

    monkeypatch.setattr(reading, "read_texts", counted)
    with make(path, lanes=12, threads=4) as stream:
        taken(stream, 400)
        assert len(stream.corpus.units) > 90
    assert reads == [Unit(file=0, begin=0, end=1)]


# --- footers


def count_footers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    real = corpus_module.footer_of

    def counted(file: Any, field: str) -> Any:
        found.append(file.path)
        return real(file, field)

    monkeypatch.setattr(corpus_module, "footer_of", counted)
    return found


def test_footers_are_read_once_and_damaged_caches_are_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    for name in "abc":
        write_parquet(tmp_path / f"data/{name}.parquet", documents(10, seed=ord(name)))
    reads = count_footers(monkeypatch)
    first = open_corpus(tmp_path / "data", "text", lanes=2)
    assert len(reads) == 3
    assert open_corpus(tmp_path / "data", "text", lanes=2) == first
    assert open_corpus(tmp_path / "data", "text", lanes=7).fingerprint == first.fingerprint
    assert len(reads) == 3
    (kept,) = (tmp_path / "cache/streams").iterdir()
    raw = kept.read_bytes()
    for number, damaged in enumerate([b"", raw[:-9], b"[]", b"{}", b"[[1]]", b"\xff", b"null"], 2):
        kept.write_bytes(damaged)
        assert open_corpus(tmp_path / "data", "text", lanes=2) == first
        assert len(reads) == 3 * number
        assert kept.read_bytes() == raw
    kept.unlink()
    kept.mkdir()  # nothing can be read or written there
    assert open_corpus(tmp_path / "data", "text", lanes=2) == first


def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "file"))
    path = write_parquet(tmp_path / "a.parquet", documents(10))
    assert open_corpus(path, "text", lanes=2).documents == 10


def test_documents_are_known_of_parquet_alone(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", documents(10))
    assert open_corpus(tmp_path, "text", lanes=2).documents == 10
    write_lines(tmp_path / "b.jsonl", documents(10))
    both = open_corpus(tmp_path, "text", lanes=2)
    assert both.documents is None
    assert both.bytes > (tmp_path / "b.jsonl").stat().st_size


# --- files that change


def test_a_state_of_other_data_names_data(tmp_path: Path) -> None:
    for name, writer in (("a.parquet", write_parquet), ("b.jsonl", write_lines)):
        path = writer(tmp_path / name, documents(30, seed=1))  # type: ignore[operator]
        with make(path) as stream:
            taken(stream, 10)
            state = stream.state_dict()
        changed = documents(30, seed=1)
        changed[12] = changed[12][::-1]
        writer(path, changed)  # type: ignore[operator]
        with make(path) as stream, pytest.raises(StateMismatch, match="another run: data was"):
            stream.load_state_dict(state)
        moved = writer(tmp_path / "elsewhere" / name, documents(30, seed=1))  # type: ignore[operator]
        with make(moved) as stream:
            stream.load_state_dict(state)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_file_that_changes_under_way_is_an_error(tmp_path: Path, packing: str) -> None:
    for name, writer in (("a.parquet", write_parquet), ("b.jsonl", write_lines)):
        for change in ("truncate", "replace", "remove", "touch", "append"):
            path = writer(tmp_path / name, documents(30, seed=1))  # type: ignore[operator]
            with make(path, packing) as stream:
                taken(stream, 5)
                state = stream.state_dict()
                if change == "truncate":
                    os.truncate(path, path.stat().st_size // 2)
                elif change == "replace":
                    writer(path, documents(31, seed=2))  # type: ignore[operator]
                elif change == "remove":
                    path.unlink()
                elif change == "append":
                    path.write_bytes(path.read_bytes() + lines(["more"]))
                else:
                    os.utime(path, (1, 1))
                    taken(stream, 100)
                    continue
                with pytest.raises((DataError, MissingData), match=name) as caught:
                    taken(stream, 100)
                assert "\n" not in str(caught.value)
                at = stream.state_dict()
            writer(path, documents(30, seed=1))  # type: ignore[operator]
            with make(path, packing) as whole, make(path, packing) as again:
                whole.load_state_dict(state)
                taken(whole, at["row"] - state["row"])
                again.load_state_dict(at)
                assert taken(again, 20) == taken(whole, 20)


# --- documents that cannot be read


BAD = {
    "null.parquet": (2, r"row [24]: 'text' is null"),
    "utf8.parquet": (2, r"row [24]: .*UTF-8"),
    "column.parquet": (5, r"row \d: no column 'text'; its columns: 'body'"),
    "bad.jsonl": (2, r"line [34] \(byte \d+\): not JSON"),
    "field.jsonl": (1, r"line 2 \(byte \d+\): no field 'text'"),
    "utf8.jsonl": (1, r"line 2 .*UTF-8"),
    "bad.json": (1, r"document 1"),
}


def write_bad(folder: Path) -> None:
    folder.mkdir()
    write_parquet(folder / "null.parquet", ["a0", "a1", None, "a3", None], group=10)
    raw = pa.array([b"b0", b"b1", b"\xff\xfe", b"b3", b"\xff"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": raw}), folder / "utf8.parquet")
    pq.write_table(pa.table({"body": ["c"] * 5}), folder / "column.parquet")
    (folder / "bad.jsonl").write_bytes(lines(["d0", "d1"]) + b'{"text": \nx\n' + lines(["d4"]))
    (folder / "field.jsonl").write_bytes(lines(["e0"]) + b'{"body": "e1"}\n' + lines(["e2"]))
    (folder / "utf8.jsonl").write_bytes(lines(["f0"]) + b'{"text": "\xff"}\n' + lines(["f2"]))
    (folder / "bad.json").write_text('[{"text": "g0"}, {"text": 7}, {"text": "g2"}]')


def test_a_document_that_cannot_be_read_is_an_error_that_names_its_place(tmp_path: Path) -> None:
    write_bad(tmp_path / "bad")
    for name, (_, place) in BAD.items():
        for packing in PACKINGS:
            with make(tmp_path / "bad" / name, packing, threads=2) as stream:
                for _ in range(2):  # asked again, it says so again
                    with pytest.raises(DataError, match=f"{name}, {place}") as caught:
                        taken(stream, 50)
                    assert "\n" not in str(caught.value)


def test_rejected_documents_are_counted_and_the_others_are_exact(tmp_path: Path) -> None:
    write_bad(tmp_path / "bad")
    write_parquet(tmp_path / "good/a.parquet", documents(20, empty=0))
    paths = [tmp_path / "good", tmp_path / "bad"]
    expected = {str(tmp_path / "bad" / name): count for name, (count, _) in BAD.items()}
    for packing in PACKINGS:
        with make(paths, packing, policy="reject", lanes=3) as stream:
            rows = taken(stream, 120)
            state = stream.state_dict()
            more = taken(stream, 60)
            assert stream.stats()["rejected"] == dict(sorted(expected.items()))
        with make(paths, packing, policy="reject", lanes=3, batch_size=5) as again:
            for at in range(0, 120, 5):
                assert rows_of(again.next_batch()) == rows[at : at + 5]
            again.load_state_dict(state)
            assert rows_of(again.next_batch()) == more[:5]
    assert set(read_all(paths, policy="reject")) > {"a0", "b3", "d4", "e2", "f2", "g2"}


def test_a_corpus_of_rejects_alone_says_that_nothing_is_there(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n' * 30)
    stream = make(tmp_path, policy="reject", lanes=3, threads=3)
    with stream, pytest.raises(MissingData, match="holds no document with a token"):
        stream.next_batch()


def test_another_field_is_another_stream(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": "no", "body": text}) + "\n" for text in documents(9))
    )
    with make(tmp_path, text_field="body") as stream:
        assert [t for unit in texts_of(stream) for t in unit] == documents(9)
        state = stream.state_dict()
    with make(tmp_path) as stream, pytest.raises(StateMismatch, match="text_field was 'body'"):
        stream.load_state_dict(state)


def test_fingerprints_differ_where_the_middle_of_small_files_does(tmp_path: Path) -> None:
    found = set()
    for number in range(5):
        texts = ["same", f"differs {number}", "same"]
        path = write_lines(tmp_path / f"{number}" / "a.jsonl", texts)
        found.add(open_corpus(path, "text", lanes=1).fingerprint)
    assert len(found) == 5
