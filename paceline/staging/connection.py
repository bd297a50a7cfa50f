"""HTTP requests to a source; errors say whether to retry, request access or give up."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from typing import TypeVar

import httpx2

from paceline.core.errors import IncompleteError, PacelineError, SystemFaultError, UserError
from paceline.core.text import whole_number
from paceline.staging.credentials import headers_for, redact_url

TIMEOUT_S = 60.0
"""Time without a byte after which a connection counts as dead, in seconds."""
MAX_WAIT_S = 300.0
"""Longest wait that a server may ask for, in seconds; a longer one is an error."""
TRIES = 5
"""Maximum number of consecutive tries without a byte; any received byte resets the count."""
FIRST_WAIT_S = 0.5
MAX_DOCUMENT_BYTES = 32 << 20
MAX_DOCUMENT_S = 300.0
"""Time limit of a document in seconds, for a server that sends a byte at a time."""
RETRYABLE_STATUSES = (408, 425, 429, 500, 502, 503, 504)
_SECRET_HEADERS = ("Authorization", "Cookie", "CF-Access-Client-Id", "CF-Access-Client-Secret")
_BAD_URL_ERRORS = (httpx2.InvalidURL, httpx2.UnsupportedProtocol, httpx2.TooManyRedirects)

T = TypeVar("T")


class TransientError(Exception):
    """Failure that a retry may resolve; `wait_s` is the delay that the server asks for, in s."""

    def __init__(self, what: str, wait_s: float | None = None) -> None:
        self.wait_s = wait_s
        super().__init__(what)


class WrongContentError(TransientError):
    """Received content that differs from what the source or the recipe states."""


@cache
def _client() -> httpx2.Client:
    # No keep-alive connections: a forked child process would share their sockets. No compression:
    # sizes and byte ranges refer to the uncompressed file.
    return httpx2.Client(
        follow_redirects=True,
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
        headers={"User-Agent": "paceline", "Accept-Encoding": "identity"},
        event_hooks={"request": [_authorize]},
    )


def _authorize(request: httpx2.Request) -> None:
    """Set the credentials of the request's own host and no others, also after a redirect."""
    for name in _SECRET_HEADERS:
        request.headers.pop(name, None)
    request.headers.update(headers_for(str(request.url)))


@contextmanager
def open_url(
    url: str, gate: str | None = None, headers: Mapping[str, str] | None = None, method: str = "GET"
) -> Iterator[httpx2.Response]:
    """Open `url` and yield the response as a stream.

    Raises UserError if access is denied, SystemFaultError if it does not exist, and
    TransientError if a retry may succeed. No message contains a query or a header, because they
    may hold secrets.
    """
    if not url.startswith(("http://", "https://")):
        raise UserError(redact_url(url) or "source", "is not an http or https URL")
    try:
        with _client().stream(method, url, headers=headers, timeout=TIMEOUT_S) as response:
            # A part that was not requested, or no content, must not pass as the whole file.
            expected = (200, 206) if "Range" in (headers or {}) else (200,)
            if response.status_code not in expected:
                wait = response.headers.get("Retry-After")
                raise error_for_status(response.status_code, redact_url(url), gate, wait)
            yield response
    except _BAD_URL_ERRORS as error:
        what = f"redirects to an invalid URL ({type(error).__name__})"
        raise SystemFaultError(redact_url(url), what) from None
    except httpx2.RequestError as error:
        raise TransientError(_reason(error)) from None


def error_for_status(status: int, where: str, gate: str | None, wait: str | None) -> Exception:
    """Return the exception for an HTTP error status."""
    if status in RETRYABLE_STATUSES:
        # Retry-After may also be a date, which is ignored.
        wait_s = whole_number(wait) if wait else None
        if wait_s is not None and wait_s > MAX_WAIT_S:
            return SystemFaultError(
                where, f"asks to wait {wait_s:,.0f} s (HTTP {status})", remedy="try again later"
            )
        return TransientError(f"returns HTTP {status}", wait_s)
    if status == httpx2.codes.RANGE_NOT_SATISFIABLE:
        return WrongContentError("is shorter than the partial file")
    if status in (401, 403):
        return access_denied(where, f"HTTP {status}", gate)
    if status in (404, 410):
        return SystemFaultError(
            where, f"does not exist (HTTP {status})", remedy="check source and revision"
        )
    return SystemFaultError(where, f"returns HTTP {status}")


