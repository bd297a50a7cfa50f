from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.core.hardware import Device, Link, Peak
from paceline.core.units import MIB
from paceline.files import catalog

DEVICES = {device.name: device for device in catalog.devices()}
LINKS = {link.name: link for link in catalog.links()}
TERA = 1e12
HALVED = ("RTX3090", "RTX4090", "RTX5090", "L40", "L20")
"""Families with half the rate where products are summed in fp32, down to fp8."""

OTHER_RATIOS = {
    "MI100": {"fp16": (2, 2)},
    "Gaudi3": {"fp8": (1, 1)},
    "Trainium1": {"fp8": (1, 1)},
    "Trainium3": {"fp8": (3.7, 3.8), "mxfp8": (3.7, 3.8), "mxfp4": (3.7, 3.8)},
}
"""Ratios to the bf16 peak that the data sheets of these families print without sparsity."""


def signs_of_sparsity(device: Device) -> list[str]:
    """Ratios between a device's peaks that cannot be if all of them are dense."""
    rate = {dtype: peak.flops_per_s for dtype, peak in device.peaks.items()}
    half = rate.get("bf16") or rate.get("fp16")
    if half is None:
        return []
    ranges = {"fp16": (1, 1), "bf16": (1, 1), "fp8": (1.9, 2.1), "mxfp8": (1.9, 2.1)}
    ranges |= {"nvfp4": (3.9, 6.1), "mxfp4": (3.9, 4.1), "fp32": (0.02, 0.3)}
    if device.family in HALVED:
        ranges |= {"nvfp4": (7.9, 8.1), "fp32": (0.45, 0.55)}
    ranges |= OTHER_RATIOS.get(device.family, {})
    ratios = {dtype: value / half for dtype, value in rate.items()}
    return [d for d, ratio in ratios.items() if not ranges[d][0] <= ratio <= ranges[d][1]]


def misfits(device: Device, dtype: str, measured: float, stated: float) -> bool:
    """Whether another source's best measured rate and stated peak, in TFLOP/s, belie the peak."""
    peak = device.peaks[dtype].flops_per_s / TERA  # type: ignore[index]
    return not (0.45 < measured / peak < 1 and abs(stated / peak - 1) < 0.1)


def with_doubled(device: Device, *dtypes: str) -> Device:
    doubled = {d: Peak(flops_per_s=2 * p.flops_per_s, source="x") for d, p in device.peaks.items()}
    peaks = {d: doubled[d] if d in dtypes else p for d, p in device.peaks.items()}
    return device.model_copy(update={"peaks": peaks})


def gemm_measurements(folder: Path) -> Iterator[tuple[Device, str, float, float]]:
    """Device, dtype, best measured rate and stated peak in TFLOP/s of a public table of both."""
    with (folder / "references" / "gemm.csv").open(newline="") as rows:
        for row in csv.DictReader(rows):
            if "MAMF" in row["kind"]:
                device = catalog.device(row["gpu"])
                yield device, row["dtype"], float(row["tflops"]), float(row["peak_tflops"])


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_the_peaks_of_a_device_are_all_dense(device: Device):
    assert signs_of_sparsity(device) == []


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp8", "mxfp8", "mxfp4", "nvfp4"])
def test_one_sparse_peak_among_dense_ones_would_be_seen(dtype: str):
    device = DEVICES["MI355X" if dtype == "mxfp4" else "B200"]
    assert signs_of_sparsity(with_doubled(device, dtype))


def test_other_sources_agree_with_the_peaks(reference_data: Path):
    rows = list(gemm_measurements(reference_data))
    assert len({device.name for device, *_ in rows}) >= 10
    assert [row for row in rows if misfits(*row)] == []


