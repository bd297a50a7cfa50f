"""Links to staged models and data sets by their hub ids, as programs expect them offline.

hub/          a cache of the Hugging Face Hub, for HF_HUB_CACHE
repositories/ one link per id, such as `repositories/Dahoas/rm-static`. Offline, `datasets` loads
              files by their path only, and some programs choose their reader by that path.

The links are relative, so a stage folder may be moved or copied.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.assets import Asset, Manifest
from paceline.files.documents import write_text
from paceline.files.staged import (
    CONTENT_FOLDER,
    HUB_FOLDER,
    REPOSITORIES_FOLDER,
    hub_id,
    read_manifest,
)

_COMMIT, _BRANCH = re.compile(r"[0-9a-f]{40}"), re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class HubLinks:
    """Links and references of a hub cache, by their path in the stage folder."""

    links: dict[str, str] = field(default_factory=dict[str, str])
    """Relative target of each link."""
    references: dict[str, str] = field(default_factory=dict[str, str])
    """Commit of each branch or tag."""

    def write(self, root: Path) -> None:
        """Write what is missing or different in a stage folder; raises OSError."""
        for path, target in self.links.items():
            link = root / path
            if not (link.is_symlink() and str(link.readlink()) == target):
                link.parent.mkdir(parents=True, exist_ok=True)
                part = link.with_name(f".{link.name}.{os.getpid()}")
                part.unlink(missing_ok=True)
                part.symlink_to(target)
                part.replace(link)
        for path, commit in self.references.items():
            file = root / path
            if not (file.is_file() and file.read_bytes() == commit.encode()):
                file.parent.mkdir(parents=True, exist_ok=True)
                write_text(file, commit)

    def script(self, root: str) -> str:
        """Return bash lines that write the same below a stage folder on another machine."""
        folders = sorted({str(Path(path).parent) for path in (*self.links, *self.references)})
        if not folders:
            return ""
        lines = [f"cd -- {shlex.quote(root)}", shlex.join(("mkdir", "-p", *folders))]
        lines += [shlex.join(("ln", "-sfn", target, path)) for path, target in self.links.items()]
        lines += [
            f"printf %s {commit} > {shlex.quote(path)}" for path, commit in self.references.items()
        ]
        return " &&\n".join(lines)


def hub_links(folders: Iterable[Path]) -> HubLinks:
    """Return the links of all staged assets among `folders` that have a hub id."""
    result = HubLinks()
    for folder in folders:
        manifest = read_manifest(folder)
        name = manifest and hub_id(manifest.asset)
        if manifest and name:
            _add_links(result, manifest.asset, name, manifest, folder.name)
    return result


def _add_links(result: HubLinks, asset: Asset, name: str, manifest: Manifest, folder: str) -> None:
    kind = "datasets" if asset.kind == "hub-dataset" else "models"
    repository = f"{HUB_FOLDER}/{kind}--{name.replace('/', '--')}"
    commit = _commit(manifest)
    paths = {f"{repository}/snapshots/{commit}/{f.path}": f.path for f in manifest.files}
    if asset.kind != "hub-tokenizer":  # it would hide the complete model of the same id
        paths[f"{REPOSITORIES_FOLDER}/{name}"] = ""
    for link, path in paths.items():
        target = f"{folder}/{CONTENT_FOLDER}/{path}".rstrip("/")
        result.links[link] = os.path.relpath(target, Path(link).parent)
    # A recipe pins one revision of a repository, so a program that asks for none gets that one.
    branch = asset.revision or "main"
    for reference in ("main", *([branch] if _BRANCH.fullmatch(branch) else [])):
        result.references[f"{repository}/refs/{reference}"] = commit


def _commit(manifest: Manifest) -> str:
    """Return the commit of an asset; a made asset has the digest of its content instead."""
    revision = manifest.revision or ""
    return revision if _COMMIT.fullmatch(revision) else manifest.sha256[:40]
