"""bundle.json: what an archive of one run holds."""

from __future__ import annotations

from typing import Literal

from paceline.core.assets import StagedFile
from paceline.core.result import Status
from paceline.core.value import Value


class LeftOut(Value):
    """Something of a run folder that is in no bundle."""

    path: str
    why: str


class Bundle(Value):
    """bundle.json, the first file of a bundle: every other file with its size and SHA-256."""

    schema_version: Literal[1] = 1
    run: str
    """The folder in the archive that holds the run."""
    created: str
    """When the run was, ISO 8601, UTC."""
    status: Status
    paceline_version: str
    """By which the run was measured."""
    sha256: str
    """Of all paths and digests together, as of a staged asset: bundles of one run have one."""
    files: tuple[StagedFile, ...]
    redacted: tuple[str, ...] = ()
    """Files in which a secret was replaced: they are not byte by byte those of the run folder."""
    left_out: tuple[LeftOut, ...] = ()
