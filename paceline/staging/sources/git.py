"""Code of a framework at one commit, fetched by git, with the recipe's patches."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from paceline.core.assets import Asset
from paceline.core.errors import SystemFaultError, UserError
from paceline.machines.programs import last_line, run_program
from paceline.staging.credentials import shown

_WHOLE = re.compile(r"[0-9a-f]{40}")
_ENVIRONMENT = {"GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "true", "LC_ALL": "C"}
"""Environment in which git fails instead of waiting for a log-in."""
_REFUSED = re.compile(
    r"Authentication failed|could not read Username|HTTP 40[13]|error: 40[13]|Permission denied"
)


def clone(asset: Asset, folder: Path, check: Callable[[], None]) -> str:
    """Check out a commit into an empty `folder` and return its full hash.

    Raises UserError if git is missing, a patch does not apply or access is refused, and
    SystemFaultError if the commit cannot be fetched. `check` is called regularly, and may raise.
    """
    if shutil.which("git") is None:
        raise UserError(f"git {asset.source}", "takes the program git", remedy="install git")
    revision = asset.revision or ""

    def git(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        command = ("git", "-C", str(folder), *arguments)
        return run_program(command, check, text, _ENVIRONMENT)

    git("init", "--quiet")
    git("remote", "add", "origin", asset.source)
    # A server may refuse to send a single commit, and does not accept an abbreviated hash.
    only = ("fetch", "--quiet", "--depth", "1", "origin", revision)
    if not _WHOLE.fullmatch(revision) or git(*only).returncode:
        _must(asset, git("fetch", "--quiet", "--tags", "origin", "+refs/heads/*:refs/origin/*"))
    _must(asset, git("checkout", "--quiet", "--detach", revision))
    commit = git("rev-parse", "HEAD").stdout.strip()
    if not commit.startswith(revision.lower()):
        # A tag or branch may have the name of an abbreviated hash.
        raise SystemFaultError(
            f"git {shown(asset.source) or asset.source}",
            f"takes {revision} for {commit[:12]}",
            remedy="state the whole commit, 40 digits",
        )
    if asset.submodules:
        _must(asset, git("submodule", "--quiet", "update", "--init", "--recursive"))
    for number, patch in enumerate(asset.patches, 1):
        done = git("apply", "--whitespace=nowarn", "-", text=patch)
        if done.returncode:
            raise UserError(
                f"git {shown(asset.source)}",
                f"patch {number} does not apply to {revision}: {last_line(done.stderr)}",
            )
    return commit


def _must(asset: Asset, done: subprocess.CompletedProcess[str]) -> None:
    if not done.returncode:
        return
    said = last_line(done.stderr)
    where = f"git {shown(asset.source) or asset.source}"
    if _REFUSED.search(done.stderr):
        raise UserError(
            where,
            f"access is refused: {said}",
            remedy="git takes credentials from its credential helper or ~/.netrc",
        )
    raise SystemFaultError(
        where, f"{asset.revision} cannot be had: {said}", remedy="run the command again"
    )
