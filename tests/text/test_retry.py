"""What is asked for again, after how long, and what is said at last; known without imports."""

from __future__ import annotations

import errno
import http.client
import logging
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from fsspec.exceptions import FSTimeoutError

from penstock.errors import ConfigError, DataError, MissingData
from penstock.text.retry import is_absence, passes, patience, retried, wait_of


class StatusError(Exception):
    """As aiohttp's: the status is the error's."""

    def __init__(self, status: int, headers: Any = None) -> None:
        super().__init__(f"status {status}")
        self.status, self.headers = status, headers


class Response:
    def __init__(self, status: int, headers: Any = None) -> None:
        self.status_code, self.headers = status, headers


class ResponseError(OSError):
    """As those of requests, httpx and huggingface_hub: the status is its response's."""

    def __init__(self, response: Any) -> None:
        super().__init__("a response")
        self.response = response


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def named(name: str) -> Exception:
    """An error of a library that is not imported."""
    return type("Detailed", (type(name, (Exception,), {}),), {})()


PASSING = [
    *(StatusError(status) for status in (408, 425, 429, 500, 502, 503, 504, 599)),
    *(ResponseError(Response(status)) for status in (429, 503)),
    ResponseError({"ResponseMetadata": {"HTTPStatusCode": 503}}),
    *(TimeoutError(), FSTimeoutError(), ConnectionResetError()),
    *(BrokenPipeError(), http.client.IncompleteRead(b"")),
    *(OSError(each, "said") for each in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EIO)),
    *(named(name) for name in ("ClientPayloadError", "TransportError", "ChunkedEncodingError")),
    caused(FileNotFoundError("as fsspec says"), StatusError(503)),
    caused(FileNotFoundError("as fsspec says"), named("ClientConnectionError")),
]
LASTING = [
    *(StatusError(status) for status in (400, 401, 403, 404, 410, 416)),
    ResponseError(Response(404)),
    ResponseError({"ResponseMetadata": {"HTTPStatusCode": 403}}),
    *(FileNotFoundError(), PermissionError(), IsADirectoryError(), OSError("damaged")),
    *(DataError("ours"), MissingData("ours"), ValueError(), KeyError("size")),
    caused(FileNotFoundError("as fsspec says"), StatusError(404)),
    caused(named("TransportError"), ssl.SSLCertVerificationError("self-signed")),
    caused(ConnectionError(), DataError("ours")),
]


def failing(error: Exception, calls: list[int]) -> Callable[[], None]:
    def call() -> None:
        calls.append(1)
        raise error

    return call


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_REMOTE_WAIT", "0.001")


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_what_may_pass_is_tried_again_and_no_oftener_than_said(error: Exception) -> None:
    calls: list[int] = []

    def call() -> str:
        calls.append(1)
        if len(calls) < 6:
            raise error
        return "made"

    assert passes(error)
    assert retried("a.jsonl", "reading", call) == "made"
    calls.clear()
    with pytest.raises(DataError, match=r"^a\.jsonl: reading failed 6 times, last with \w"):
        retried("a.jsonl", "reading", failing(error, calls))
    assert len(calls) == 6


@pytest.mark.parametrize("error", LASTING, ids=repr)
def test_what_will_not_pass_is_tried_once(error: Exception) -> None:
    calls: list[int] = []
    with pytest.raises(Exception) as raised:  # noqa: PT011 - which one, the next test says
        retried("a.jsonl", "reading", failing(error, calls))
    assert not passes(error)
    assert len(calls) == 1
    assert raised.value is error or raised.value.__cause__ is error
    assert raised.value.__cause__ is not raised.value


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (StatusError(403), DataError, r"reading was refused \(StatusError: status 403\)\. Log in"),
        (PermissionError(13, "no"), DataError, r"reading was refused \(PermissionError"),
        (StatusError(400), DataError, r"reading failed \(StatusError: status 400\)\. Check"),
        (ValueError("no ranges"), DataError, r"reading failed \(ValueError: no ranges\)"),
        (StatusError(410), FileNotFoundError, r"^a\.jsonl$"),
        (caused(FileNotFoundError("x"), StatusError(403)), DataError, r"\(StatusError: status 403"),
        (named("NoCredentialsError"), DataError, r"reading failed \(Detailed\)"),
        (KeyError("a bug"), KeyError, "a bug"),
        (MissingData("gone"), MissingData, "^gone$"),
    ],
    ids=repr,
)
def test_what_will_not_pass_is_one_sentence(
    error: Exception, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        retried("a.jsonl", "reading", failing(error, []))


def test_a_file_is_absent_if_nothing_else_kept_it_from_being_found() -> None:
    assert is_absence(FileNotFoundError())
    assert is_absence(caused(FileNotFoundError(), StatusError(404)))
    assert not is_absence(caused(FileNotFoundError(), StatusError(503)))
    assert not is_absence(caused(FileNotFoundError(), StatusError(403)))
    assert not is_absence(caused(FileNotFoundError(), TimeoutError()))


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("7", 7), ("0", 0), ("99999", 300), ("soon", 0), ("", 0), ("Mon, 01 Jan 2024 00:00:00", 0)],
)
def test_a_server_that_names_a_time_is_given_it(given: str, seconds: float) -> None:
    for error in (
        StatusError(429, {"Retry-After": given}),
        ResponseError(Response(429, {"retry-after": given})),
        ResponseError(
            {"ResponseMetadata": {"HTTPStatusCode": 503, "HTTPHeaders": {"retry-after": given}}}
        ),
        caused(FileNotFoundError(), StatusError(503, {"Retry-After": given})),
    ):
        assert passes(error)
        assert wait_of(error, 1) == 1 + seconds


def test_a_server_may_name_a_date() -> None:
    when = format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True)
    assert 80 < wait_of(StatusError(429, {"Retry-After": when}), 1) <= 101
    assert wait_of(StatusError(429, {"Retry-After": "Mon, 01 Jan 2024 00:00:00 GMT"}), 1) == 1


def test_each_further_attempt_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    failures = [TimeoutError(), StatusError(503)]

    def call() -> None:
        if failures:
            raise failures.pop()

    with caplog.at_level(logging.WARNING, "penstock"):
        retried("a.jsonl", "listing", call)
    assert [record.getMessage() for record in caplog.records] == [
        "a.jsonl: listing failed (StatusError: status 503); again in 0.0 s",
        "a.jsonl: listing failed (TimeoutError); again in 0.0 s",
    ]


def test_patience_is_set_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_REMOTE_ATTEMPTS", "2")
    assert (patience().attempts, patience().wait, patience().timeout) == (2, 0.001, 60)
    for wrong in ("many", "0", "-1", "nan", "inf"):
        monkeypatch.setenv("PENSTOCK_REMOTE_ATTEMPTS", wrong)
        with pytest.raises(ConfigError, match=f"PENSTOCK_REMOTE_ATTEMPTS is '{wrong}'"):
            patience()


def test_a_ring_of_causes_ends() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert not passes(one)
