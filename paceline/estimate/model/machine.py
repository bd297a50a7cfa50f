"""Rates of catalog devices and links as the time model takes them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.errors import UserError
from paceline.core.hardware import NARROW, Device, Dtype
from paceline.estimate.model.case import Generation
from paceline.estimate.model.fabric import XGMI, inter_rate, intra_rate
from paceline.files import catalog

GENERATIONS: dict[str, Generation] = {
    "V100": "volta",
    "A100": "ampere", "A800": "ampere",
    "H100": "hopper", "H200": "hopper", "H800": "hopper", "H20": "hopper", "GH200": "hopper",
    "B200": "blackwell", "B300": "blackwell", "GB200": "blackwell", "GB300": "blackwell",
    "MI300X": "amd", "MI325X": "amd", "MI350X": "cdna4", "MI355X": "cdna4",
    "TPU-v5e": "tpu", "TPU-v5p": "tpu", "TPU-v6e": "tpu", "TPU-v7": "tpu",
    "cpu": "cpu",
}  # fmt: skip
"""By family of the catalog; others are `other`, with a wider prior."""
RACK = {"GB200": 72, "GB300": 72, "TPU-v5e": 256, "TPU-v5p": 8960, "TPU-v6e": 256, "TPU-v7": 9216}
"""Devices in one fast domain where it is larger than a node: NVL72, pods of TPUs."""
WATTS_PER_TFLOPS = {
    "volta": 2.4, "ampere": 1.282, "hopper": 0.7074, "blackwell": 0.48, "amd": 0.66, "cdna4": 0.556
}  # fmt: skip
"""Of V100-SXM2, A100-SXM, H100-SXM and GB200, whose products the rates were fitted to, and of those
that priors are of, the middle of MI300X (0.574) and MI325X (0.765), and MI355X: clocks under load
follow from what power is there for the arithmetic."""
MOST_POWER = 1.25
SMALL_BOARD = 4
_POWER = re.compile(r"(\d{3,4})\s?W\b")
_PROXIED = re.compile(r"\bEFA(v\d)?\b")
"""Networks whose ports devices cannot drive themselves (Mao et al., arXiv:2512.19849)."""
FOUR_BIT: tuple[Dtype, ...] = ("mxfp4", "nvfp4")


class Assumed(NamedTuple):
    """What nobody stated, so that something usual stands for it."""

    intra: bool = False
    inter: bool = False
    device: bool = False


NOTHING_ASSUMED = Assumed()


class Level(NamedTuple):
    """One level of a stated fabric."""

    name: str
    devices: float
    """That it joins, infinite where it joins all."""
    bytes_per_s: float
    """Of one device's share of what crosses it, one direction."""
    latency_s: float = 0.0


@dataclass(frozen=True)
class Machine:
    """One kind of device and its links."""

    device: Device
    generation: Generation
    domain: int
    devices_per_node: int
    intra_bytes_per_s: float
    inter_bytes_per_s: float
    power: float
    crowding: float = 1.0
    """Processes that share a core, 1 where each has its own."""
    proxied: bool = False
    """Host threads hand what devices send to the network's ports."""
    mesh: bool = False
    """Devices of a domain have links of their own to each of the others, and no switch."""
    assumed: Assumed = NOTHING_ASSUMED
    levels: tuple[Level, ...] = ()
    """Of a stated fabric, from the fast domain outwards; without them domain and network stand."""
    scattered: bool = False
    """Neighbouring domains lie anywhere in the network."""
    notes: tuple[str, ...] = ()

    def peak_16bit(self) -> float:
        """Dense FLOP/s in bf16 or fp16; raises UserError when the catalog has neither."""
        peak = self.device.peak_flops_per_s("bf16") or self.device.peak_flops_per_s("fp16")
        if peak is None:
            raise UserError(self.device.name, "has no 16-bit peak in the catalog")
        return peak

    def peak_wide(self, dtype: Dtype) -> float:
        """FLOP/s of products that are not narrow: fp32's own peak in fp32, else that of 16 bit."""
        peak = self.device.peak_flops_per_s("fp32") if dtype == "fp32" else None
        return peak or self.peak_16bit()

    def peak_narrow(self, dtype: Dtype) -> float:
        """FLOP/s of a dtype narrower than 16 bit, 0 for others; raises UserError without a peak."""
        if dtype not in NARROW:
            return 0.0
        peak = self.device.peak_flops_per_s(dtype)
        if peak is None:
            raise UserError(
                self.device.name,
                f"does not compute in {dtype}",
                allowed=", ".join(self.device.peaks),
            )
        return peak


def machine(
    device: str, intra: str | None = None, inter: str | None = None, devices_per_node: int = 8
) -> Machine:
    """The machine that names of the catalog or of a publication stand for.

    Raises UserError for a device that the catalog does not know, and for a link that it does not
    know and that states no rate. Links that are not named get the usual ones of the device's
    generation, with a note.
    """
    match = catalog.find_device(device)
    entry = match.device
    generation = GENERATIONS.get(entry.family, "other")
    stated = _POWER.search(device)
    power = float(stated[1]) / entry.power_w if stated and entry.power_w else 1.0
    domain = RACK.get(entry.family, devices_per_node)
    inside = intra_rate(intra, entry, generation)
    between = inter_rate(inter, generation, devices_per_node)
    return Machine(
        device=entry,
        generation=generation,
        domain=domain,
        devices_per_node=devices_per_node,
        intra_bytes_per_s=inside.bytes_per_s,
        inter_bytes_per_s=between.bytes_per_s,
        power=_power(entry, generation, power),
        proxied=bool(_PROXIED.search(inter or "")),
        mesh=_meshed(entry, generation, devices_per_node),
        assumed=Assumed(inside.assumed, between.assumed, not match.exact),
        notes=tuple(note for note in (match.note, inside.note, between.note) if note),
    )


def _power(device: Device, generation: Generation, limit: float) -> float:
    """Watts for a FLOP/s of the peak, over those of the generation's usual device.

    `limit` is the power limit over that of the data sheet.
    """
    peak = device.peak_flops_per_s("bf16") or device.peak_flops_per_s("fp16")
    usual = WATTS_PER_TFLOPS.get(generation)
    if not (peak and device.power_w and usual):
        return min(1.0, limit)
    return min(MOST_POWER, limit * device.power_w / (peak / 1e12) / usual)


def _meshed(device: Device, generation: Generation, per_node: int) -> bool:
    """Whether devices are linked one by one, without a switch: V100s, and boards of four.

    NVLink has switches from A100's boards of eight on, and in racks.
    """
    if "PCIe" in device.name or device.family in RACK:
        return False
    boards = generation in ("ampere", "hopper") and per_node <= SMALL_BOARD
    return generation == "volta" or device.family in XGMI or boards
