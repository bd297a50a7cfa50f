"""Inputs of a run other than its recipe (data, tokenizers, weights), with their digests."""

from __future__ import annotations

from typing import Literal

from paceline.core.assets import AssetName, InnerPath, Manifest
from paceline.core.value import NonNegativeInt, Value


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
