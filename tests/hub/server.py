"""A Hub on loopback: what `datasets` and `huggingface_hub` ask of it to find and read files.

    with Hub({"acme/tales": folder}) as hub:
        os.environ["HF_ENDPOINT"] = hub.url

Each dataset has one commit at a time, named by its folder's content; older ones stay readable,
until they are deleted from `commits`.
"""

from __future__ import annotations

import json
import threading
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class Hub:
    """Serves folders as datasets; `asked` lists the requests so far."""

    def __init__(self, datasets: dict[str, Path]) -> None:
        self.asked: list[str] = []
        self.faults: list[str] = []  # of the next reads of files: a status, or "cut"
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}
        self.main: dict[str, str] = {}
        for name, folder in datasets.items():
            self.push(name, folder)

        class Handler(_Handler):
            hub = self

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def push(self, name: str, folder: Path) -> str:
        """Make what a folder holds the newest commit of a dataset."""
        files = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*"))}
        content = {path: p.read_bytes() for path, p in files.items() if p.is_file()}
        digest = sha1(repr(sorted(content.items())).encode()).hexdigest()
        self.commits.setdefault(name, {})[digest] = content
        self.main[name] = digest
        return digest

    def __enter__(self) -> Hub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

    def _answer(self, body: bytes = b"") -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.asked.append(f"{self.command} {path}")
        parts = path.removeprefix("api/").split("/")
        name = "/".join(parts[1:3])
        if parts[0] != "datasets" or name not in self.hub.commits:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        revision = parts[4] if len(parts) > 4 else "main"
        commit = self.hub.main[name] if revision == "main" else revision
        if commit not in self.hub.commits[name]:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        files, rest = self.hub.commits[name][commit], "/".join(parts[5:])
        if parts[3:4] == ["resolve"]:
            return self._file(files.get(rest), commit)
        if parts[3:4] == ["tree"]:
            return self._json(_listed(files, rest, deep="recursive" in self.path))
        if parts[3:4] == ["paths-info"]:
            asked = json.loads(body) if body.startswith(b"{") else parse_qs(body.decode())
            found = [entry for p in asked["paths"] for entry in _info(files, p.strip("/"))]
            return self._json(found)
        return self._json({"id": name, "sha": commit, "private": False, "tags": [], "siblings": []})

    def _file(self, content: bytes | None, commit: str) -> None:
        commit_header = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if content is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"} | commit_header)
        headers = {"ETag": f'"{sha1(content).hexdigest()}"'} | commit_header
        wanted = self.headers.get("Range")
        if wanted is None:
            return self._send(200, content, headers)
        fault = self.hub.faults.pop(0) if self.hub.faults and self.command == "GET" else ""
        if fault.isdecimal():
            return self._send(int(fault), b"", {"Retry-After": "0"})
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        end = min(int(last or len(content)), len(content) - 1)
        headers["Content-Range"] = f"bytes {first}-{end}/{len(content)}"
        part = content[int(first) : end + 1]
        return self._send(206, part, headers, given=len(part) // 2 if fault else None)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(
        self, status: int, content: bytes, headers: dict[str, str], *, given: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:given])
        self.close_connection = given is not None


def _info(files: dict[str, bytes], path: str) -> list[dict[str, Any]]:
    if path in files:
        oid = sha1(files[path]).hexdigest()
        return [{"type": "file", "path": path, "size": len(files[path]), "oid": oid}]
    if any(name.startswith(f"{path}/") for name in files):
        return [{"type": "directory", "path": path, "oid": sha1(path.encode()).hexdigest()}]
    return []


def _listed(files: dict[str, bytes], folder: str, *, deep: bool) -> list[dict[str, Any]]:
    prefix = f"{folder}/" if folder else ""
    below = [name for name in files if name.startswith(prefix)]
    folders = {
        prefix + "/".join(name.removeprefix(prefix).split("/")[:depth])
        for name in below
        for depth in range(1, name.removeprefix(prefix).count("/") + 1)
    }
    names = sorted({*below, *folders})
    if not deep:
        names = [name for name in names if "/" not in name.removeprefix(prefix)]
    return [entry for name in names for entry in _info(files, name)]
