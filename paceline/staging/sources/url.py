"""Files from URLs, and from MLCommons' file lists with checksums."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import PurePosixPath
from urllib.parse import quote, unquote, urlsplit

from paceline.core.assets import Asset, AssetFile
from paceline.core.errors import SystemFaultError, UserError
from paceline.staging.connection import StopSignal, content_length, read_small, with_retries
from paceline.staging.credentials import ACCESS_VARIABLES, redact_url
from paceline.staging.transfer import RemoteFile, SourceListing, inner_path, is_included

MAX_SIZE_REQUESTS = 8
"""Maximum number of concurrent requests for file sizes."""
_MD5_LINE = re.compile(r"([0-9a-f]{32})\s+\*?(?:\./)?(\S.*)")


def list_urls(asset: Asset, stop: StopSignal) -> SourceListing:
    """Return the files that the recipe lists."""
    files = asset.files or (_only_file(asset),)
    remote = [_remote(asset, file) for file in files]
    return SourceListing(_with_sizes(asset, remote, stop), redact_url(asset.source))


def list_r2(asset: Asset, stop: StopSignal) -> SourceListing:
    """Return the files of a data set that MLCommons publishes as `NAME.uri` and `NAME.md5`.

    `NAME.uri` holds the URL of the folder with the files. `NAME.md5` in the same folder holds one
    line per file with its MD5 and path. Raises UserError if a login is required, and
    SystemFaultError if a file has another format.
    """
    base = with_retries(lambda: read_small(asset.source, asset.gate), asset.source, stop).strip()
    if base.startswith("<"):
        # Data for members redirects to a login page.
        variables = " and ".join(ACCESS_VARIABLES)
        raise UserError(
            redact_url(asset.source),
            "requires a login",
            remedy=f"set {variables} to those of an MLCommons service account",
        )
    list_url = asset.source.removesuffix(".uri") + ".md5"
    lines = with_retries(lambda: read_small(list_url, asset.gate), list_url, stop).splitlines()
    matches = [_MD5_LINE.fullmatch(line.strip()) for line in lines if line.strip()]
    if not base.startswith(("http://", "https://")) or not matches or None in matches:
        raise SystemFaultError(redact_url(asset.source), "does not list files with checksums")
    files = [
        AssetFile(path=inner_path(match[2], asset), digest=f"md5:{match[1]}")
        for match in matches
        if match and is_included(match[2], asset.include)
    ]
    if not files:
        raise SystemFaultError(
            redact_url(list_url), f"lists no file that matches {', '.join(asset.include)}"
        )
    remote = [_remote(asset.model_copy(update={"source": base}), file) for file in files]
    return SourceListing(_with_sizes(asset, remote, stop), redact_url(base))


def _with_sizes(
    asset: Asset, files: Sequence[RemoteFile], stop: StopSignal
) -> tuple[RemoteFile, ...]:
    """Return the files with the sizes from the server, which the disk space check needs."""

    def size(file: RemoteFile) -> int | None:
        stop.check(asset.name)
        return content_length(file.url, asset.gate) if file.bytes is None else file.bytes

    with ThreadPoolExecutor(MAX_SIZE_REQUESTS, "sizes") as pool:
        sizes = list(pool.map(size, files))
    return tuple(replace(file, bytes=size) for file, size in zip(files, sizes, strict=True))


def _only_file(asset: Asset) -> AssetFile:
    name = unquote(PurePosixPath(urlsplit(asset.source).path).name) or "file"
    return AssetFile(
        path=inner_path(name, asset), url=asset.source, bytes=asset.bytes, digest=asset.digest
    )


def _remote(asset: Asset, file: AssetFile) -> RemoteFile:
    algorithm, _, digest = (file.digest or "").partition(":")
    return RemoteFile(
        path=file.path,
        url=file.url or f"{asset.source.rstrip('/')}/{quote(file.path)}",
        bytes=file.bytes,
        sha256=digest if algorithm == "sha256" else None,
        md5=digest if algorithm == "md5" else None,
    )
