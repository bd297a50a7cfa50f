"""Models, tokenizers and data sets of the Hugging Face Hub, or of a mirror ($HF_ENDPOINT).

The hub's library lists the files of a commit and provides the token. Files are downloaded by the
same code as for other sources, so all are resumed and verified in the same way.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import httpx2

from paceline.core.assets import HUB_KINDS, UNSTAGED_FOLDERS, Asset
from paceline.core.errors import PacelineError, SystemFaultError, UserError
from paceline.files.hf_hub import HUB, hub_endpoint
from paceline.staging.connection import (
    StopSignal,
    TransientError,
    access_denied,
    error_for_status,
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
TIMEOUT_S = 30.0


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
    require_library(asset)
    info: Any = with_retries(lambda: _info(asset), f"{hub_endpoint()}/{asset.source}", stop)
    from huggingface_hub import hf_hub_url

    selection = [file for file in info.siblings or () if _is_selected(asset, file.rfilename)]
    if not selection:
        raise SystemFaultError(
            f"{asset.kind} {asset.source}",
            f"has no file that matches {', '.join(asset.include or TOKENIZER_FILES)}",
        )
    files = [
        RemoteFile(
            path=inner_path(file.rfilename, asset),
            url=hf_hub_url(
                asset.source,
                file.rfilename,
                repo_type=_repo_type(asset),
                revision=info.sha,
                endpoint=hub_endpoint(),
            ),
            bytes=file.size,
            sha256=file.lfs.sha256 if file.lfs else None,
            git_sha1=file.blob_id if not file.lfs and file.size is not None else None,
        )
        for file in selection
    ]
    return SourceListing(tuple(files), f"{hub_endpoint()}/{asset.source}", info.sha)


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
        names = set(json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return set()
    return {(PurePosixPath(index).parent / str(name)).as_posix() for name in names}


def _info(asset: Asset) -> Any:
    """Return the hub's metadata of a repository; raises TransientError if a retry may succeed."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

    api = HfApi(endpoint=hub_endpoint(), library_name="paceline")
    where = f"{asset.kind} {asset.source}"
    try:
        return api.repo_info(
            asset.source,
            repo_type=_repo_type(asset),
            revision=asset.revision,
            files_metadata=True,
            timeout=TIMEOUT_S,
        )
    except GatedRepoError:
        raise _access_denied(asset, "gated: accept its license first") from None
    except HfHubHTTPError as error:
        raise _status_error(asset, where, error.response) from None
    except (httpx2.RequestError, OSError):
        raise TransientError("does not respond") from None
    except Exception as error:  # the library's own exceptions differ between its versions
        raise SystemFaultError(where, f"cannot be listed ({type(error).__name__})") from None


def _status_error(asset: Asset, where: str, response: Any) -> Exception:
    """Return the error for an HTTP status; without a token, 401 may also mean "not found"."""
    status = getattr(response, "status_code", None)
    if status is None:
        return TransientError("does not respond")
    if status == 401:
        return _access_denied(
            asset, "HTTP 401: a token is needed, or the repository does not exist"
        )
    if status == 403:
        return _access_denied(asset, "HTTP 403")
    wait = response.headers.get("Retry-After")
    return error_for_status(int(status), where, asset.gate, wait)


def access_page(asset: Asset) -> str | None:
    """Return the page where access to an asset is requested; None if it is unknown."""
    if asset.gate or asset.kind not in HUB_KINDS:
        return asset.gate
    folder = "datasets/" if asset.kind == "hub-dataset" else ""
    return f"{HUB}/{folder}{asset.source}"


def _access_denied(asset: Asset, why: str) -> PacelineError:
    return access_denied(f"{asset.kind} {asset.source}", why, access_page(asset))


def _repo_type(asset: Asset) -> str:
    return "dataset" if asset.kind == "hub-dataset" else "model"


def _patterns(asset: Asset) -> Iterable[str]:
    return asset.include or (TOKENIZER_FILES if asset.kind == "hub-tokenizer" else ())


def _is_selected(asset: Asset, path: str) -> bool:
    if path == ".gitattributes" or UNSTAGED_FOLDERS.intersection(PurePosixPath(path).parts):
        return False
    return is_included(path, _patterns(asset))
