"""Credential headers by host; each is sent to its own host only."""

from __future__ import annotations

import base64
import netrc
import os
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from paceline.files.hf_hub import hub_endpoint

MLCOMMONS = ".mlcommons-storage.org"
ACCESS_VARIABLES = ("CF_ACCESS_CLIENT_ID", "CF_ACCESS_CLIENT_SECRET")
"""Environment variables of the service account that MLCommons gives to its members."""


def origin_of(url: str) -> tuple[str, str, int | None]:
    """Return scheme, host and port, which must all match for credentials to be sent."""
    address = urlsplit(url)
    return address.scheme, address.hostname or "", address.port


def headers_for(url: str) -> dict[str, str]:
    """Return the headers with the credentials of exactly the host of `url`; {} if there are none.

    Credentials are sent over https or to the loopback interface only. The exception is the hub's
    token, because the user sets the hub's address. Raises ValueError if the port of the URL is not
    a number.
    """
    if origin_of(url) == origin_of(hub_endpoint()):
        token = _hub_token()
        return _authorization("Bearer", token) if token else {}
    scheme, host, _ = origin_of(url)
    if scheme != "https" and not _is_loopback(host):
        return {}
    client, secret = (os.environ.get(name) for name in ACCESS_VARIABLES)
    if host.endswith(MLCOMMONS) and client and secret:
        return {"CF-Access-Client-Id": client, "CF-Access-Client-Secret": secret}
    login = _login(host)
    if login is None:
        return {}
    return _authorization("Basic", base64.b64encode(":".join(login).encode()).decode())


def _hub_token() -> str | None:
    # Local: the library is an extra, and takes a second to import.
    try:
        from huggingface_hub import get_token
    except ModuleNotFoundError:
        return os.environ.get("HF_TOKEN")
    return get_token()


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _authorization(scheme: str, credentials: str) -> dict[str, str]:
    return {"Authorization": " ".join((scheme, credentials))}


def _login(host: str) -> tuple[str, str] | None:
    """Return user and password of a host from ~/.netrc, or from the file in $NETRC."""
    try:
        file = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
        entries = netrc.netrc(str(file)).hosts
    except (OSError, RuntimeError, netrc.NetrcParseError):
        return None
    entry = entries.get(host)
    return (entry[0], entry[2]) if entry else None


def redact_url(url: str) -> str:
    """Return a URL without the parts that may be secret: user, password and query."""
    try:
        address = urlsplit(url)
        port = address.port
    except ValueError:
        return "an invalid URL"
    host = address.hostname or ""
    if port:
        host += f":{port}"
    return f"{address.scheme}://{host}{address.path}" if address.scheme else address.path
