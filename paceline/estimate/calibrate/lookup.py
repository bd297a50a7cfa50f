"""What was calibrated for a device: its own coefficients, and a processor's rates."""

from __future__ import annotations

from typing import Literal

from paceline.core.errors import UserError
from paceline.core.hardware import Dtype
from paceline.estimate.calibrate.calibration import Calibration, cpu_machine, find
from paceline.estimate.fit.evidence import Evidence, shipped
from paceline.estimate.model.machine import Machine
from paceline.files import catalog
from paceline.machines.probe.inventory import cpu


def automatic_dtype(device: str) -> Dtype:
    """What `dtype: auto` is estimated in, which is what it trains in: bf16, or fp32 where that is foreign."""
    if is_cpu(device):
        return "bf16" if cpu()["native_bf16"] else "fp32"
    return "fp32" if catalog.find_device(device).device.has_only_fp16 else "bf16"


def is_cpu(device: str) -> bool:
    """Whether the name stands for the processor of this machine."""
    return catalog.find_device(device).device.family == "cpu"


def calibration_of(device: str, dtype: Dtype | Literal["auto"]) -> Calibration | None:
    """The user's calibration of a device in a dtype, None without one."""
    if dtype == "auto":
        dtype = automatic_dtype(device)
    if is_cpu(device):
        return find(cpu()["model"], dtype)
    return find(device, dtype) or find(catalog.find_device(device).device.name, dtype)


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
