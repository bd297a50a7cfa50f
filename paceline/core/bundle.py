"""bundle.json: the contents of an archive of one run."""

from __future__ import annotations

from typing import Literal

from paceline.core.assets import StagedFile
from paceline.core.result import Status
from paceline.core.value import Value


class LeftOut(Value):
    """A file of a run folder that is not included in a bundle."""

    path: str
    why: str


class Bundle(Value):
    """bundle.json, the first file of a bundle: every other file with size and SHA-256."""

    schema_version: Literal[1] = 1
    run: str
    """Folder of the run inside the archive."""
    created: str
    """Creation time of the run, ISO 8601, UTC."""
    status: Status
    paceline_version: str
    """Version of Paceline that measured the run."""
    sha256: str
    """SHA-256 over all paths and digests, as for a staged asset. Bundles of one run have the same
    value."""
    files: tuple[StagedFile, ...]
    redacted: tuple[str, ...] = ()
    """Files in which a secret was replaced. They differ from the files of the run folder."""
    left_out: tuple[LeftOut, ...] = ()
