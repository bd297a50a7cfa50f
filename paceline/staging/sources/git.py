"""Code of a framework at one commit, fetched by git, with the recipe's patches."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from paceline.core.assets import Asset
from paceline.core.errors import SystemFaultError, UserError
from paceline.files.programs import last_line, run_program
from paceline.staging.credentials import redact_url

_FULL_HASH = re.compile(r"[0-9a-f]{40}")
_ENVIRONMENT = {"GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "true", "LC_ALL": "C"}
"""Environment in which git fails instead of asking for a login."""
_ACCESS_DENIED = re.compile(
    r"Authentication failed|could not read Username|HTTP 40[13]|error: 40[13]|Permission denied"
)


def clone(asset: Asset, folder: Path, check: Callable[[], None]) -> str:
    """Check out a commit into an empty `folder` and return its full hash.

    Raises UserError if git is missing, a patch does not apply or access is denied, and
    SystemFaultError if the commit cannot be fetched. `check` is called regularly, and may raise.
    """
    if shutil.which("git") is None:
        raise UserError(
            f"git {asset.source}", "requires git, which is not installed", remedy="install git"
        )
    revision = asset.revision or ""

    def git(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        command = ("git", "-C", str(folder), *arguments)
        return run_program(command, check, text, {**os.environ, **_ENVIRONMENT})

    git("init", "--quiet")
    git("remote", "add", "origin", asset.source)
    # A server may refuse to send a single commit, and does not accept an abbreviated hash.
    only = ("fetch", "--quiet", "--depth", "1", "origin", revision)
    if not _FULL_HASH.fullmatch(revision) or git(*only).returncode:
        _require_success(
            asset, git("fetch", "--quiet", "--tags", "origin", "+refs/heads/*:refs/origin/*")
        )
    _require_success(asset, git("checkout", "--quiet", "--detach", revision))
    commit = git("rev-parse", "HEAD").stdout.strip()
    if not commit.startswith(revision.lower()):
        # A tag or branch may have the name of an abbreviated hash.
        raise SystemFaultError(
            f"git {redact_url(asset.source) or asset.source}",
            f"resolves {revision} to {commit[:12]}",
            remedy="give the full commit hash, 40 digits",
        )
    if asset.submodules:
        _require_success(asset, git("submodule", "--quiet", "update", "--init", "--recursive"))
    for number, patch in enumerate(asset.patches, 1):
        result = git("apply", "--whitespace=nowarn", "-", text=patch)
        if result.returncode:
            raise UserError(
                f"git {redact_url(asset.source)}",
                f"patch {number} does not apply to {revision}: {last_line(result.stderr)}",
            )
    return commit


def _require_success(asset: Asset, result: subprocess.CompletedProcess[str]) -> None:
    if not result.returncode:
        return
    message = last_line(result.stderr)
    where = f"git {redact_url(asset.source) or asset.source}"
    if _ACCESS_DENIED.search(result.stderr):
        raise UserError(
            where,
            f"access denied: {message}",
            remedy="git reads credentials from its credential helper or ~/.netrc",
        )
    raise SystemFaultError(
        where, f"{asset.revision} cannot be fetched: {message}", remedy="run the command again"
    )
