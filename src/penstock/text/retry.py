"""Asking again: which failures may pass, how long to wait, and what is said when they do not.

    retried("https://host/a.parquet", "reading at byte 4,096", lambda: fetch(4096))

Six attempts in about half a minute, longer where the server names a time. What it refuses (not
found, forbidden, a bad request) is not asked for again. The libraries that the errors come from are
not imported: an error is known by its status, its errno, or the names of its classes.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from random import Random
from typing import Any, TypeVar

from penstock.errors import ConfigError, DataError, PenstockError

T = TypeVar("T")

MOST_WAIT = 20.0  # seconds between two attempts
MOST_ASKED = 300.0  # seconds that a Retry-After may add; the Hub counts requests in 5 minutes
_LOG = logging.getLogger("penstock")

_TIMEOUT, _TOO_EARLY, _TOO_MANY = 408, 425, 429
_GONE = (404, 410)
_REFUSED = (401, 403, 407, 451)
_ERRNOS = {
    *(errno.EAGAIN, errno.EBUSY, errno.EIO, errno.ETIMEDOUT),
    *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH),
}
_PASSING = {
    *("TimeoutError", "ConnectionError"),  # Python's, asyncio's, requests'
    *("ClientConnectionError", "ClientPayloadError"),  # aiohttp
    "FSTimeoutError",  # fsspec
    "TransportError",  # httpx and httpx2: timeouts, connections, protocols
    *("Timeout", "ChunkedEncodingError"),  # requests
    *("ProtocolError", "IncompleteRead"),  # urllib3, http.client
    *("HTTPClientError", "ResponseStreamingError"),  # botocore
}
_LASTING = {
    *("SSLCertVerificationError", "ClientConnectorCertificateError"),
    *("InvalidURL", "UnsupportedProtocol", "LocalProtocolError", "TooManyRedirects"),
    *("OfflineModeIsEnabled", "NoCredentialsError"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a server is waited for."""

    attempts: float = 6
    wait: float = 1.0  # seconds before the second attempt; before each later one twice as many
    timeout: float = 60.0  # seconds in which nothing comes


def patience() -> Patience:
    """What PENSTOCK_REMOTE_ATTEMPTS, PENSTOCK_REMOTE_WAIT and PENSTOCK_REMOTE_TIMEOUT say.

    >>> patience()
    Patience(attempts=6, wait=1.0, timeout=60.0)
    """
    said = {}
    for field in fields(Patience):
        name = f"PENSTOCK_REMOTE_{field.name.upper()}"
        given = os.environ.get(name)
        if given:
            try:
                said[field.name] = float(given)
            except ValueError:
                said[field.name] = -1.0
            if not 0 < said[field.name] < math.inf:
                raise ConfigError(f"{name} is {given!r}: it has to be a number above 0")
    return Patience(**said)


def retried(path: str, doing: str, call: Callable[[], T], *, most: float = math.inf) -> T:
    """What the call gives, in `most` attempts at most, or in as many as patience has."""
    settings, failed = patience(), 0
    most = min(most, settings.attempts)
    while True:
        try:
            return call()
        except Exception as error:
            if not passes(error):
                better = _for_good(path, doing, error)
                if better is None:
                    raise
                raise better from error
            failed += 1
            if failed >= most:
                raise DataError(
                    f"{path}: {doing} failed {failed} times, last with {_said(error)}. Try again "
                    "later; nothing read so far is lost."
                ) from error
            # Ranks that were refused together do not come back together.
            scatter = Random(f"{os.getpid()} {path} {doing} {failed}").uniform(1.0, 1.25)
            seconds = wait_of(error, failed, settings.wait) * scatter
            _LOG.warning("%s: %s failed (%s); again in %.1f s", path, doing, _said(error), seconds)
        time.sleep(seconds)


def wait_of(error: BaseException, failed: int, first: float = 1.0) -> float:
    """Seconds to wait after so many failures, of which this is the last.

    >>> [wait_of(TimeoutError(), failed) for failed in (1, 2, 3, 4, 5, 6)]
    [1.0, 2.0, 4.0, 8.0, 16.0, 20.0]
    """
    asked = next((found for each in _causes(error) if (found := _retry_after(each))), 0.0)
    return min(first * 2.0 ** (failed - 1), MOST_WAIT) + min(asked, MOST_ASKED)


def passes(error: BaseException) -> bool:
    """Whether the same may go well a little later.

    >>> passes(ConnectionResetError()), passes(FileNotFoundError())
    (True, False)
    """
    causes = list(_causes(error))
    if any(_names(each) & _LASTING or isinstance(each, PenstockError) for each in causes):
        return False
    for each in causes:
        status = _status(each)
        if status is not None:
            return status >= 500 or status in (_TIMEOUT, _TOO_EARLY, _TOO_MANY)
        if _names(each) & _PASSING or (isinstance(each, OSError) and each.errno in _ERRNOS):
            return True
    return False


def is_absence(error: FileNotFoundError) -> bool:
    """Whether this is what it says: fsspec says it of a server that is overloaded, too."""
    status = next((found for each in _causes(error) if (found := _status(each))), None)
    return not passes(error) and (status is None or status in _GONE)


def _for_good(path: str, doing: str, error: Exception) -> Exception | None:
    """What another attempt in vain is in words; None where the error itself says it."""
    status = next((found for each in _causes(error) if (found := _status(each))), None)
    if isinstance(error, PenstockError) or (
        status is None and isinstance(error, FileNotFoundError)
    ):
        return None
    if status in _GONE:
        return FileNotFoundError(path)
    if status in _REFUSED or isinstance(error, PermissionError):
        return DataError(
            f"{path}: {doing} was refused ({_said(error)}). Log in where it is kept, or ask for "
            "access."
        )
    if status is not None or isinstance(error, ValueError) or _names(error) & _LASTING:
        return DataError(
            f"{path}: {doing} failed ({_said(error)}). Check the address, and that you may read it."
        )
    return None


# ------------------------------------------------------------------------------- looking at errors


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    for _ in range(8):  # a ring of causes is possible
        if found is None:
            return
        yield found
        found = found.__cause__


def _names(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _status(error: BaseException) -> int | None:
    """The HTTP status of an error of aiohttp, httpx, requests, gcsfs, urllib or botocore."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, Mapping):  # botocore's
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return found if isinstance(found, int) else None
    for each in (error, response):
        for name in ("status", "status_code", "code"):  # aiohttp warns of its `code`
            found = getattr(each, name, None)
            if isinstance(found, int):
                return found if 400 <= found < 600 else None
    return None


def _retry_after(error: BaseException) -> float | None:
    """Seconds that the server asks for, as a number or as a date."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, Mapping):
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders")
    else:
        headers = getattr(error, "headers", None) or getattr(response, "headers", None)
    if not isinstance(headers, Mapping):
        return None
    given = str(headers.get("Retry-After") or headers.get("retry-after") or "")
    if given.isdecimal():
        return float(given)
    try:
        return max(0.0, (parsedate_to_datetime(given) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):  # TypeError: a date without its zone
        return None


def _said(error: BaseException) -> str:
    r"""The kind of an error and its first line.

    >>> _said(TimeoutError()), _said(ConnectionResetError("by peer\nand more"))
    ('TimeoutError', 'ConnectionResetError: by peer')
    """
    # fsspec says "not found" of whatever keeps it from finding.
    shown = (each for each in _causes(error) if not isinstance(each, FileNotFoundError))
    error = next(shown, error)
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
