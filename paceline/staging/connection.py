"""Requests to a source over HTTP, with its refusals told apart: wait, ask somebody, give up."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import IO, Any

from paceline.core.errors import PacelineError, SystemFaultError, UserError
from paceline.staging.credentials import headers_for, origin_of, shown

TIMEOUT_S = 60.0
"""Without a byte for so long a connection is taken to be dead."""
LONGEST_WAIT_S = 300.0
"""That a server may ask for; a longer wait is told to the user."""
AGENT = "paceline"
LOCAL_FAULTS = (http.client.HTTPException, urllib.error.URLError, TimeoutError, ConnectionError)
RETRIED = (408, 425, 429, 500, 502, 503, 504)


class TransientError(Exception):
    """What may be gone a moment later; `wait_s` where the server says when."""

    def __init__(self, what: str, wait_s: float | None = None) -> None:
        self.wait_s = wait_s
        super().__init__(what)


class WrongContentError(TransientError):
    """What came is not what the source itself or the recipe says."""


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, credentials left behind where another host is meant."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        if not newurl.startswith(("http://", "https://")):
            return None
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        if following is not None and origin_of(newurl) != origin_of(req.full_url):
            secret = {name.capitalize() for name in headers_for(req.full_url)}
            for name in secret | {"Authorization", "Cookie"}:
                following.headers.pop(name, None)
        return following


_OPENER = urllib.request.build_opener(_Redirects())


def open_url(
    url: str,
    gate: str | None = None,
    headers: Mapping[str, str] | None = None,
    method: str = "GET",
) -> http.client.HTTPResponse:
    """The answer of `url` as a stream.

    Raises UserError where it is refused, SystemFaultError where it does not exist, TransientError
    where another try may succeed. None of them holds a query or a header: there may be secrets.
    """
    if not url.startswith(("http://", "https://")):
        raise UserError(shown(url) or "source", "is no http or https address")
    request = urllib.request.Request(
        url,
        headers={"User-Agent": AGENT, **headers_for(url), **(headers or {})},
        method=method,
    )
    try:
        response: Any = _OPENER.open(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        with error:
            raise refusal(error.code, shown(url), gate, error.headers.get("Retry-After")) from None
    except LOCAL_FAULTS as error:
        raise TransientError(_reason(error)) from None
    return response


def refusal(status: int, where: str, gate: str | None, wait: str | None) -> Exception:
    """The error that stands for an HTTP status."""
    if status in RETRIED:
        wait_s = float(wait) if wait and wait.isdecimal() else None
        if wait_s is not None and wait_s > LONGEST_WAIT_S:
            return SystemFaultError(
                where, f"asks to wait {wait_s:,.0f} s (HTTP {status})", remedy="try again then"
            )
        return TransientError(f"answers HTTP {status}", wait_s)
    if status == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
        return WrongContentError("has fewer bytes than had come of it")
    if status in (401, 403):
        return refused(where, f"HTTP {status}", gate)
    if status in (404, 410):
        return SystemFaultError(
            where, f"does not exist there (HTTP {status})", remedy="check source and revision"
        )
    return SystemFaultError(where, f"answers HTTP {status}")


def refused(where: str, why: str, gate: str | None) -> UserError:
    """What to do where access is refused."""
    remedy = (
        "credentials: HF_TOKEN (or `hf auth login`) for the hub, else ~/.netrc, over https alone"
    )
    if gate:
        remedy = f"ask for access on {gate}, accept its terms, then run this again; {remedy}"
    return UserError(where, f"access is refused ({why})", remedy=remedy)


def length_of(url: str, gate: str | None) -> int | None:
    """Bytes of what lies at `url`, by its headers; None where they do not tell."""
    try:
        with open_url(url, gate, method="HEAD") as response:
            length = response.headers.get("Content-Length")
    except (TransientError, PacelineError):
        return None  # Fetching it will say what is wrong; some servers refuse HEAD alone.
    return int(length) if length and length.isdecimal() else None


def read_small(url: str, gate: str | None, largest: int = 64 << 20) -> str:
    """The whole text of a small document; raises as open_url does."""
    try:
        with open_url(url, gate) as response:
            expected = response.length
            content = response.read(largest + 1)
    except LOCAL_FAULTS as error:
        raise TransientError(_reason(error)) from None
    if len(content) > largest:
        raise SystemFaultError(shown(url), f"is larger than {largest:,} bytes")
    if expected is not None and len(content) < expected:
        raise TransientError("the connection was cut")
    return content.decode("utf-8", "replace")


def _reason(error: Exception) -> str:
    """What happened to a connection, in words that hold no URL."""
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(inner, TimeoutError):
        return f"nothing came for {TIMEOUT_S:.0f} s"
    if isinstance(inner, ConnectionRefusedError):
        return "refuses the connection"
    if isinstance(inner, OSError) and inner.strerror:
        return inner.strerror
    return "the connection was cut"


def given_up(where: str, error: TransientError) -> PacelineError:
    """The error after the last try."""
    return SystemFaultError(
        where, str(error), remedy="run the command again: it goes on with what is there"
    )
