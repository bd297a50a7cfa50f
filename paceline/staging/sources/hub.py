"""Models, tokenizers and data sets of the Hugging Face Hub, or of a mirror ($HF_ENDPOINT).

Lists and files are downloaded by the same code as for other sources, so all have the same limits,
and are resumed and verified in the same way.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.core.assets import HUB_KINDS, UNSTAGED_FOLDERS, Asset
from paceline.core.errors import SystemFaultError, UserError
from paceline.core.text import one_line
from paceline.core.units import LARGEST_INT
from paceline.files.documents import parse_json, read_text
from paceline.files.hf_hub import HUB, hub_endpoint
from paceline.staging.connection import (
    StopSignal,
    access_denied,
    read_small,
    with_retries,
)
from paceline.staging.transfer import RemoteFile, SourceListing, inner_path, is_included

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "spiece.model",
    "config.json",
    "generation_config.json",
)
"""Name patterns of a tokenizer's files."""
WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".ckpt")


def require_library(asset: Asset) -> None:
    """Raise UserError if the hub's library is not installed."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise UserError(
            f"{asset.kind} {asset.source}",
            "requires huggingface_hub, which is not installed",
            remedy="pip install 'paceline[stage]'",
        )


def list_hub(asset: Asset, stop: StopSignal) -> SourceListing:
    """Return the files of a repository at the current commit of its revision.

    Raises UserError if access is denied, and SystemFaultError if there is no such repository.
    """
    folder = "datasets/" if asset.kind == "hub-dataset" else ""
    where = f"{hub_endpoint()}/{folder}{asset.source}"
    listing = with_retries(lambda: _listing(asset), where, stop)
    selection = [file for file in listing.siblings if _is_selected(asset, file.path)]
    if not selection:
        raise SystemFaultError(
            f"{asset.kind} {asset.source}",
            f"has no file that matches {', '.join(asset.include or TOKENIZER_FILES)}",
        )
    files = [
        RemoteFile(
            path=inner_path(file.path, asset),
            url=f"{where}/resolve/{listing.sha}/{quote(file.path)}",
            bytes=file.size,
            sha256=file.lfs.sha256 if file.lfs else None,
            git_sha1=file.blob_id if not file.lfs and file.size is not None else None,
        )
        for file in selection
    ]
    return SourceListing(tuple(files), f"{hub_endpoint()}/{asset.source}", listing.sha)


def copy_cached(asset: Asset, target: Path, check: Callable[[], None] = lambda: None) -> str | None:
    """Copy an asset from the hub's local cache, without network; return its commit.

    The content of `done` is replaced. Raises UserError before that if the cached copy is
    incomplete.
    """
    require_library(asset)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        snapshot = snapshot_download(
            asset.source,
            repo_type=_repo_type(asset),
            revision=asset.revision,
            allow_patterns=list(_patterns(asset)) or None,
            local_files_only=True,
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError):
        raise UserError(
            f"{asset.kind} {asset.source}",
            "is not in this machine's hub cache, and HF_HUB_OFFLINE forbids downloads",
            remedy="unset HF_HUB_OFFLINE, set HF_ENDPOINT to a mirror, or copy a stage folder",
        ) from None
    folder = Path(str(snapshot))
    files = (file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    paths = sorted(path for path in files if _is_selected(asset, path))
    if gap := _missing_content(asset, folder, paths):
        raise UserError(
            f"{asset.kind} {asset.source}",
            f"is incomplete in this machine's hub cache: {gap}",
            remedy="download it once while online, or copy a stage folder",
        )
    shutil.rmtree(target, ignore_errors=True)
    for path in paths:
        check()
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / path, target / path)
    return folder.name


def _missing_content(asset: Asset, folder: Path, paths: Sequence[str]) -> str | None:
    """Return what a cached snapshot lacks, or why that is unknown; None if it is complete."""
    listing = folder.parents[1] / "trees" / f"{folder.name}.json"
    if listing.is_file() and paths:
        return None  # The library has already compared the snapshot with this listing.
    required_paths = {path for path in asset.include if not set("*?[") & set(path)}
    for index in (path for path in paths if path.endswith(".index.json")):
        required_paths.update(path for path in _indexed(folder, index) if _is_selected(asset, path))
    if missing := sorted(required_paths.difference(paths)):
        return f"{', '.join(missing[:3])} {'are' if missing[1:] else 'is'} missing"
    if asset.kind == "hub-dataset":
        return "the list of the data set's files is missing"
    if asset.kind == "hub-tokenizer":
        essential = asset.include or ("*tokenizer.*", "vocab*", "spiece.model")
        return None if any(is_included(path, essential) for path in paths) else "no tokenizer found"
    takes_weights = any(p.endswith((*WEIGHT_ENDINGS, "*")) for p in asset.include or ("*",))
    has_weights = any(path.endswith(WEIGHT_ENDINGS) for path in paths)
    return "no weights found" if not paths or (takes_weights and not has_weights) else None


def _indexed(folder: Path, index: str) -> set[str]:
    """Return the weight files listed in an index."""
    try:
        names = set(parse_json(read_text(folder / index))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return set()
    return {(PurePosixPath(index).parent / str(name)).as_posix() for name in names}


class _LargeFile(BaseModel):
    """Pointer of a file that the hub stores apart."""

    model_config = ConfigDict(frozen=True)

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _HubFile(BaseModel):
    """File of a repository."""

    model_config = ConfigDict(frozen=True)

    path: str = Field(alias="rfilename")
    size: Annotated[int, Field(ge=0, le=LARGEST_INT)] | None = None
    blob_id: Annotated[str, Field(pattern="^[0-9a-f]{40}$")] | None = Field(None, alias="blobId")
    lfs: _LargeFile | None = None


class _Listing(BaseModel):
    """The hub's answer about one commit of a repository."""

    model_config = ConfigDict(frozen=True)

    sha: Annotated[str, Field(pattern="^[0-9a-f]{40}$")]
    siblings: tuple[_HubFile, ...] = ()


def _listing(asset: Asset) -> _Listing:
    """Return the files of a repository; raises TransientError if a retry may succeed."""
    revision = f"/revision/{quote(asset.revision, safe='')}" if asset.revision else ""
    url = f"{hub_endpoint()}/api/{_repo_type(asset)}s/{asset.source}{revision}?blobs=true"
    where = f"{asset.kind} {asset.source}"
    try:
        return _Listing.model_validate_json(read_small(url, access_page(asset)))
    except UserError as error:
        if "HTTP 401" not in error.what:
            raise
        why = "HTTP 401: a token is needed, or the repository does not exist"
        raise access_denied(where, why, access_page(asset)) from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        what = f"has an invalid list of files: {field} {first['msg']}"
        raise SystemFaultError(where, one_line(what)[:300]) from None


def access_page(asset: Asset) -> str | None:
    """Return the page where access to an asset is requested; None if it is unknown."""
    if asset.gate or asset.kind not in HUB_KINDS:
        return asset.gate
    folder = "datasets/" if asset.kind == "hub-dataset" else ""
    return f"{HUB}/{folder}{asset.source}"


def _repo_type(asset: Asset) -> str:
    return "dataset" if asset.kind == "hub-dataset" else "model"


def _patterns(asset: Asset) -> Iterable[str]:
    return asset.include or (TOKENIZER_FILES if asset.kind == "hub-tokenizer" else ())


def _is_selected(asset: Asset, path: str) -> bool:
    if path == ".gitattributes" or UNSTAGED_FOLDERS.intersection(PurePosixPath(path).parts):
        return False
    return is_included(path, _patterns(asset))
