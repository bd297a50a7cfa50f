"""What `paceline calibrate` leaves on a machine: rates, steps, and coefficients moved by them."""

from __future__ import annotations

import os
import platform
import re
from contextlib import suppress
from pathlib import Path
from typing import Literal

from paceline.core.errors import UserError
from paceline.core.hardware import Dtype, Peak
from paceline.core.units import counted
from paceline.core.value import Value
from paceline.estimate.fit.evidence import Evidence, EvidenceKind
from paceline.estimate.model.machine import Machine
from paceline.files import catalog
from paceline.files.documents import read_text

SCHEMA_VERSION = 1


class Placement(Value):
    """Rates of one process while so many of them work, each with its threads."""

    ranks: int
    threads: int
    flops_per_s: float
    """Of large products."""
    memory_bytes_per_s: float
    """Of copies, read and written together."""
    link_bytes_per_s: float | None
    """Of a large all-reduce, on the bus; None for one process."""


class CalibratedStep(Value):
    """A short training that was timed."""

    recipe: str
    layers: int
    layout: str
    ranks: int
    threads: int
    measured_s: float
    """Median of its steps but the first ones, each on its slowest rank."""
    n: int
    spread: float
    """1.4826 x MAD / median."""
    predicted_s: float
    """By the coefficients that these steps have moved."""


class About(Value):
    """What was calibrated, where and when."""

    schema_version: Literal[1] = SCHEMA_VERSION
    device: str
    """What the machine itself calls it."""
    kind: Literal["cpu", "cuda"]
    catalog_device: str
    dtype: Dtype
    host: str
    date: str
    """UTC, ISO 8601."""
    torch: str
    cores: int
    memory_bytes: float


class Calibration(About):
    """One device of one machine in one dtype."""

    placements: tuple[Placement, ...]
    probes: int
    """Observations beside the steps."""
    steps: tuple[CalibratedStep, ...]
    undetermined: tuple[str, ...]
    """Coefficients about which this said nothing new."""
    alike: tuple[tuple[str, str], ...]
    """Pairs of which it tells only how they act together."""
    evidence: Evidence

    def labelled_evidence(self) -> Evidence:
        """Its coefficients, entitled by where they were measured as seen from this machine."""
        where: EvidenceKind = "measured here" if self.host == platform.node() else "stored profile"
        title = f"{where}: {self.evidence.title}"
        return self.evidence.model_copy(update={"title": title, "provenance": where})

    def placement(self, ranks: int) -> Placement:
        """The rates of each of `ranks` processes.

        More than were measured share what the most of them had.
        """
        measured = {placement.ranks: placement for placement in self.placements}
        if ranks in measured:
            return measured[ranks]
        fewer = [count for count in measured if count < ranks]
        base = measured[max(fewer) if fewer else min(measured)]
        share = min(1.0, base.ranks * base.threads / (ranks * max(1, self.cores // ranks)))
        link = base.link_bytes_per_s
        return Placement(
            ranks=ranks,
            threads=max(1, self.cores // ranks),
            flops_per_s=base.flops_per_s * share,
            memory_bytes_per_s=base.memory_bytes_per_s * share,
            link_bytes_per_s=link * share if link else None,
        )


def folder() -> Path:
    """Where a user's calibrations lie: in $XDG_DATA_HOME, which is ~/.local/share by default."""
    home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(home) / "paceline" / "calibrations"


def file_of(device: str, dtype: Dtype) -> Path:
    """The file of one device in one dtype."""
    plain = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "device"
    return folder() / f"{plain}-{dtype}.json"


def read_calibration(path: Path) -> Calibration:
    """A calibration from a file; raises UserError when it holds none."""
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise _no_calibration(path) from error
    return parse_calibration(text, path)


def parse_calibration(text: str, path: Path) -> Calibration:
    """The calibration that a file's text is; raises UserError when it is none."""
    try:
        return Calibration.model_validate_json(text)
    except ValueError as error:
        raise _no_calibration(path) from error


def _no_calibration(path: Path) -> UserError:
    return UserError(str(path), "holds no calibration", remedy="`paceline calibrate` writes one")


def find(device: str, dtype: Dtype) -> Calibration | None:
    """The calibration of a device, by its own or its catalog name, in a dtype; None without one.

    Of several with one catalog name that of this machine, else the newest. Raises UserError where
    the device's own file holds none; other files that hold none are passed over.
    """
    path = file_of(device, dtype)
    if path.is_file():
        return read_calibration(path)
    stored: list[Calibration] = []
    for path in sorted(folder().glob(f"*-{dtype}.json")):
        with suppress(UserError):
            stored.append(read_calibration(path))
    same_device = [
        calibration
        for calibration in stored
        if calibration.catalog_device == device and calibration.kind == "cuda"
    ]
    return max(
        same_device,
        key=lambda calibration: (calibration.host == platform.node(), calibration.date),
        default=None,
    )


def cpu_machine(calibration: Calibration, ranks: int) -> Machine:
    """This machine's processor as `ranks` processes see it: each its share of rates and memory."""
    rates = calibration.placement(ranks)
    entry = catalog.find_device("cpu").device
    source = f"measured on {calibration.host}, {calibration.date}"
    device = entry.model_copy(
        update={
            "peaks": {calibration.dtype: Peak(flops_per_s=rates.flops_per_s, source=source)},
            "memory_bytes": calibration.memory_bytes / ranks,
            "memory_bytes_per_s": rates.memory_bytes_per_s,
        }
    )
    cores = calibration.cores
    notes = [
        f"{ranks} x {counted(rates.threads, 'thread')} on {counted(cores, 'core')} of "
        f"{calibration.device}"
    ]
    if ranks > cores:
        processes = counted(ranks, "process")
        notes.append(f"oversubscribed: {processes} share {counted(cores, 'core')}")
    link = rates.link_bytes_per_s or rates.memory_bytes_per_s
    return Machine(
        device=device,
        generation="cpu",
        domain=ranks,
        devices_per_node=ranks,
        intra_bytes_per_s=link,
        inter_bytes_per_s=link,
        power=1.0,
        notes=tuple(notes),
        cpu_oversubscription=max(1.0, ranks / cores),
    )
