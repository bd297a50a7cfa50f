"""What estimates on a device rest on: its calibration, coefficients, and the machine's rates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.core.errors import UserError
from paceline.core.hardware import Cluster, Dtype
from paceline.core.units import counted
from paceline.estimate.calibrate.calibration import (
    Calibration,
    cpu_machine,
    find,
    parse_calibration,
)
from paceline.estimate.fit.evidence import Evidence, no_evidence, parse_evidence, shipped
from paceline.estimate.model.machine import Machine, machine
from paceline.files import catalog
from paceline.files.documents import parse_json, read_text
from paceline.machines.probe.inventory import cpu


def automatic_dtype(device: str) -> Dtype:
    """What `dtype: auto` is estimated and trained in: bf16, or fp32 where devices have no bf16."""
    if is_cpu(device):
        return "bf16" if cpu()["native_bf16"] else "fp32"
    return "fp32" if catalog.find_device(device).device.has_only_fp16 else "bf16"


def is_cpu(device: str) -> bool:
    """Whether the name stands for the processor of this machine."""
    return catalog.find_device(device).device.family == "cpu"


def calibration_for(
    device: str, dtype: Dtype | Literal["auto"], label: str | None = None
) -> Calibration | None:
    """The user's calibration of a device in a dtype, None without one.

    `label` is what the device calls itself where it was seen; None is this machine's processor.
    """
    if dtype == "auto":
        dtype = automatic_dtype(device)
    if is_cpu(device):
        label = label or cpu()["model"]
    names = [label, device, catalog.find_device(device).device.name]
    calibrations = (find(name, dtype) for name in dict.fromkeys(names) if name)
    return next((calibration for calibration in calibrations if calibration), None)


def of_other_dtype(where: str, found: Calibration, dtype: Dtype) -> UserError:
    """That a processor's rates and coefficients are of another dtype than the training."""
    return UserError(
        where,
        f"is in {found.dtype}, and the training in {dtype}",
        allowed=f"a calibration in {dtype}",
    )


def evidence_for(device: str, dtype: Dtype | Literal["auto"], label: str | None = None) -> Evidence:
    """The device's own coefficients where it is calibrated in that dtype, else those shipped."""
    calibration = calibration_for(device, dtype, label)
    return calibration.labelled_evidence() if calibration else shipped()


def machine_for(
    cluster: Cluster,
    dtype: Dtype | Literal["auto"],
    device: str | None = None,
    given: Calibration | None = None,
) -> Machine:
    """The devices of a cluster with their links: a processor by its calibration, others by catalog.

    `device` is a name that says more than the cluster's, such as a power limit; `given` a
    processor's calibration, where it is not the user's own. Raises UserError for a device or link
    in no catalog, and for a processor that is not calibrated for such a run.
    """
    if not is_cpu(cluster.device):
        return machine(
            device or cluster.device,
            cluster.intra_link,
            cluster.inter_link,
            cluster.devices_per_node,
        )
    dtype = automatic_dtype(cluster.device) if dtype == "auto" else dtype
    calibration = given if given and given.kind == "cpu" else None
    if calibration and calibration.dtype != dtype:
        raise of_other_dtype("this calibration", calibration, dtype)
    calibration = calibration or calibration_for(cluster.device, dtype, cluster.device_label)
    if calibration is None:
        raise UserError(
            "this processor", f"is not calibrated in {dtype} (`paceline calibrate` measures it)"
        )
    if cluster.nodes > 1:
        raise UserError("a processor's calibration", "says nothing of the network between hosts")
    threads = calibration.placement(cluster.world_size).threads
    if cluster.threads_per_device not in (None, threads):
        raise UserError(
            "this processor",
            f"is calibrated with {counted(threads, 'thread')} a process, not "
            f"{cluster.threads_per_device}",
        )
    return cpu_machine(calibration, cluster.world_size)


@dataclass(frozen=True)
class GivenEvidence:
    """What such a file holds."""

    path: Path
    evidence: Evidence
    calibration: Calibration | None = None
    """None where the file holds coefficients alone, which are then of no one device."""

    def of(self, device: str, dtype: Dtype | Literal["auto"]) -> Evidence:
        """Its coefficients for a training on a device.

        Raises UserError for a calibration of another kind of device, and for a processor's in
        another dtype.
        """
        found = self.calibration
        if found is None:
            return self.evidence
        if (found.kind == "cpu") != is_cpu(device):
            raise self._of_another_kind(device)
        dtype = automatic_dtype(device) if dtype == "auto" else dtype
        if found.kind == "cpu" and found.dtype != dtype:
            raise of_other_dtype(self._where, found, dtype)
        return self.evidence

    def of_gpus(self) -> Evidence:
        """Its coefficients for any GPU; raises UserError for a processor's calibration."""
        if self.calibration and self.calibration.kind == "cpu":
            raise self._of_another_kind("a GPU")
        return self.evidence

    @property
    def _where(self) -> str:
        return f"--calibration {self.path}"

    def _of_another_kind(self, device: str) -> UserError:
        of = self.calibration.device if self.calibration else ""
        return UserError(
            self._where,
            f"is of {of}, by which {device} cannot be estimated",
            allowed="a calibration of the same kind of device",
        )


def read_evidence(path: Path) -> GivenEvidence:
    """The coefficients of a file, which is read once.

    Raises UserError for a file without any, and for one that is meant to be a calibration and is
    none, as one of a later version.
    """
    try:
        text = read_text(path)
        whole = "evidence" in parse_json(text)
    except (OSError, ValueError, TypeError) as error:
        raise no_evidence(path) from error
    if not whole:
        return GivenEvidence(path, parse_evidence(text, path))
    calibration = parse_calibration(text, path)
    return GivenEvidence(path, calibration.labelled_evidence(), calibration)


def given_or_own(
    given: GivenEvidence | None,
    device: str,
    dtype: Dtype | Literal["auto"],
    label: str | None = None,
) -> Evidence:
    """A file's coefficients, else as `evidence_for`; raises UserError as `GivenEvidence.of`."""
    return given.of(device, dtype) if given else evidence_for(device, dtype, label)