def access_denied(where: str, why: str, gate: str | None) -> UserError:
    """Return the error for denied access, with the steps to obtain it."""
    remedy = (
        "credentials: HF_TOKEN (or `hf auth login`) for the hub, else ~/.netrc, over https only"
    )
    if gate:
        remedy = f"request access at {gate}, accept its terms, then run this again; {remedy}"
    return UserError(where, f"access denied ({why})", remedy=remedy)


def content_length(url: str, gate: str | None) -> int | None:
    """Return the size of `url` in bytes from its headers; None if they do not state it."""
    try:
        with open_url(url, gate, method="HEAD") as response:
            length = response.headers.get("Content-Length")
    except (TransientError, PacelineError):
        return None  # The download reports a real error; some servers refuse only HEAD.
    return whole_number(length) if length else None


def read_small(url: str, gate: str | None) -> str:
    """Return the full text of a small document; raises as `open_url` does."""
    content = bytearray()
    end_at = time.monotonic() + MAX_DOCUMENT_S
    with open_url(url, gate) as response:
        for block in response.iter_raw():
            content += block
            if time.monotonic() > end_at:
                raise TransientError(f"is not complete after {MAX_DOCUMENT_S:.0f} s")
            if len(content) > MAX_DOCUMENT_BYTES:
                raise SystemFaultError(
                    redact_url(url), f"is larger than {MAX_DOCUMENT_BYTES:,} bytes"
                )
    return content.decode("utf-8", "replace")


def with_retries(request: Callable[[], T], where: str, stop: StopSignal) -> T:
    """Return the result of `ask`, with retries after transient errors; raises as `ask` does.

    Raises StageEndedError if staging is stopped during a wait.
    """
    for number in range(1, TRIES + 1):
        try:
            return request()
        except TransientError as error:
            if number == TRIES:
                raise retries_exhausted(redact_url(where), error) from None
            stop.wait(error.wait_s or FIRST_WAIT_S * 2 ** (number - 1))
            stop.check(redact_url(where))
    raise AssertionError("the last try returns or raises")


def retries_exhausted(where: str, error: TransientError) -> PacelineError:
    """Return the error after the last try."""
    return SystemFaultError(where, str(error), remedy="run the command again to resume")


def _reason(error: httpx2.RequestError) -> str:
    """Describe a connection failure without its URL, which may hold secrets."""
    if isinstance(error, httpx2.TimeoutException):
        return f"no data for {TIMEOUT_S:.0f} s"
    if isinstance(error, httpx2.ConnectError):
        return f"does not respond: {str(error).rpartition('] ')[2]}"
    return "the connection was closed"


class StagingStoppedError(IncompleteError):
    """Staging stopped before this asset was complete."""

    def __init__(self, where: str, why: str = "was stopped before it was complete") -> None:
        super().__init__(where, why)


class StopSignal:
    """Stop signal, set once by an interrupt or another thread."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()

    def is_set(self) -> bool:
        """Return whether staging is to stop."""
        return self._event.is_set()

    def check(self, where: str) -> None:
        """Raise StageEndedError if the signal is set."""
        if self.is_set():
            raise StagingStoppedError(where)

    def wait(self, seconds: float) -> bool:
        """Wait for `seconds` or until the signal is set; return whether it is set."""
        return self._event.wait(seconds)

    def set(self) -> None:
        """Set the signal and shut down every connection, so that no thread blocks on a read."""
        with self._lock:
            self._event.set()
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def closed_on_stop(self, response: httpx2.Response) -> Iterator[None]:
        """Shut down this connection if the signal is set while the block runs."""
        connection = response.extensions["network_stream"].get_extra_info("socket")
        with self._lock:
            self._connections.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._connections.discard(connection)