def test_a_device_with_sparse_peaks_throughout_would_disagree(reference_data: Path):
    for device, dtype, measured, stated in gemm_measurements(reference_data):
        assert misfits(with_doubled(device, *device.peaks), dtype, measured, stated)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_every_figure_of_a_device_has_a_source(device: Device):
    for dtype, peak in device.peaks.items():
        dated = re.search(r"\(20\d\d\)|v\d\d\.\d\d", peak.source)
        assert dated or (dtype == "mxfp8" and "as FP8" in peak.source)
    assert (device.memory_bytes is None) == (device.memory_source is None)
    if device.context_bytes:
        assert "Context" in (device.note or "")


# Dense TFLOP/s, GB/s and W as the sources print them; `/ 2` where only a sparse figure is printed.
PRINTED = [
    ("RTX-4090", "Ada", {"fp32": 82.6, "fp16": 165.2, "bf16": 165.2, "fp8": 660.6 / 2}, 1008, 450),
    ("RTX-5090", "Blackwell", {"fp32": 104.8, "bf16": 209.5, "fp8": 419, "nvfp4": 1676}, 1792, 575),
    ("RTX-3090", "GA102", {"fp32": 35.6, "fp16": 142 / 2, "bf16": 142 / 2}, 936, 350),
    ("RTX-A6000", "GA102", {"fp32": 38.7, "fp16": 154.8, "bf16": 309.6 / 2}, 768, 300),
    ("RTX-6000-Ada", "Ada", {"fp32": 91.1, "bf16": 1457 / 4, "fp8": 1457 / 2}, 960, 300),
    ("RTX-PRO-6000-Server", "Server", {"fp32": 120, "bf16": 4 * 120, "nvfp4": 16 * 120}, 1597, 600),
    ("RTX-PRO-6000-Workstation", "Workstation", {"fp32": 126, "bf16": 503.8}, 1792, 600),
    ("L4", "L4", {"fp32": 30.3, "bf16": 242 / 2, "fp8": 485 / 2}, 300, 72),
    ("L40S", "L40S", {"fp32": 91.6, "bf16": 362.05, "fp8": 1466 / 2}, 864, 350),
    ("L40", "L40", {"fp32": 90.5, "bf16": 362.1 / 2, "fp8": 724 / 2}, 864, 300),
    ("A30", "A30", {"fp32": 10.3, "bf16": 330 / 2}, 933, 165),
    ("A40", "A40", {"fp32": 37.4, "bf16": 299.4 / 2}, 696, 300),
    ("A10", "A10", {"fp32": 31.2, "fp16": 125, "bf16": 250 / 2}, 600, 150),
    ("T4", "T4", {"fp32": 8.1, "fp16": 65}, 300, 70),
    ("H20", "aiconfigurator", {"fp16": 148, "bf16": 148}, 4000, 500),
    ("H800-SXM", "H100", {"fp32": 67, "bf16": 1979 / 2, "fp8": 3958 / 2}, 3350, 700),
    ("MI350X", "MI350X", {"fp32": 144.2, "bf16": 2306.9, "fp8": 4613.7}, 8000, 1000),
    ("GB10", "Hot Chips|Spark", {"fp32": 31, "nvfp4": 1000 / 2}, 273, 140),
    ("V100S-PCIe-32GB", "V100S", {"fp32": 16.4, "fp16": 130}, 1134, 250),
    ("A800-SXM-80GB", "A100", {"fp32": 19.5, "fp16": 624 / 2, "bf16": 624 / 2}, 2039, 400),
    ("A800-PCIe-40GB", "A100", {"fp32": 19.5, "bf16": 624 / 2}, 1555, 250),
    ("L20", "QuickSpecs", {"fp32": 59.8, "bf16": 239 / 2, "fp8": 239}, 864, 275),
    ("MI100", "MI100", {"fp32": 23.1, "fp16": 184.6, "bf16": 92.3}, 1228.8, 300),
    ("MI210", "MI210", {"fp32": 22.6, "fp16": 181, "bf16": 181}, 1638.4, 300),
    ("MI250-OAM", "MI250 ", {"fp32": 45.3, "fp16": 362.1, "bf16": 362.1}, 3276.8, 560),
    ("MI250X-OAM", "MI250X", {"fp32": 47.9, "fp16": 383, "bf16": 383}, 3276.8, 560),
    ("MI250X-GCD", "half", {"fp32": 47.9 / 2, "bf16": 383 / 2}, 1638.4, 280),
    ("MI300A", "MI300A", {"fp32": 122.6, "bf16": 980.6, "fp8": 1961.2}, 5300, 550),
    ("Gaudi2", "Intel", {"bf16": 432, "fp8": 865}, 2460, 600),
    ("Gaudi3", "Hot Chips", {"bf16": 1835, "fp8": 1835}, 3670, 900),
    ("Trainium1", "Trainium ", {"fp32": 47.5, "fp16": 190, "bf16": 190}, 820, None),
    ("Trainium2", "Trainium2", {"fp32": 181, "bf16": 667, "fp8": 1299}, 2900, None),
    ("Trainium3", "Trainium3", {"fp32": 183, "bf16": 671, "mxfp8": 2517}, 4900, None),
    ("Ascend-910A", "Huawei", {"fp16": 256}, 1200, 310),
    ("Ascend-910B2", "Atlas|910C", {"fp16": 376, "bf16": 376}, 1600, None),
    ("Ascend-910B3", "Atlas|910C", {"fp16": 313, "bf16": 313}, 1600, None),
    ("Ascend-910C-package", "CloudMatrix", {"fp16": 752, "bf16": 752}, 3200, None),
    ("Ascend-910C-die", "CloudMatrix", {"fp16": 376, "bf16": 376}, 1600, None),
    ("TPU-v3", "TPU v3", {"bf16": 123}, 900, None),
    ("TPU-v4", "TPU v4", {"bf16": 275}, 1200, None),
    ("TPU-v5e", "TPU v5e", {"bf16": 197}, 819, None),
    ("TPU-v5p", "TPU v5p", {"bf16": 459}, 2765, None),
    ("TPU-v6e", "TPU v6e", {"bf16": 918}, 1638, None),
    ("TPU-v7", "TPU7x", {"bf16": 2307, "fp8": 4614}, 7380, None),
]


