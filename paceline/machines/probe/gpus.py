"""NVIDIA devices visible to a program started on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any


def gpus() -> list[dict[str, Any]]:
    """Return the visible NVIDIA devices with name, memory, power limit, clocks and driver, by NVML.

    Empty without NVML's driver or without devices.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        system = {
            "driver": _text(pynvml.nvmlSystemGetDriverVersion()),
            "cuda_driver": _cuda_version(),
        }
        pairs = [(handle, {**_gpu(handle), **system}) for handle in _handles()]
        devices = [device for _, device in pairs]
        slices = [part for handle, device in pairs for part in _slices(handle, device)]
    finally:
        pynvml.nvmlShutdown()
    return visible_devices(devices, os.environ.get("CUDA_VISIBLE_DEVICES"), slices)


def visible_devices(
    devices: list[dict[str, Any]],
    visible_devices: str | None,
    slices: Sequence[dict[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Return the devices that CUDA_VISIBLE_DEVICES = `visible_devices` selects, in its order.

    None selects all. An entry is an index or a unique prefix of a UUID. As in CUDA, the first entry
    that matches no device ends the list, and a repeated device leaves none. If the first entry is a
    MIG slice, a program sees that slice only, whatever follows. Indices follow the PCI bus, which
    is CUDA's own order if all devices are alike.
    """
    if visible_devices is None:
        return devices
    first = visible_devices.partition(",")[0].strip()
    if first.startswith("MIG-"):
        matches = [part for part in slices if (part["uuid"] or "").startswith(first)]
        return matches if len(matches) == 1 else []
    indices: list[int] = []
    for entry in (part.strip() for part in visible_devices.split(",")):
        index = _index(devices, entry)
        if index is None:
            break
        if index in indices:
            return []
        indices.append(index)
    return [devices[index] for index in indices]


def _index(devices: list[dict[str, Any]], entry: str) -> int | None:
    if entry.isdecimal():
        return int(entry) if int(entry) < len(devices) else None
    if not entry.startswith("GPU-"):
        return None
    matches = [i for i, gpu in enumerate(devices) if (gpu["uuid"] or "").startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _handles() -> Iterator[Any]:
    """Yield the devices that NVML opens for this user, without lost or inaccessible ones."""
    import pynvml

    for index in range(pynvml.nvmlDeviceGetCount()):
        with suppress(pynvml.NVMLError):
            yield pynvml.nvmlDeviceGetHandleByIndex(index)


def _slices(handle: Any, device: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the MIG slices of a device.

    A slice has the device's fields with its own name, UUID and memory, and no power limit, because
    the device's power is not the slice's.
    """
    import pynvml

    try:
        max_slices = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except pynvml.NVMLError:
        return
    for index in range(max_slices):
        with suppress(pynvml.NVMLError):
            part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            yield {
                **device,
                "name": _text(pynvml.nvmlDeviceGetName(part)),
                "uuid": _text(pynvml.nvmlDeviceGetUUID(part)),
                "memory_bytes": pynvml.nvmlDeviceGetMemoryInfo(part).total,
                "power_limit_w": None,
            }


def _cuda_version() -> str | None:
    """Return the newest CUDA version that the driver supports, such as `13.0`."""
    import pynvml

    try:
        version = pynvml.nvmlSystemGetCudaDriverVersion()
    except pynvml.NVMLError:
        return None
    # NVML encodes the version as 1000 x major + 10 x minor.
    return f"{version // 1000}.{version % 1000 // 10}"


def _gpu(handle: Any) -> dict[str, Any]:
    import pynvml

    def ask(query: Any, *arguments: Any) -> Any:
        try:
            return query(handle, *arguments)
        except pynvml.NVMLError:
            return None

    name, mig = (
        _text(ask(pynvml.nvmlDeviceGetName)),
        _switch(ask(pynvml.nvmlDeviceGetMigMode)),
    )
    # Programs get slices of a device in MIG mode, which have less peak and memory than the device.
    is_mig = mig == "on"
    memory = None if is_mig else ask(pynvml.nvmlDeviceGetMemoryInfo)
    power_mw = ask(pynvml.nvmlDeviceGetEnforcedPowerLimit)
    return {
        "name": f"{name} MIG" if is_mig else name,
        "uuid": _text(ask(pynvml.nvmlDeviceGetUUID)),
        "memory_bytes": memory.total if memory else None,
        "power_limit_w": power_mw / 1000 if power_mw else None,
        "max_sm_clock_mhz": ask(pynvml.nvmlDeviceGetMaxClockInfo, pynvml.NVML_CLOCK_SM),
        "max_memory_clock_mhz": ask(pynvml.nvmlDeviceGetMaxClockInfo, pynvml.NVML_CLOCK_MEM),
        "application_sm_clock_mhz": ask(
            pynvml.nvmlDeviceGetApplicationsClock, pynvml.NVML_CLOCK_SM
        ),
        "vbios": _text(ask(pynvml.nvmlDeviceGetVbiosVersion)),
        "ecc": _switch(ask(pynvml.nvmlDeviceGetEccMode)),
        "mig": mig,
        "persistence": _switch(ask(pynvml.nvmlDeviceGetPersistenceMode)),
        "pcie": _pcie(
            ask(pynvml.nvmlDeviceGetMaxPcieLinkGeneration),
            ask(pynvml.nvmlDeviceGetMaxPcieLinkWidth),
        ),
        "nvlink": _nvlink(
            [
                ask(pynvml.nvmlDeviceGetNvLinkState, link)
                for link in range(pynvml.NVML_NVLINK_MAX_LINKS)
            ]
        ),
    }


def _pcie(generation: int | None, width: int | None) -> str | None:
    return f"PCIe Gen {generation} x{width}" if generation and width else None


def _nvlink(states: list[int | None]) -> str | None:
    """Return the number of active NVLink links as text; None if there are none."""
    up = sum(bool(state) for state in states)
    return f"{up} NVLink links" if up else None


def _switch(state: Any) -> str | None:
    """Return `on` or `off`; if NVML reports current and pending state, the current one."""
    current = state[0] if isinstance(state, list | tuple) else state
    return None if current is None else "on" if current else "off"


def _text(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
