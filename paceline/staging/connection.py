"""Requests to a source over HTTP, with its refusals told apart: wait, ask somebody, give up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import httpx2

from paceline.core.errors import PacelineError, SystemFaultError, UserError
from paceline.staging.credentials import headers_for, shown
from paceline.staging.ending import StageEnd

TIMEOUT_S = 60.0
"""Without a byte for so long a connection is taken to be dead."""
MAX_WAIT_S = 300.0
"""That a server may ask for; a longer wait is told to the user."""
TRIES = 5
"""In a row without a byte; a connection that brings some begins a new count."""
FIRST_WAIT_S = 0.5
MAX_DOCUMENT_BYTES = 64 << 20
RETRIED = (408, 425, 429, 500, 502, 503, 504)
_SECRET_HEADERS = ("Authorization", "Cookie", "CF-Access-Client-Id", "CF-Access-Client-Secret")
_UNUSABLE = (httpx2.InvalidURL, httpx2.UnsupportedProtocol, httpx2.TooManyRedirects)

T = TypeVar("T")


class TransientError(Exception):
    """What may be gone a moment later; `wait_s` where the server says when."""

    def __init__(self, what: str, wait_s: float | None = None) -> None:
        self.wait_s = wait_s
        super().__init__(what)


class WrongContentError(TransientError):
    """What came is not what the source itself or the recipe says."""


@cache
def _client() -> httpx2.Client:
    # Without connections that stay open: a child process would share them.
    return httpx2.Client(
        follow_redirects=True,
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
        headers={"User-Agent": "paceline", "Accept-Encoding": "identity"},
        event_hooks={"request": [_authorize]},
    )


def _authorize(request: httpx2.Request) -> None:
    """Give every request, a redirected one too, the credentials of its own host alone."""
    for name in _SECRET_HEADERS:
        request.headers.pop(name, None)
    request.headers.update(headers_for(str(request.url)))


@contextmanager
def open_url(
    url: str, gate: str | None = None, headers: Mapping[str, str] | None = None, method: str = "GET"
) -> Iterator[httpx2.Response]:
    """Answer with what `url` has, as a stream.

    Raises UserError where it is refused, SystemFaultError where it does not exist, TransientError
    where another try may succeed. None of them holds a query or a header: there may be secrets.
    """
    if not url.startswith(("http://", "https://")):
        raise UserError(shown(url) or "source", "is no http or https address")
    try:
        with _client().stream(method, url, headers=headers, timeout=TIMEOUT_S) as response:
            if response.status_code >= 300:
                wait = response.headers.get("Retry-After")
                raise refusal(response.status_code, shown(url), gate, wait)
            yield response
    except _UNUSABLE as error:
        where = f"leads to an address that cannot be used ({type(error).__name__})"
        raise SystemFaultError(shown(url), where) from None
    except httpx2.RequestError as error:
        raise TransientError(_reason(error)) from None


def refusal(status: int, where: str, gate: str | None, wait: str | None) -> Exception:
    """Return the error that stands for an HTTP status."""
    if status in RETRIED:
        wait_s = float(wait) if wait and wait.isdecimal() else None
        if wait_s is not None and wait_s > MAX_WAIT_S:
            return SystemFaultError(
                where, f"asks to wait {wait_s:,.0f} s (HTTP {status})", remedy="try again then"
            )
        return TransientError(f"answers HTTP {status}", wait_s)
    if status == httpx2.codes.RANGE_NOT_SATISFIABLE:
        return WrongContentError("has fewer bytes than had come of it")
    if status in (401, 403):
        return refused(where, f"HTTP {status}", gate)
    if status in (404, 410):
        return SystemFaultError(
            where, f"does not exist there (HTTP {status})", remedy="check source and revision"
        )
    return SystemFaultError(where, f"answers HTTP {status}")


def refused(where: str, why: str, gate: str | None) -> UserError:
    """Return what to do where access is refused."""
    remedy = (
        "credentials: HF_TOKEN (or `hf auth login`) for the hub, else ~/.netrc, over https alone"
    )
    if gate:
        remedy = f"ask for access on {gate}, accept its terms, then run this again; {remedy}"
    return UserError(where, f"access is refused ({why})", remedy=remedy)


def length_of(url: str, gate: str | None) -> int | None:
    """Return the bytes of what lies at `url`, by its headers; None where they do not tell."""
    try:
        with open_url(url, gate, method="HEAD") as response:
            length = response.headers.get("Content-Length")
    except (TransientError, PacelineError):
        return None  # Fetching it will say what is wrong; some servers refuse HEAD alone.
    return int(length) if length and length.isdecimal() else None


def read_small(url: str, gate: str | None) -> str:
    """Return the whole text of a small document; raises as open_url does."""
    content = b""
    with open_url(url, gate) as response:
        for block in response.iter_raw():
            content += block
            if len(content) > MAX_DOCUMENT_BYTES:
                raise SystemFaultError(shown(url), f"is larger than {MAX_DOCUMENT_BYTES:,} bytes")
    return content.decode("utf-8", "replace")


def tried(ask: Callable[[], T], where: str, ended: StageEnd) -> T:
    """Return what `ask` answers, again where it may succeed a moment later; raises as it does.

    Raises StageEndedError when the end comes while it waits.
    """
    for number in range(1, TRIES + 1):
        try:
            return ask()
        except TransientError as error:
            if number == TRIES:
                raise given_up(shown(where), error) from None
            ended.wait(error.wait_s or FIRST_WAIT_S * 2 ** (number - 1))
            ended.check(shown(where))
    raise AssertionError("the last try returns or raises")


def given_up(where: str, error: TransientError) -> PacelineError:
    """Return the error after the last try."""
    return SystemFaultError(
        where, str(error), remedy="run the command again: it goes on with what is there"
    )


def _reason(error: httpx2.RequestError) -> str:
    """What happened to a connection, in words that hold no URL."""
    if isinstance(error, httpx2.TimeoutException):
        return f"nothing came for {TIMEOUT_S:.0f} s"
    if isinstance(error, httpx2.ConnectError):
        return f"does not answer: {str(error).rpartition('] ')[2]}"
    return "the connection was cut"
