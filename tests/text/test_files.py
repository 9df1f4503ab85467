"""Inputs become files: which ones, in which order, and what is known of them."""

from __future__ import annotations

import os
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from tests.text.reading import compressed, lines, numbered, only, parquet, records, texts, write

from penstock.errors import ConfigError, DataError, MissingData, MissingExtra
from penstock.text.documents import find_files, read_at


def touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b'{"text": "a"}\n')


def names(folder: Path, *inputs: object) -> list[str]:
    return [os.path.relpath(file.path, folder) for file in find_files(list(inputs))]


# ------------------------------------------------------------------------------------ what is found


def test_a_directory_is_all_below_it_sorted_but_for_what_is_hidden(tmp_path: Path) -> None:
    touch(tmp_path, "b.jsonl", "a/z.jsonl", "a/y.json", ".git/x.json", "a/.w.jsonl", "c.parquet")
    assert names(tmp_path, tmp_path) == ["a/y.json", "a/z.jsonl", "b.jsonl", "c.parquet"]


def test_a_hidden_directory_may_be_named(tmp_path: Path) -> None:
    touch(tmp_path, ".cache/a.jsonl")
    assert names(tmp_path, tmp_path / ".cache") == [".cache/a.jsonl"]


def test_a_glob_is_sorted_and_its_directories_are_gone_through(tmp_path: Path) -> None:
    touch(tmp_path, "x/2.jsonl", "x/1.jsonl", "x/deep/0.jsonl", "y/1.jsonl", "x/readme.txt")
    assert names(tmp_path, f"{tmp_path}/x/*.jsonl") == ["x/1.jsonl", "x/2.jsonl"]
    assert names(tmp_path, f"{tmp_path}/**/1.jsonl") == ["x/1.jsonl", "y/1.jsonl"]
    assert names(tmp_path, f"{tmp_path}/x/d*") == ["x/deep/0.jsonl"]


def test_a_name_with_brackets_is_itself_before_it_is_a_pattern(tmp_path: Path) -> None:
    touch(tmp_path, "a[1].jsonl", "a1.jsonl")
    assert names(tmp_path, tmp_path / "a[1].jsonl") == ["a[1].jsonl"]


def test_inputs_keep_their_order_and_a_file_counts_once(tmp_path: Path) -> None:
    touch(tmp_path, "a.jsonl", "b.jsonl")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    found = names(tmp_path, tmp_path / "b.jsonl", tmp_path, f"file://{tmp_path}/a.jsonl")
    assert found == ["b.jsonl", "a.jsonl"]


def test_linked_directories_are_read_and_loops_end(tmp_path: Path) -> None:
    touch(tmp_path, "real/a.jsonl")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/link").symlink_to(tmp_path / "real")
    (tmp_path / "data/loop").symlink_to(tmp_path / "data")
    assert names(tmp_path, tmp_path / "data") == ["data/link/a.jsonl"]


def test_what_says_it_is_no_data_is_passed_over_in_a_directory(tmp_path: Path) -> None:
    touch(tmp_path, "a.jsonl", "_SUCCESS", "README.md", "LICENSE", "_old.jsonl")
    assert names(tmp_path, tmp_path) == ["_old.jsonl", "a.jsonl"]


@pytest.mark.parametrize(
    ("name", "kind", "compression"),
    [
        ("a.parquet", "parquet", None),
        ("A.JSONL", "jsonl", None),
        ("a.b.ndjson", "jsonl", None),
        ("a.json", "json", None),
        ("a.jsonl.gz", "jsonl", "gzip"),
        ("a.jsonl.zst", "jsonl", "zstd"),
        ("a.json.zstd", "json", "zstd"),
    ],
)
def test_a_name_tells_kind_and_compression(
    tmp_path: Path, name: str, kind: str, compression: str | None
) -> None:
    touch(tmp_path, name)
    file = only(tmp_path)
    assert (file.kind, file.compression, file.size) == (kind, compression, 14)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl.bz2", "a.parquet.gz", "a.gz", "a"])
def test_an_unknown_suffix_is_refused_naming_those_known(tmp_path: Path, name: str) -> None:
    touch(tmp_path, "x.jsonl", name)
    for given in (tmp_path, tmp_path / name):
        with pytest.raises(ConfigError, match=rf"{name} does not say .* \.parquet, \.jsonl"):
            find_files([given])


def test_nothing_found_is_missing_data(tmp_path: Path) -> None:
    for given in ([], [tmp_path], [f"{tmp_path}/*.jsonl"], [tmp_path / "a.jsonl"]):
        with pytest.raises(MissingData):
            find_files(given)


def test_a_file_that_went_away_is_missing_data(tmp_path: Path) -> None:
    touch(tmp_path, "a.jsonl")
    file = only(tmp_path)
    Path(file.path).unlink()
    with pytest.raises(MissingData, match="was there when files were listed"):
        read_at(file, 0)