@pytest.mark.parametrize(("name", "source", "tflops", "gbs", "watts"), PRINTED)
def test_a_device_has_the_figures_of_its_own_sheet(
    name: str, source: str, tflops: dict[str, float], gbs: float, watts: float | None
):
    device = DEVICES[name]
    for dtype, printed in tflops.items():
        peak = device.peaks[dtype]  # type: ignore[index]
        assert peak.flops_per_s == pytest.approx(printed * TERA, rel=1e-3)
        assert re.search(source, peak.source)
    assert device.memory_bytes_per_s == pytest.approx(gbs * 1e9) and device.power_w == watts


@pytest.mark.parametrize(
    "name",
    [
        "RTX-3090",
        "RTX-4090",
        "RTX-5090",
        "RTX-A6000",
        "RTX-6000-Ada",
        "RTX-PRO-6000-Server",
        "RTX-PRO-6000-Workstation",
        "L4",
        "L40",
        "L40S",
        "A10",
        "A30",
        "A40",
        "T4",
    ],
)
def test_figures_at_the_boost_clock_are_marked(name: str):
    assert "boost" in (DEVICES[name].note or "").lower()


@pytest.mark.parametrize(
    ("module", "die"),
    [
        ("MI250-OAM", "MI250-GCD"),
        ("MI250X-OAM", "MI250X-GCD"),
        ("Ascend-910C-package", "Ascend-910C-die"),
    ],
)
def test_a_die_has_half_of_its_module(module: str, die: str):
    whole, half = DEVICES[module], DEVICES[die]
    assert half.memory_bytes == (whole.memory_bytes or 0) / 2
    for dtype, peak in half.peaks.items():
        assert peak.flops_per_s == pytest.approx(whole.peaks[dtype].flops_per_s / 2)
    assert die in (whole.note or "")


