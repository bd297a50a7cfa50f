"""Inputs of estimates on a device: its calibration, coefficients, and the machine's rates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.core.errors import UserError
from paceline.core.hardware import Cluster, Dtype
from paceline.core.units import pluralize
from paceline.estimate.calibrate.calibration import (
    Calibration,
    cpu_machine,
    find_calibration,
    parse_calibration,
)
from paceline.estimate.fit.evidence import (
    Evidence,
    invalid_evidence,
    parse_evidence,
    shipped_evidence,
)
from paceline.estimate.model.machine import Machine, machine
from paceline.files import catalog
from paceline.files.documents import parse_json, read_text
from paceline.machines.probe.inventory import cpu


def automatic_dtype(device: str) -> Dtype:
    """Return the dtype for `dtype: auto`: bf16, or fp32 if the device has no bf16."""
    if is_cpu(device):
        return "bf16" if cpu()["native_bf16"] else "fp32"
    return "fp32" if catalog.find_device(device).device.has_only_fp16 else "bf16"


def is_cpu(device: str) -> bool:
    """Return True if the name means this machine's CPU."""
    return catalog.find_device(device).device.family == "cpu"


def calibration_for(
    device: str, dtype: Dtype | Literal["auto"], label: str | None = None
) -> Calibration | None:
    """Return the user's calibration of a device in a dtype, None without one.

    `label` is the name that the device reports; None means this machine's CPU.
    """
    if dtype == "auto":
        dtype = automatic_dtype(device)
    if is_cpu(device):
        label = label or cpu()["model"]
    names = [label, device, catalog.find_device(device).device.name]
    calibrations = (find_calibration(name, dtype) for name in dict.fromkeys(names) if name)
    return next((calibration for calibration in calibrations if calibration), None)


def other_dtype_error(where: str, calibration: Calibration, dtype: Dtype) -> UserError:
    """Return the error for a CPU calibration in another dtype than the training run."""
    return UserError(
        where,
        f"was measured in {calibration.dtype}, but the training run uses {dtype}",
        allowed=f"a calibration in {dtype}",
    )


def evidence_for(device: str, dtype: Dtype | Literal["auto"], label: str | None = None) -> Evidence:
    """Return the device's calibrated coefficients in that dtype, else the shipped ones."""
    calibration = calibration_for(device, dtype, label)
    return calibration.labelled_evidence() if calibration else shipped_evidence()


def machine_for(
    cluster: Cluster,
    dtype: Dtype | Literal["auto"],
    device: str | None = None,
    cpu_calibration: Calibration | None = None,
) -> Machine:
    """Return the devices of a cluster with their links: a CPU by calibration, others by catalog.

    `device` is a more specific name than the cluster's, such as one with a power limit.
    `cpu_calibration` replaces the user's own calibration of a CPU. Raises UserError for a device or
    link that is not in the catalog, and for a CPU that is not calibrated for such a run.
    """
    if not is_cpu(cluster.device):
        return machine(
            device or cluster.device,
            cluster.intra_link,
            cluster.inter_link,
            cluster.devices_per_node,
        )
    dtype = automatic_dtype(cluster.device) if dtype == "auto" else dtype
    calibration = cpu_calibration if cpu_calibration and cpu_calibration.kind == "cpu" else None
    if calibration and calibration.dtype != dtype:
        raise other_dtype_error("this calibration", calibration, dtype)
    calibration = calibration or calibration_for(cluster.device, dtype, cluster.device_label)
    if calibration is None:
        raise UserError(
            "this CPU",
            f"is not calibrated in {dtype}",
            remedy=f"run `paceline probe calibrate --dtype {dtype}`",
        )
    if cluster.nodes > 1:
        raise UserError("a CPU's calibration", "does not cover the network between hosts")
    threads = calibration.placement(cluster.world_size).threads
    if cluster.threads_per_device not in (None, threads):
        raise UserError(
            "this CPU",
            f"is calibrated with {pluralize(threads, 'thread')} per process, not "
            f"{cluster.threads_per_device}",
        )
    return cpu_machine(calibration, cluster.world_size)


@dataclass(frozen=True)
class FileEvidence:
    """Coefficients from a file, with the calibration if the file is one."""

    path: Path | None
    """None for coefficients that were adjusted to measured steps (--like)."""
    evidence: Evidence
    calibration: Calibration | None = None
    """Calibration of a device; None if the file has only coefficients, valid for any device."""

    def of(self, device: str, dtype: Dtype | Literal["auto"]) -> Evidence:
        """Return the coefficients for a training run on a device.

        Raises UserError for a calibration of another kind of device, for a CPU's in another dtype,
        and for a CPU with coefficients that were adjusted to steps of GPUs.
        """
        calibration = self.calibration
        if self.path is None and is_cpu(device):
            raise UserError(
                "--like",
                "adjusts estimates of GPUs; those of a CPU follow its calibration",
                remedy="`paceline probe calibrate`",
            )
        if calibration is None:
            return self.evidence
        if (calibration.kind == "cpu") != is_cpu(device):
            raise self._other_kind_error(device)
        dtype = automatic_dtype(device) if dtype == "auto" else dtype
        if calibration.kind == "cpu" and calibration.dtype != dtype:
            raise other_dtype_error(self._where, calibration, dtype)
        return self.evidence

    def of_gpus(self) -> Evidence:
        """Return the coefficients for any GPU; raises UserError for a CPU's calibration."""
        if self.calibration and self.calibration.kind == "cpu":
            raise self._other_kind_error("a GPU")
        return self.evidence

    @property
    def _where(self) -> str:
        return f"--calibration {self.path}"

    def _other_kind_error(self, device: str) -> UserError:
        calibrated_device = self.calibration.device if self.calibration else ""
        return UserError(
            self._where,
            f"was measured on {calibrated_device} and does not apply to {device}",
            allowed="a calibration of the same kind of device",
        )


def read_evidence(path: Path) -> FileEvidence:
    """Read the coefficients from a file.

    Raises UserError for a file without coefficients, and for an invalid calibration, such as one of
    a later version.
    """
    try:
        text = read_text(path)
        is_calibration = "evidence" in parse_json(text)
    except (OSError, ValueError, TypeError) as error:
        raise invalid_evidence(path) from error
    if not is_calibration:
        return FileEvidence(path, parse_evidence(text, path))
    calibration = parse_calibration(text, path)
    return FileEvidence(path, calibration.labelled_evidence(), calibration)


def file_or_device_evidence(
    file: FileEvidence | None,
    device: str,
    dtype: Dtype | Literal["auto"],
    label: str | None = None,
) -> Evidence:
    """Return a file's coefficients, else those of `evidence_for`.

    Raises UserError as `FileEvidence.of` does.
    """
    return file.of(device, dtype) if file else evidence_for(device, dtype, label)
