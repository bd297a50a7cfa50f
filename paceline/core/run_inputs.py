"""What a run read beside its recipe: data, tokenizers, weights, each with what it was."""

from __future__ import annotations

from typing import Literal

from paceline.core.assets import AssetName, InnerPath, Manifest
from paceline.core.value import NonNegativeInt, Value


class RunInput(Value):
    """What one field of a run's settings names: a file, the files of one prefix, or a folder."""

    field: str
    """Dotted, as `data.path`; `data.text` is what tokens were made of before the run."""
    path: str
    asset: AssetName | None = None
    """The staged asset that it lies in."""
    inside: InnerPath | Literal[""] = ""
    """Its path inside that asset."""
    revision: str | None = None
    """The asset's commit or digest, where its source told one."""
    files: NonNegativeInt
    bytes: NonNegativeInt
    sha256: str | None
    """Of the only file, of several over sorted lines `sha256  path`, with paths inside of what was
    read; None where nobody knows it of them all."""

    def is_alike(self, other: RunInput) -> bool:
        """Whether it has the content of `other`: by digest, by size alone where neither has one."""
        ours, theirs = ((i.sha256, i.files, i.bytes) for i in (self, other))
        return ours == theirs

    @property
    def identity(self) -> str:
        """What it is wherever it lies, for people."""
        parts = [f"{self.asset}/{self.inside}".rstrip("/")] if self.asset else []
        parts += [f"revision {self.revision[:12]}"] if self.revision else []
        parts += [f"sha256 {self.sha256[:12]}"] if self.sha256 else []
        return ", ".join([*parts, f"{self.bytes:,} bytes"])


class RunInputs(Value):
    """inputs.json of a run folder: what the run read, and the manifests of what was staged."""

    schema_version: Literal[1] = 1
    inputs: tuple[RunInput, ...]
    manifests: tuple[Manifest, ...] = ()
