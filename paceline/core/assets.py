"""Inputs of a run: assets (models, data, code, containers), their staged copies, and digests."""

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
"""State of a staged asset.

`partial`: the download was started and did not finish. `damaged`: the files differ from the
manifest.
"""
AssetName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.-]{0,59}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
HexDigest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""Hexadecimal digits of a SHA-256. Scripts that verify copies on nodes contain such digests."""
Md5 = Annotated[str, StringConstraints(pattern=r"^md5:[0-9a-f]{32}$")]
UNSTAGED_FOLDERS = frozenset({".git", "__pycache__"})
"""Folders that programs change as they run. They are never part of an asset."""
HUB_KINDS = ("hub-model", "hub-dataset", "hub-tokenizer")

LAYOUT = "folder"
"""Source of a `made` asset that links the files of other assets. It needs no space unless the
recipe states some."""
HUB_ID = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,95}(/[A-Za-z0-9][A-Za-z0-9_.-]{0,95})?$"
"""Pattern of repository names on the hub. Old ones have no organization."""
_COMMIT = re.compile(r"[0-9a-f]{7,40}")


def plain_path(path: str) -> str:
    """Return `path` if it is relative, stays inside its folder and is in canonical form.

    Raises ValueError otherwise, and for paths with a folder of `UNSTAGED_FOLDERS`.
    """
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or not path.isprintable():
        raise ValueError("must be a relative path that stays inside its folder")
    if PurePosixPath(path).as_posix() != path:
        raise ValueError(f"must be written as {PurePosixPath(path).as_posix()}")
    if excluded := sorted(UNSTAGED_FOLDERS.intersection(parts)):
        raise ValueError(f"must not include {excluded[0]}, which programs change while they run")
    return path


def _address(text: str | None) -> str | None:
    """Return `text`; raise ValueError for URLs with credentials or an invalid port.

    A URL must be ASCII.
    """
    address = urlsplit(text) if text and "://" in text else None
    if address and (address.password or (address.username and address.username != "git")):
        raise ValueError("contains credentials; put them in ~/.netrc or the environment")
    if text and address and not text.isascii():
        raise ValueError("must be ASCII; other characters are written as %XX")
    try:
        _ = address and address.port
    except ValueError:
        raise ValueError("has an invalid port; allowed: 1 to 65535") from None
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
    "hub_id": ("made",),
}
"""Fields that apply to some kinds of assets only. They are refused for other kinds."""


class AssetFile(Value):
    """One file of a `url` asset."""

    path: InnerPath
    url: Annotated[str | None, AfterValidator(_address)] = None
    """URL of the file. Unset appends `path` to `source`."""
    bytes: NonNegativeInt | None = None
    digest: Sha256 | Md5 | None = None


class Asset(Value):
    """A model, data set, repository, file or container that a workload needs."""

    name: AssetName
    kind: AssetKind
    source: str
    """Repository on a hub, URL, image, or for `made` the converter that makes the asset."""
    revision: str | None = None
    """Commit, tag or branch. Unset takes the current one, which the manifest records."""
    bytes: NonNegativeInt | None = None
    """Size of all files if the source states it. Unset is unknown."""
    digest: Sha256 | None = None
    """Digest of the single file of a `url`, or of the manifest of a container."""
    include: tuple[str, ...] = ()
    """Patterns of the files to fetch from a hub or an `r2` list. Empty is all."""
    files: tuple[AssetFile, ...] = ()
    """Files of a `url` asset. Empty is the single file at `source`."""
    submodules: bool = False
    patches: tuple[str, ...] = ()
    """Unified diffs that are applied to a `git` asset in this order."""
    settings: dict[str, str | int | float | bool] = {}
    """Settings of the converter of a `made` asset."""
    needs: tuple[AssetName, ...] = ()
    """Other assets of the recipe from which this asset is made."""
    hub_id: Annotated[str | None, StringConstraints(pattern=HUB_ID)] = None
    """Id of a `made` asset in the hub cache, such as ORGANIZATION/NAME."""
    gate: str | None = None
    """Page on which access must be requested."""
    engines: tuple[str, ...] = ()
    """Engines that need the asset. Empty is all engines."""
    note: str = ""
    """Source of the size, and other remarks."""

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
            raise ValueError(f"files lists {sorted(twice)[0]} twice")
        if self.kind in HUB_KINDS and not re.fullmatch(HUB_ID, self.source):
            raise ValueError("source must be a repository on the hub: ORGANIZATION/NAME")
        if self.kind == "git" and not _COMMIT.fullmatch(self.revision or ""):
            raise ValueError("revision of a git asset must be a commit (7 to 40 digits)")
        if self.kind == "r2" and not self.source.endswith(".uri"):
            raise ValueError("source of an r2 asset must be the URL of a .uri file")
        return self

    @property
    def content(self) -> dict[str, object]:
        """The fields that determine the files of the asset, without names, sizes and notes."""
        labels = {"name", "bytes", "needs", "gate", "engines", "note"}
        unset = {"hub_id"} if self.hub_id is None else set[str]()
        return self.model_dump(mode="json", exclude=labels | unset)


class StagedFile(Value):
    """A file of a staged asset."""

    path: InnerPath
    bytes: NonNegativeInt
    sha256: HexDigest


class Manifest(Value):
    """manifest.json of a staged asset. It is written last, so an asset without it is not staged."""

    schema_version: Literal[1] = 1
    asset: Asset
    revision: str | None
    """Commit or digest that was fetched, if the source reports it."""
    bytes: NonNegativeInt
    sha256: HexDigest
    """SHA-256 over all paths and digests. Equal contents have equal values."""
    files: tuple[StagedFile, ...]
    origin: str
    """Address from which the asset was fetched, including mirrors, without credentials."""
    tool: str | None = None
    """Program that fetched the asset, if it is not part of Paceline."""
    staged_at: str
    """Time of staging, UTC."""
    seconds: float
    paceline_version: str


def content_digest(files: Iterable[StagedFile]) -> str:
    """Return the SHA-256 over sorted lines `sha256  path`, in the format of `sha256sum`."""
    lines = sorted(f"{file.sha256}  {file.path}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def asset_key(asset: Asset, assets: Mapping[str, Asset]) -> str:
    """Return eight hexadecimal digits that identify the contents of an asset.

    The contents of its dependencies count as well.
    """
    needed_keys = [asset_key(assets[name], assets) for name in asset.needs]
    text = json.dumps([asset.content, needed_keys], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def graph_problem(assets: Iterable[Asset]) -> str | None:
    """Return the first problem of the dependencies among `assets`; None if there is none.

    Problems are duplicate names, unknown dependencies and cycles.
    """
    by_name: dict[str, Asset] = {}
    for asset in assets:
        if asset.name in by_name:
            return f"assets: {asset.name} is declared twice"
        by_name[asset.name] = asset
    done_names: set[str] = set()
    while len(done_names) < len(by_name):
        for asset in by_name.values():
            if unknown := [name for name in asset.needs if name not in by_name]:
                return f"assets: {asset.name} needs {unknown[0]}, which is not declared"
        ready = {
            name for name, asset in by_name.items() if done_names.issuperset(asset.needs)
        } - done_names
        if not ready:
            cycle = ", ".join(sorted(set(by_name) - done_names))
            return f"assets: {cycle} depend on each other in a cycle"
        done_names |= ready
    return None


class RunInput(Value):
    """Input at one field of a run's settings: a file, the files of one prefix, or a folder."""

    field: str
    """Dotted name of the field, such as `data.path`. `data.text` is the text that was tokenized
    before the run."""
    path: str
    asset: AssetName | None = None
    """Staged asset that contains the input."""
    inside: InnerPath | Literal[""] = ""
    """Path inside that asset."""
    revision: str | None = None
    """Commit or digest of the asset, if its source reports one."""
    files: NonNegativeInt
    bytes: NonNegativeInt
    sha256: str | None
    """SHA-256 of a single file, or over sorted lines `sha256  path` of several files, with relative
    paths. None if the digest of any file is unknown."""

    def is_alike(self, other: RunInput) -> bool:
        """Return whether the contents are equal, by digest, or by size if neither input has one."""
        ours, theirs = ((i.sha256, i.files, i.bytes) for i in (self, other))
        return ours == theirs

    @property
    def identity(self) -> str:
        """Description of the input, independent of its location."""
        parts = [f"{self.asset}/{self.inside}".rstrip("/")] if self.asset else []
        parts += [f"revision {self.revision[:12]}"] if self.revision else []
        parts += [f"sha256 {self.sha256[:12]}"] if self.sha256 else []
        return ", ".join([*parts, f"{self.bytes:,} bytes"])


class RunInputs(Value):
    """inputs.json of a run folder: the inputs of the run, and the manifests of staged assets."""

    schema_version: Literal[1] = 1
    inputs: tuple[RunInput, ...]
    manifests: tuple[Manifest, ...] = ()
