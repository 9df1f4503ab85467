"""An HTTP server on loopback that gives a folder's files, and fails, stalls and truncates if told.

with serving(folder) as server:
    server.faults += ["503", "cut"]     # what becomes of the next two reads of a file's bytes
    read(server.url("a.parquet"))
    server.requests                     # [Request("HEAD", "/a.parquet", None, None, "ok"), ...]
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple


class Request(NamedTuple):
    """What was asked for, and how it was answered."""

    method: str
    path: str
    first: int | None  # byte of the range that was asked for
    last: int | None
    answer: str


class Server(ThreadingHTTPServer):
    """What the answering threads share."""

    daemon_threads = True

    def __init__(self, folder: Path, handler: type[Handler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.folder = folder
        self.requests: list[Request] = []
        self.faults: deque[str] = deque()  # of the next GETs, in order; "" is none
        self.always = ""  # of all HEADs and GETs to come; or, with `from_byte`, of GETs that
        self.from_byte = 0  # reach this byte
        self.whole = False  # ranges are ignored, as by `python -m http.server`
        self.retry_after = "0"
        self.closing = threading.Event()
        self.stalled = 0

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"

    def gets(self) -> list[Request]:
        return [request for request in self.requests if request.method == "GET"]

    def handle_error(self, *_: Any) -> None:
        """Clients that give up are what these tests are about."""


class Handler(BaseHTTPRequestHandler):
    """Answers one connection's requests."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer takes 40 ms
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        fault = "" if self.server.from_byte else self.server.always
        self.answer(fault if fault in {"mute", "close"} or fault.isdecimal() else "")

    def do_GET(self) -> None:
        fault = self.server.faults.popleft() if self.server.faults else ""
        last = self._range()[1]
        if not fault and (last is None or last >= self.server.from_byte):
            fault = self.server.always
        self.answer(fault)

    def _range(self) -> tuple[int | None, int | None]:
        asked = self.headers.get("Range")
        if asked is None or self.server.whole:
            return None, None
        first, last = asked.removeprefix("bytes=").split("-")
        return int(first), int(last)

    def answer(self, fault: str) -> None:
        request = Request(self.command, self.path, *self._range(), fault or "ok")
        self.server.requests.append(request)
        file = self.server.folder / self.path.strip("/")
        if fault == "mute":
            self._stall()
        elif fault == "close":
            self.close_connection = True
        elif fault.isdecimal():
            self._status(int(fault))
        elif not file.is_file():
            self._status(404)
        else:
            self._give(file, request)

    def _status(self, status: int) -> None:
        body = b"no" if self.command == "GET" else b""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status in {429, 503}:
            self.send_header("Retry-After", self.server.retry_after)
        self.end_headers()
        self.wfile.write(body)

    def _give(self, file: Path, request: Request) -> None:
        """The file or its part; all of it is promised, but for "short" and "none"."""
        data = file.read_bytes()
        size, fault, first = len(data), request.answer, request.first
        if first is not None and request.last is not None:
            data = data[first : request.last + 1]
        part = {"short": -(-len(data) // 2), "none": 0}.get(fault, len(data))
        data = data[:part]
        self.send_response(200 if first is None else 206)
        if first is not None:
            self.send_header("Content-Range", f"bytes {first}-{first + part - 1}/{size}")
        self.send_header("Content-Length", str(part))
        if not self.server.whole:
            self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{size}-{file.stat().st_mtime_ns}"')
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault not in {"cut", "drop", "stall"}:
            self.wfile.write(data)
            return
        self.wfile.write(data[: part // 2])
        if fault == "stall":
            self._stall()
        if fault == "drop":
            linger = struct.pack("ii", 1, 0)  # closing sends RST
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close_connection = True

    def _stall(self) -> None:
        self.server.stalled += 1
        self.server.closing.wait(60)
        self.close_connection = True


@contextmanager
def serving(folder: Path, handler: type[Handler] | None = None) -> Iterator[Server]:
    """A server for as long as the block lasts."""
    server = Server(folder, handler or Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()
