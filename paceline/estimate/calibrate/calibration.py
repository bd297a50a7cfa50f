"""Result of `paceline probe calibrate`: rates, steps, and the coefficients fitted to them."""

from __future__ import annotations

import os
import platform
import re
from contextlib import suppress
from pathlib import Path
from typing import Literal

from paceline.core.errors import UserError
from paceline.core.hardware import Dtype, Peak
from paceline.core.units import pluralize
from paceline.core.value import Value
from paceline.estimate.fit.evidence import Evidence, EvidenceKind
from paceline.estimate.model.machine import Machine
from paceline.files import catalog
from paceline.files.documents import read_text

SCHEMA_VERSION = 1


class Placement(Value):
    """Rates of one process while `ranks` processes run, each with its threads."""

    ranks: int
    """Number of processes that run at the same time."""
    threads: int
    """Threads per process."""
    flops_per_s: float
    """FLOP/s of large GEMMs."""
    memory_bytes_per_s: float
    """Bytes/s of memory copies, read and written together."""
    link_bytes_per_s: float | None
    """Bus bandwidth of a large all-reduce in bytes/s; None for one process."""


class CalibratedStep(Value):
    """Timed short training run."""

    recipe: str
    """Name of the recipe."""
    layers: int
    """Layers of the shortened model."""
    layout: str
    """Description of the layout."""
    ranks: int
    """Number of processes."""
    threads: int
    """Threads per process."""
    measured_s: float
    """Median step time in seconds without the first steps, each step on its slowest rank."""
    n: int
    """Number of measured steps."""
    spread: float
    """1.4826 x MAD / median."""
    predicted_s: float
    """Step time in seconds that the calibrated coefficients predict."""


class About(Value):
    """Device, place and date of a calibration."""

    schema_version: Literal[1] = SCHEMA_VERSION
    device: str
    """Name of the device as the machine reports it."""
    kind: Literal["cpu", "cuda"]
    catalog_device: str
    """Name of the device in the catalog."""
    dtype: Dtype
    """Compute dtype of probes and steps."""
    host: str
    """Host name of the machine."""
    date: str
    """Date and time in UTC, ISO 8601."""
    torch: str
    """PyTorch version."""
    cores: int
    """Usable CPU cores."""
    memory_bytes: float
    """Memory of the machine in bytes."""


class Calibration(About):
    """Calibration of one device of one machine in one dtype."""

    placements: tuple[Placement, ...]
    """Rates for each measured number of processes."""
    probes: int
    """Number of probe observations in addition to the steps."""
    steps: tuple[CalibratedStep, ...]
    """Timed short training runs."""
    undetermined_coefficients: tuple[str, ...]
    """Coefficients that this calibration did not determine."""
    inseparable_coefficients: tuple[tuple[str, str], ...]
    """Pairs of coefficients of which only the combined effect is determined."""
    evidence: Evidence
    """Coefficients fitted to the probes and steps."""

    def labelled_evidence(self) -> Evidence:
        """Return the coefficients with a title that states where they were measured."""
        where: EvidenceKind = "measured here" if self.host == platform.node() else "stored profile"
        title = f"{where}: {self.evidence.title}"
        return self.evidence.model_copy(update={"title": title, "provenance": where})

    def placement(self, ranks: int) -> Placement:
        """Return the rates of each of `ranks` processes.

        More processes than were measured share the rates of the largest measured number.
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


def calibrations_folder() -> Path:
    """Return the folder of a user's calibrations in $XDG_DATA_HOME (default ~/.local/share)."""
    home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(home) / "paceline" / "calibrations"


def calibration_path(device: str, dtype: Dtype) -> Path:
    """Return the file of one device in one dtype."""
    plain = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "device"
    return calibrations_folder() / f"{plain}-{dtype}.json"


def read_calibration(path: Path) -> Calibration:
    """Read a calibration from a file; raises UserError if the file has none."""
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise _no_calibration(path) from error
    return parse_calibration(text, path)


def parse_calibration(text: str, path: Path) -> Calibration:
    """Parse a calibration from a file's text; raises UserError if it is not one."""
    try:
        return Calibration.model_validate_json(text)
    except ValueError as error:
        raise _no_calibration(path) from error


def _no_calibration(path: Path) -> UserError:
    return UserError(
        str(path),
        "does not contain a calibration",
        remedy="create one with `paceline probe calibrate`",
    )


def find_calibration(device: str, dtype: Dtype) -> Calibration | None:
    """Return the calibration of a device by its own or its catalog name, None without one.

    If several have the same catalog name, this machine's counts first, then the newest. Raises
    UserError if the device's own file has no calibration; other such files are skipped.
    """
    path = calibration_path(device, dtype)
    if path.is_file():
        return read_calibration(path)
    calibrations: list[Calibration] = []
    for path in sorted(calibrations_folder().glob(f"*-{dtype}.json")):
        with suppress(UserError):
            calibrations.append(read_calibration(path))
    same_device = [
        calibration
        for calibration in calibrations
        if calibration.catalog_device == device and calibration.kind == "cuda"
    ]
    return max(
        same_device,
        key=lambda calibration: (calibration.host == platform.node(), calibration.date),
        default=None,
    )


def cpu_machine(calibration: Calibration, ranks: int) -> Machine:
    """Return this machine's CPU for `ranks` processes, each with its share of rates and memory."""
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
        f"{ranks} x {pluralize(rates.threads, 'thread')} on {pluralize(cores, 'core')} of "
        f"{calibration.device}"
    ]
    if ranks > cores:
        processes = pluralize(ranks, "process")
        notes.append(f"oversubscribed: {processes} share {pluralize(cores, 'core')}")
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