def test_the_stamp_changes_with_the_file(tmp_path: Path) -> None:
    touch(tmp_path, "a.jsonl")
    before = only(tmp_path)
    assert only(tmp_path) == before
    os.utime(before.path, ns=(1, 1))
    assert only(tmp_path).stamp != before.stamp


# ------------------------------------------------------------------------------------------ fsspec


@pytest.fixture
def bucket() -> Iterator[str]:
    """A place of its own in fsspec's memory."""
    url = f"memory://{uuid.uuid4().hex}"
    yield url
    fsspec.filesystem("memory").rm(url.removeprefix("memory://"), recursive=True)


def put(url: str, data: bytes) -> None:
    with fsspec.open(url, "wb") as out:
        out.write(data)


def test_urls_name_files_directories_and_globs(bucket: str) -> None:
    for name in ("b.jsonl", "a/c.jsonl", "a/.hidden.jsonl", "README.md"):
        put(f"{bucket}/{name}", lines({"text": name}))
    all_of = [file.path for file in find_files([bucket])]
    assert [path.rpartition("/")[2] for path in all_of] == ["c.jsonl", "b.jsonl"]
    assert [file.path for file in find_files([f"{bucket}/**/*.jsonl"])] == all_of
    assert texts(f"{bucket}/b.jsonl").documents == ["b.jsonl"]
    with pytest.raises(MissingData, match="names no file"):
        find_files([f"{bucket}/none.jsonl"])


def test_a_remote_file_gives_what_a_local_one_gives(tmp_path: Path, bucket: str) -> None:
    data = lines(*({"text": f"text {i}", "id": i} for i in range(500)))
    for suffix in ("", ".gz", ".zst"):
        local = write(tmp_path / f"a.jsonl{suffix}", compressed(data, suffix))
        put(f"{bucket}/a.jsonl{suffix}", local.read_bytes())
        for url in (f"{bucket}/a.jsonl{suffix}", f"file://{local}"):
            assert texts(url, target=999) == texts(local, target=999)
            assert records(url, target=77) == records(local)
            assert read_at(only(url), texts(url).addresses[7]) == {"text": "text 7", "id": 7}


def test_remote_parquet_gives_what_a_local_one_gives(tmp_path: Path, bucket: str) -> None:
    made = {"text": numbered(500), "id": numbered(500), "n": [[i] for i in range(500)]}
    local = parquet(tmp_path / "a.parquet", made, rows=60)
    put(f"{bucket}/a.parquet", local.read_bytes())
    for url in (f"{bucket}/a.parquet", f"file://{local}"):
        assert texts(url, target=999) == texts(local)
        assert records(url, target=77) == records(local)
        assert read_at(only(url), 77)["n"] == [77]


def test_a_remote_stamp_changes_with_the_content(bucket: str) -> None:
    put(f"{bucket}/a.jsonl", b"{}\n")
    before = only(f"{bucket}/a.jsonl")
    assert only(f"{bucket}/a.jsonl") == before
    put(f"{bucket}/a.jsonl", b"{} \n")
    assert only(f"{bucket}/a.jsonl").stamp != before.stamp


def test_chained_urls_are_opened_and_their_globs_spelled_out(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("in/a.jsonl", '{"text": "zipped"}\n')
        archive.writestr("in/b.jsonl", '{"text": "too"}\n')
    found = find_files([f"zip://in/*.jsonl::file://{tmp_path}/x.zip"])
    assert [file.path.partition("::")[0] for file in found] == [
        "zip://in/a.jsonl",
        "zip://in/b.jsonl",
    ]
    assert read_at(found[1], 0) == {"text": "too"}


def test_an_unknown_protocol_is_refused_and_a_missing_one_named() -> None:
    with pytest.raises(ConfigError, match="nope"):
        find_files(["nope://bucket/a.jsonl"])
    with pytest.raises(MissingExtra, match=r"Install .*pip install"):
        find_files(["wandb://bucket/a.jsonl"])


# ------------------------------------------------------------------------------------- compression


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("kind", [".jsonl", ".json"])
def test_a_damaged_compressed_file_is_named(tmp_path: Path, suffix: str, kind: str) -> None:
    whole = compressed(lines(*({"text": f"{i * i}"} for i in range(2000))), suffix)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    for damaged in (whole[:-1], whole[: len(whole) // 2], b"", whole + b"junk", b"{}\n", flipped):
        path = write(tmp_path / f"a{kind}{suffix}", bytes(damaged))
        for policy in ("error", "reject"):
            with pytest.raises(DataError, match=rf"a{kind}{suffix} is (cut short|empty)"):
                texts(path, policy=policy)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_compressed_in_parts_is_read_to_its_end(tmp_path: Path, suffix: str) -> None:
    parts = [lines({"text": "a"}), b"", lines({"text": "b"}, last=False)]
    path = write(tmp_path / f"a.jsonl{suffix}", b"".join(compressed(p, suffix) for p in parts))
    assert texts(path).documents == ["a", "b"]
