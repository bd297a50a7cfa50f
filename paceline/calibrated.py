"""What was calibrated for a device: its own coefficients, and a processor's rates."""

from __future__ import annotations

from typing import Literal

from paceline import catalog
from paceline.core.hardware import Dtype
from paceline.errors import UserError
from paceline.estimate.calibration import Calibration, cpu_machine, find
from paceline.estimate.evidence import Evidence, shipped
from paceline.estimate.machine import Machine
from paceline.probe.inventory import cpu


def native_bf16(device: str) -> bool:
    """Whether `dtype: auto` means bf16 there: on devices of the catalog yes, on a CPU if it has instructions."""
    return not is_cpu(device) or bool(cpu()["native_bf16"])


def is_cpu(device: str) -> bool:
    """Whether the name stands for the processor of this machine."""
    return catalog.find_device(device).device.family == "cpu"


def calibration_of(device: str, dtype: Dtype | Literal["auto"]) -> Calibration | None:
    """The user's calibration of a device in a dtype, None without one."""
    if dtype == "auto":
        dtype = "bf16" if native_bf16(device) else "fp32"
    return find(cpu()["model"] if is_cpu(device) else device, dtype)


def evidence_of(device: str, dtype: Dtype | Literal["auto"]) -> Evidence:
    """The device's own coefficients where it is calibrated in that dtype, else those that are shipped."""
    found = calibration_of(device, dtype)
    return found.told() if found else shipped()


def processor(dtype: Dtype | Literal["auto"], ranks: int) -> Machine:
    """This machine's processor for so many ranks; raises UserError where it is not calibrated."""
    found = calibration_of("cpu", dtype)
    if found is None:
        raise UserError("cpu", f"has no data sheet, and is not calibrated in {dtype} here",
                        remedy="`paceline calibrate` measures it in two minutes")  # fmt: skip
    return cpu_machine(found, ranks)
