"""Files by hf:// names, from a Hub of our own on loopback, through the real one's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import fsspec.config
import pytest
from tests.text.reading import numbered, only, parquet, texts
from tests.text.server import Handler, Server, serving

from penstock.errors import DataError, MissingData
from penstock.text.documents import find_files, read_at

NAME = "hf://datasets/user/set/data/a.parquet"


class Hub(Handler):
    """As much of the Hub as its file system asks for: a dataset, its tree, its files."""

    def answer(self, fault: str) -> None:
        path, _, query = self.path.partition("?")
        if not path.startswith("/api/"):
            self.path = path.partition("/resolve/main")[2]
            super().answer(fault)
            return
        _, tree, below = path.partition("/tree/main")
        found: object = {"id": "user/set", "sha": "f" * 40, "siblings": []}
        if below or (tree and "recursive=true" in query.lower()):
            size = (self.server.folder / "data/a.parquet").stat().st_size
            found = [{"type": "file", "path": "data/a.parquet", "oid": "0" * 40, "size": size}]
        elif tree:
            found = [{"type": "directory", "path": "data", "oid": "1" * 40, "size": 0}]
        self.give_json(json.dumps(found).encode())

    def give_json(self, raw: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("PENSTOCK_REMOTE_WAIT", "0.001")
    (tmp_path / "data").mkdir()
    columns = {"text": numbered(50_000), "id": numbered(50_000)}
    parquet(tmp_path / "data/a.parquet", columns, rows=10_000)
    with serving(tmp_path, Hub) as server:
        settings = {"endpoint": server.url("").rstrip("/"), "token": False}
        monkeypatch.setitem(fsspec.config.conf, "hf", settings)
        yield server


def test_a_dataset_of_the_hub_is_read_as_a_local_one(hub: Server) -> None:
    expected = texts(hub.folder / "data/a.parquet")
    for name in (NAME, "hf://datasets/user/set", "hf://datasets/user/set/data/*.parquet"):
        assert [file.path for file in find_files([name])] == [NAME]
    hub.faults.extend(["short", "", "none", "short"])
    assert texts(NAME) == expected
    assert len(hub.requests) < 14


def test_what_the_hub_refuses_or_has_no_more_is_one_sentence(hub: Server) -> None:
    file = only(NAME)
    hub.always = "403"
    with pytest.raises(DataError, match=rf"^{NAME}: reading at byte [\d,]+ was refused .*403"):
        read_at(file, 0)
    hub.always = "404"
    with pytest.raises(MissingData, match="is gone"):
        read_at(file, 0)


@pytest.mark.long  # the Hub's client waits half a minute
def test_a_hub_that_is_down_is_given_up_naming_file_and_byte(hub: Server) -> None:
    file = only(NAME)
    hub.always = "500"
    with pytest.raises(DataError, match=rf"^{NAME}: reading at byte [\d,]+ failed 2 times"):
        read_at(file, 0)
    assert len(hub.gets()) <= 16
