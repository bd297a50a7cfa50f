"""What a recipe needs beside itself (models, data, code, containers), and what was staged of it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, StringConstraints, field_validator, model_validator

from paceline.core.value import NonNegativeInt, Value

AssetKind = Literal[
    "hub-model", "hub-dataset", "hub-tokenizer", "git", "url", "r2", "container", "made"
]
AssetState = Literal["missing", "partial", "staged", "damaged"]
"""`partial`: begun, and not ended; `damaged`: other files than the manifest says."""
AssetName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.-]{0,59}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
HexDigest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""Of SHA-256; nothing else, as digests stand in the scripts that verify copies on nodes."""
Md5 = Annotated[str, StringConstraints(pattern=r"^md5:[0-9a-f]{32}$")]
UNSTAGED_FOLDERS = frozenset({".git", "__pycache__"})
"""Belong to the programs that use an asset, and are never part of one."""
HUB_KINDS = ("hub-model", "hub-dataset", "hub-tokenizer")

_COMMIT = re.compile(r"[0-9a-f]{7,40}")


def plain_path(path: str) -> str:
    """The path itself: relative, inside its folder, and written in the only way.

    Raises ValueError for another, and for what belongs to the programs that use an asset.
    """
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or not path.isprintable():
        raise ValueError("must be a relative path that stays inside its folder")
    if PurePosixPath(path).as_posix() != path:
        raise ValueError(f"must be written as {PurePosixPath(path).as_posix()}")
    if left_out := sorted(UNSTAGED_FOLDERS.intersection(parts)):
        raise ValueError(f"must not name {left_out[0]}, which programs change as they run")
    return path


def _address(text: str | None) -> str | None:
    """The text itself; raises ValueError where it is a URL that nobody should or can ask."""
    address = urlsplit(text) if text and "://" in text else None
    if address and (address.password or (address.username and address.username != "git")):
        raise ValueError("holds credentials; they belong into ~/.netrc or the environment")
    if text and address and not text.isascii():
        raise ValueError("must be ASCII; other characters are written as %XX")
    try:
        _ = address and address.port
    except ValueError:
        raise ValueError("has a port that is no number up to 65535") from None
    return text


InnerPath = Annotated[str, AfterValidator(plain_path)]

_FOR_KINDS: dict[str, tuple[str, ...]] = {
    "revision": (*HUB_KINDS, "git", "container"),
    "digest": ("url", "container"),
    "include": (*HUB_KINDS, "r2"),
    "files": ("url",),
    "submodules": ("git",),
    "patches": ("git",),
    "settings": ("made",),
    "needs": ("made",),
}
"""Fields that mean something for some kinds alone: elsewhere nobody would heed them."""


class AssetFile(Value):
    """One file of a `url` asset."""

    path: InnerPath
    url: Annotated[str | None, AfterValidator(_address)] = None
    """Where it lies; None is `source` with the path behind it."""
    bytes: NonNegativeInt | None = None
    digest: Sha256 | Md5 | None = None


class Asset(Value):
    """One thing that a workload needs, where it is had and how large it is."""

    name: AssetName
    kind: AssetKind
    source: str
    """Repository of a hub, URL, image, or for `made` what makes it."""
    revision: str | None = None
    """Commit, tag or branch; None is what the source has at that time, and the manifest says it."""
    bytes: NonNegativeInt | None = None
    """Size of all files where a source states it; None is unknown."""
    digest: Sha256 | None = None
    """Of the only file of a `url`, or of a container's manifest."""
    include: tuple[str, ...] = ()
    """Patterns of the files of a hub or an `r2` list that are fetched; none is all."""
    files: tuple[AssetFile, ...] = ()
    """Files of a `url` asset; none is the one that `source` names."""
    submodules: bool = False
    patches: tuple[str, ...] = ()
    """Unified diffs that are applied to a `git` asset, in this order."""
    settings: dict[str, str | int | float | bool] = {}
    """What a `made` asset is made with."""
    needs: tuple[AssetName, ...] = ()
    """Other assets of the recipe that it is made of."""
    gate: str | None = None
    """Page on which access has to be asked for."""
    engines: tuple[str, ...] = ()
    """Engines that it is for; none is all."""
    note: str = ""
    """Where the size is from, and what else should be known."""

    @field_validator("source", "gate")
    @classmethod
    def _can_be_asked(cls, text: str | None) -> str | None:
        return _address(text)

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        for name, kinds in _FOR_KINDS.items():
            if getattr(self, name) and self.kind not in kinds:
                raise ValueError(f"{name} is for {' or '.join(kinds)}, not for {self.kind}")
        if self.digest and self.files:
            raise ValueError("digest is for a single file; state one for each of files")
        paths = [file.path for file in self.files]
        if twice := {path for path in paths if paths.count(path) > 1}:
            raise ValueError(f"files names {sorted(twice)[0]} twice")
        if self.kind == "git" and not _COMMIT.fullmatch(self.revision or ""):
            raise ValueError("revision of a git asset must be a commit (7 to 40 digits)")
        if self.kind == "r2" and not self.source.endswith(".uri"):
            raise ValueError("source of an r2 asset must be the URL of a .uri file")
        return self

    @property
    def content(self) -> dict[str, object]:
        """What decides which files an asset has; names, sizes and notes do not."""
        labels = {"name", "bytes", "needs", "gate", "engines", "note"}
        return self.model_dump(mode="json", exclude=labels)


class StagedFile(Value):
    """A file of a staged asset."""

    path: InnerPath
    bytes: NonNegativeInt
    sha256: HexDigest


class Manifest(Value):
    """manifest.json of a staged asset, which is written last: without it nothing is staged."""

    schema_version: Literal[1] = 1
    asset: Asset
    revision: str | None
    """The commit or digest that was had, where the source tells it."""
    bytes: NonNegativeInt
    sha256: HexDigest
    """Of all paths and digests together: equal contents have equal ones."""
    files: tuple[StagedFile, ...]
    origin: str
    """Where it came from, mirrors named, credentials left out."""
    tool: str | None = None
    """The program that fetched it, where it was none of Paceline's own."""
    staged: str
    """When, UTC."""
    seconds: float
    paceline_version: str


def content_digest(files: Iterable[StagedFile]) -> str:
    """SHA-256 over sorted lines `sha256  path`, as `sha256sum` would write them."""
    lines = sorted(f"{file.sha256}  {file.path}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def asset_key(asset: Asset, assets: Mapping[str, Asset]) -> str:
    """Eight hexadecimal digits of what an asset and those that it is made of hold."""
    needed = [asset_key(assets[name], assets) for name in asset.needs]
    text = json.dumps([asset.content, needed], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def graph_problem(assets: Iterable[Asset]) -> str | None:
    """What is wrong with the needs among `assets`: a name twice, an unknown one, a circle."""
    by_name: dict[str, Asset] = {}
    for asset in assets:
        if asset.name in by_name:
            return f"assets: {asset.name} is declared twice"
        by_name[asset.name] = asset
    done: set[str] = set()
    while len(done) < len(by_name):
        for asset in by_name.values():
            if unknown := [name for name in asset.needs if name not in by_name]:
                return f"assets: {asset.name} needs {unknown[0]}, which is not declared"
        ready = {name for name, asset in by_name.items() if done.issuperset(asset.needs)} - done
        if not ready:
            return f"assets: {', '.join(sorted(set(by_name) - done))} need each other in a circle"
        done |= ready
    return None
