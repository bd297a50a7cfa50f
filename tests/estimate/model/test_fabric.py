"""Links: what the catalog knows, what a description states, and what stands for nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.bandwidth import parse_bandwidth
from paceline.core.errors import UserError
from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.fit.interval import log_sd
from paceline.estimate.model.case import cases_of
from paceline.estimate.model.collectives import group_rate
from paceline.estimate.model.machine import inter_rate, machine
from paceline.files import catalog
from tests.estimate.model.test_pipeline import MODEL, C


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("8x400 Gb/s RoCE", 50e9), ("8 x 400Gbps", 50e9), ("100 GB/s", 100e9), ("400 Gb/s", 50e9),
        ("200 GB/s per node", 25e9), ("25 Gb/s Ethernet", 0.390625e9), ("1.6 Tb/s per node", 25e9),
        ("900 GB/s bidirectional", 450e9), ("InfiniBand", None), ("", None), ("0 Gb/s", None),
        ("400 GBit/s", 50e9), ("400 Gbit/s", 50e9), ("8x400 GBits/s", 50e9), ("1 TBit/s", 125e9),
        ("PCIe 5.0 16x 64 GB/s", 64e9), ("PCIe 5.0 x16 64 GB/s", 64e9), ("8x 50 GB/s", 50e9),
        ("8x400 Gb/s on PCIe 5.0 16x", 50e9),
    ],
)  # fmt: skip
def test_a_stated_bandwidth_is_of_one_device_in_one_direction(text: str, rate: float | None):
    assert parse_bandwidth(text, 8) == (pytest.approx(rate) if rate else None)


def test_an_unknown_fabric_with_a_rate_is_used_and_one_without_is_refused():
    assert machine("H100-SXM", None, "Wonderlink 4x200 Gb/s", 4).inter_bytes_per_s == 25e9
    with pytest.raises(UserError, match="not in the catalog"):
        machine("H100-SXM", None, "Wonderlink")


def test_a_link_without_its_generation_is_the_devices():
    rates = [machine(name, "NVLink").intra_bytes_per_s for name in ("A100-SXM-80GB", "H100-SXM")]
    assert rates == [300e9, 450e9] and machine("B200-SXM", "NVLink").intra_bytes_per_s == 900e9


def test_a_port_of_ethernet_is_the_nodes():
    port = catalog.link("Ethernet-100").bytes_per_s
    link_rate = inter_rate("Ethernet-100", "hopper", 8)
    assert (
        port and link_rate.bytes_per_s == port / 8 and link_rate.note and "shared" in link_rate.note
    )
    assert inter_rate("InfiniBand-NDR", "hopper", 8).bytes_per_s == 50e9


def test_what_nobody_states_widens_the_interval():
    h100 = machine("H100", None, None)
    assert h100.assumed_properties == (False, True, True) and machine(
        "H100-SXM", None, "NDR"
    ).assumed_properties == (
        False,
        False,
        False,
    )
    stated = replace(MODEL, devices=1024, global_batch=1024)
    cases = [stated, replace(stated, assumed_inter=True), replace(stated, assumed_device=True)]
    evidence = shipped_evidence()
    sd = log_sd(cases_of(cases), evidence.fit(), evidence.residual_sd)
    assert sd[1] > sd[0] and sd[2] > sd[0]


def test_without_a_switch_a_pair_has_its_own_links_alone():
    x = cases_of([replace(MODEL, domain=4, mesh=mesh) for mesh in (False, True)])
    both = [group_rate(x, C, x.layers * 0 + n, x.layers * 0 + 1) for n in (2, 4)]
    assert both[0][1] == pytest.approx(both[0][0] / 3) and both[1][1] == pytest.approx(both[1][0])
    assert machine("V100-SXM2-32GB", devices_per_node=4).mesh
    assert not machine("H100-SXM").mesh and machine("H100-SXM", devices_per_node=4).mesh


def test_power_is_what_a_device_has_for_its_arithmetic():
    rack = machine("GB200").power
    assert rack == pytest.approx(1) and machine("GB300").power > rack > machine("B200").power
    assert machine("H100-PCIe").power < 0.7 and machine("H100-SXM").power == pytest.approx(
        1, rel=1e-3
    )


@pytest.mark.parametrize(
    ("device", "rate"),
    [
        ("H800", 200e9), ("H800-PCIe", 63.015e9), ("TPU v6e", 400e9), ("L40S", 31.508e9),
        ("T4", 15.754e9), ("RTX 5090", 63.015e9), ("MI300X", 448e9), ("MI355X", 537.6e9),
        ("H20", 450e9), ("A40", 31.508e9), ("RTX PRO 6000", 63.015e9),
    ],
)  # fmt: skip
def test_a_family_with_links_of_its_own_is_not_given_its_generations(device: str, rate: float):
    assert machine(device).intra_bytes_per_s == rate


def test_cards_of_one_chip_are_alike_whatever_their_generation_is_called():
    one, other = machine("A40", devices_per_node=4), machine("RTX A6000", devices_per_node=4)
    assert (one.generation, one.mesh, one.power) == (other.generation, other.mesh, other.power)
    assert not one.mesh


@pytest.mark.parametrize(
    ("device", "generation"), [("TPU v5p", "tpu"), ("MI325X", "amd"), ("MI350X", "cdna4")]
)
def test_other_vendors_have_coefficients_of_their_own(device: str, generation: str):
    assert machine(device).generation == generation


@pytest.mark.parametrize("device", ["RTX 4090", "L4", "A10", "T4"])
def test_a_family_that_nothing_was_fitted_to_has_the_wider_prior(device: str):
    assert machine(device).generation == "other"


def test_the_same_peak_with_more_power_is_reached_more_of():
    air, liquid = machine("MI300X"), machine("MI325X")
    assert air.peak_16bit() == liquid.peak_16bit() and air.power < 1 < liquid.power


def test_four_bit_numbers_with_shared_scales_are_each_makers_own():
    amd, nvidia = machine("MI355X"), machine("B200")
    assert amd.peak_narrow("mxfp4") == pytest.approx(2 * amd.peak_narrow("mxfp8"), rel=1e-4)
    with pytest.raises(UserError, match="does not compute in mxfp4"):
        nvidia.peak_narrow("mxfp4")
    with pytest.raises(UserError, match="does not compute in nvfp4"):
        amd.peak_narrow("nvfp4")