@pytest.mark.parametrize(
    ("device", "link", "gigabytes_per_s"),
    [
        ("A800", "NVLink3-A800", 200),
        ("MI250X", "xGMI-MI250X", 400),
        ("Gaudi2", "Gaudi2-Ethernet", 21 * 100 / 8),
        ("Gaudi3", "Gaudi3-Ethernet", 21 * 200 / 8),
        ("Ascend-910B", "HCCS-910B", 196),
        ("TPU-v4", "ICI-v4", 300),
    ],
)
def test_a_family_has_the_link_of_its_own_sheet(device: str, link: str, gigabytes_per_s: float):
    _, family = catalog.generation_of(catalog.device(device).family)
    assert family.link == link
    assert LINKS[link].bytes_per_s == gigabytes_per_s * 1e9


def test_a_dtype_that_no_source_states_has_no_peak():
    assert "bf16" not in DEVICES["GB10"].peaks and "bf16" not in DEVICES["T4"].peaks
    assert "fp8" not in DEVICES["TPU-v6e"].peaks


def test_a_device_without_a_data_sheet_has_no_peak():
    cpu = catalog.device("cpu")
    assert cpu.peaks == {} and cpu.memory_bytes is None
    assert cpu.peak_flops_per_s("bf16") is None


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_memory_is_what_the_driver_reports_where_that_is_known(device: Device):
    source = device.memory_source or ""
    reported = re.search(r"nvidia-smi: (\d+) MiB in total", source)
    if reported:
        assert device.memory_bytes == int(reported[1]) * MIB
    reported = re.search(r"rocm-smi: (\d+) bytes in total", source)
    if reported:
        assert device.memory_bytes == int(reported[1])


def test_vendors_gigabytes_of_device_memory_are_nearer_to_gibibytes():
    stated = {"V100-SXM2-16GB": 16, "A100-SXM-80GB": 80, "H100-SXM": 80, "H200-SXM": 141}
    for name, gigabytes in stated.items():
        share = (DEVICES[name].memory_bytes or 0) / (gigabytes * 2**30)
        assert 0.98 < share <= 1


def test_the_figures_that_published_tables_divide_by_are_within_rounding():
    assert DEVICES["H100-SXM"].peak_flops_per_s("fp8") == 1979e12
    assert DEVICES["H100-SXM"].peak_flops_per_s("bf16") == 989.5e12
    assert DEVICES["V100-SXM2-32GB"].peak_flops_per_s("bf16") is None
    assert DEVICES["V100-SXM2-16GB"].context_bytes == 1113 * MIB
    hgx, superchip = (DEVICES[name].peak_flops_per_s("bf16") for name in ("B200", "GB200"))
    assert (hgx, superchip) == (2250e12, 2500e12)


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
def test_a_link_has_a_source_and_only_the_machines_own_lacks_a_rate(link: Link):
    assert link.source
    assert (link.bytes_per_s is None) == (link.name == "loopback")


def test_link_rates_are_of_one_direction():
    assert LINKS["NVLink4"].bytes_per_s == 450e9
    assert LINKS["NVLink5-NVL72"].bytes_per_s == LINKS["NVLink5"].bytes_per_s == 900e9
    assert LINKS["InfiniBand-NDR"].bytes_per_s == 400e9 / 8
    assert LINKS["Omni-Path-100"].bytes_per_s == 100e9 / 8


def test_the_published_clusters_name_catalog_entries_only():
    for cluster in catalog.clusters():
        assert DEVICES[cluster.device]
        assert LINKS[cluster.intra_link or ""].kind == "intra"
        assert LINKS[cluster.inter_link or ""].kind == "inter"


def test_the_published_clusters_have_their_published_sizes():
    lambda_cluster = catalog.cluster("lambda-1cc-h100")
    assert lambda_cluster.world_size == 512
    per_device = LINKS[lambda_cluster.inter_link or ""].bytes_per_s or 0
    assert lambda_cluster.devices_per_node * per_device * 8 == 3200e9
    assert catalog.cluster("Jean Zay V100 32g").world_size == 8
    assert catalog.cluster("dgx-h100").launcher == "slurm"
    rack = catalog.cluster("lambda-gb300-nvl72")
    assert (rack.world_size, rack.device, rack.inter_link) == (72, "GB300", "InfiniBand-XDR")
    assert catalog.cluster("gb200-nvl72").world_size == 72
    assert catalog.cluster("lambda-1cc-b200").world_size == 8


def test_a_cluster_file_may_use_any_name_of_its_parts(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    text = "name: mine\ndevice: NVIDIA H100 80GB HBM3\ndevices_per_node: 8\ninter_link: ib ndr\n"
    file.write_text(text)
    for path in (file, str(file)):
        cluster = catalog.cluster(path)
        assert (cluster.device, cluster.inter_link) == ("H100-SXM", "InfiniBand-NDR")
        assert cluster.intra_link is None


def test_a_cluster_files_nvlink_is_of_its_devices(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\ndevice: A100\ndevices_per_node: 8\nintra_link: NVLink\n")
    assert catalog.cluster(file).intra_link == "NVLink3"


@pytest.mark.parametrize(
    "line, message",
    [
        (
            "device: h1000",
            r"mine.yaml:2: device 'h1000' is not in the catalog; did you mean 'H100'",
        ),
        (
            "device: H100\nintra_link: nvlnk4",
            r"mine.yaml:3: link 'nvlnk4' .* did you mean 'NVLink4'",
        ),
        (
            "device: H100\nfabric:\n  - {name: a, devices: 8, link: NVLink9}\n  - name: b",
            r"mine.yaml:4: fabric.0.link 'NVLink9' is not in the catalog; allowed: .*, or a rate "
            r"above 0: .* did you mean 'NVLink5'",
        ),
        (
            "device: H100\nfabric:\n  - {name: a, devices: 8}\n  - {name: b, link: NVLink4}",
            r"mine.yaml:5: fabric.1.link NVLink4 is a link inside a node; allowed: .*; use NVLink",
        ),
        (
            "device: H100\nfabric: [{name: a, devices: 8}, {name: b, devices: 12}]",
            r"mine.yaml:3: fabric: a level of 12 devices is not .* level of 8 .*; allowed: .* 16",
        ),
        (
            "device: H100\nnode: 4",
            r"mine.yaml:3: node: is not a known field; .*did you mean 'nodes'",
        ),
    ],
)
def test_a_wrong_cluster_file_is_refused_with_its_line(tmp_path: Path, line: str, message: str):
    file = tmp_path / "mine.yaml"
    file.write_text(f"name: mine\n{line}\ndevices_per_node: 8\n")
    with pytest.raises(UserError, match=message):
        catalog.cluster(file)


def test_a_link_between_racks_may_be_a_nodes_own_that_states_its_rate(tmp_path: Path):
    file, levels = (
        tmp_path / "mine.yaml",
        "[{name: node, devices: 4}, {name: rack, link: NVLink5 900 GB/s}]",
    )
    file.write_text(f"name: mine\ndevice: GB200\nfabric: {levels}\ndevices_per_node: 4\n")
    assert catalog.site(file).fabric[1].link == "NVLink5 900 GB/s"


def test_an_unknown_cluster_or_missing_file_is_refused():
    with pytest.raises(UserError, match=r"a path that ends in \.yaml") as refused:
        catalog.cluster("dgx-h10")
    assert refused.value.remedy == "did you mean 'dgx-h100'?"
    with pytest.raises(UserError, match="cannot be read"):
        catalog.cluster("nowhere/mine.yaml")


def test_a_link_in_the_place_of_the_other_kind_is_refused_with_its_line(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    start = "name: mine\ndevice: H100\ndevices_per_node: 8\n"
    for line, words in (
        ("inter_link: NVLink4", "inter_link NVLink4 is a link inside a node"),
        ("intra_link: ib ndr", "intra_link ib ndr is a network between nodes"),
    ):
        file.write_text(f"{start}{line}\n")
        with pytest.raises(
            UserError, match=f"{file}:4: {words}; allowed: a link of the right kind"
        ):
            catalog.cluster(file)
