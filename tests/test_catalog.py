from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import catalog
from paceline.core.hardware import Device, Link, Peak
from paceline.errors import UserError
from paceline.units import MIB

DEVICES = {device.name: device for device in catalog.devices()}
LINKS = {link.name: link for link in catalog.links()}
TERA = 1e12


def column(folder: Path, file: str, name: str) -> list[str]:
    with (folder / file).open(newline="") as rows:
        return sorted({row[name] for row in csv.DictReader(rows)})


def signs_of_sparsity(device: Device) -> list[str]:
    """Ratios between a device's peaks that cannot be if all of them are dense."""
    rate = {dtype: peak.flops_per_s for dtype, peak in device.peaks.items()}
    half = rate.get("bf16") or rate.get("fp16")
    if half is None:
        return []
    ranges = {"fp16": (1, 1), "bf16": (1, 1), "fp8": (1.9, 2.1), "mxfp8": (1.9, 2.1)}
    ranges |= {"nvfp4": (3.9, 6.1), "fp32": (0.02, 0.15)}
    found = {dtype: value / half for dtype, value in rate.items()}
    return [d for d, ratio in found.items() if not ranges[d][0] <= ratio <= ranges[d][1]]


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
            if "MAMF" in row["kind"] and "Gaudi" not in row["gpu"]:
                device = catalog.device(row["gpu"])
                yield device, row["dtype"], float(row["tflops"]), float(row["peak_tflops"])


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_the_peaks_of_a_device_are_all_dense(device: Device):
    assert signs_of_sparsity(device) == []


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp8", "mxfp8", "nvfp4"])
def test_one_sparse_peak_among_dense_ones_would_be_seen(dtype: str):
    assert signs_of_sparsity(with_doubled(DEVICES["B200"], dtype))


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


@pytest.mark.parametrize(
    "printed, name",
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA H200", "H200-SXM"),
        ("NVIDIA H200 NVL", "H200-NVL"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
        ("Tesla V100-PCIE-32GB", "V100-PCIe-32GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40GB"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA GB300", "GB300"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI355X VF", "MI355X"),
        ("H100-SXM-80GB", "H100-SXM"),
        ("H100-80GB-HBM3", "H100-SXM"),
        ("V100-SXM2-32GB", "V100-SXM2-32GB"),
        ("GB200-186GB", "GB200"),
        ("NVIDIA Blackwell GPU (B200-SXM-180GB)", "B200"),
    ],
)
def test_what_drivers_and_tables_print_names_one_device(printed: str, name: str):
    match = catalog.find_device(printed)
    assert (match.device.name, match.exact, match.note) == (name, True, None)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_case_and_punctuation_do_not_matter(device: Device):
    for name in (device.name, *device.aliases):
        for written in (name.lower(), name.upper(), name.replace("-", " "), name.replace(" ", "_")):
            match = catalog.find_device(written)
            assert match.device is device and match.exact


@pytest.mark.parametrize(
    "written, name, open_point",
    [
        ("H100", "H100-SXM", "could be any of H100-SXM, H100-PCIe, H100-NVL"),
        ("h200", "H200-SXM", "H200-NVL"),
        ("A100-SXM (memory size not stated)", "A100-SXM-80GB", "A100-SXM-40GB"),
        ("NVIDIA A100 PCIe", "A100-PCIe-80GB", "A100-PCIe-40GB"),
        ("V100-16GB", "V100-SXM2-16GB", "V100-PCIe-16GB"),
        ("B200-192GB", "B200", "192gb is not known of B200"),
        ("H100-SXM-96GB-HBM2e-500W", "H100-SXM", "no public data sheet"),
    ],
)
def test_an_unstated_variant_is_taken_as_the_family_default_and_noted(
    written: str, name: str, open_point: str
):
    match = catalog.find_device(written)
    assert match.device.name == name and not match.exact
    assert match.note and match.note.startswith(written) and open_point in match.note


def test_a_bare_family_is_its_first_device():
    first = {device.family: device for device in reversed(catalog.devices())}
    for family, device in first.items():
        assert catalog.device(family.lower()) is device


@pytest.mark.parametrize(
    "written",
    [
        "",
        "GPU",
        "NVIDIA",
        "H800",
        "H20",
        "RTX 4090",
        "Intel Gaudi 3",
        "Tesla V100S-PCIE-32GB",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "unknown A100-class",
        "H100 or H200",
        "A100-PCIe SXM4",
    ],
)
def test_a_product_that_is_not_in_the_catalog_is_refused(written: str):
    with pytest.raises(UserError, match="is not in the catalog") as refused:
        catalog.find_device(written)
    assert refused.value.exit_code == 1


def test_a_refusal_names_what_there_is_and_what_is_near():
    with pytest.raises(UserError) as refused:
        catalog.device("h10O")
    assert refused.value.allowed and "H100-NVL" in refused.value.allowed
    assert refused.value.remedy == "did you mean 'h100'?"


def test_no_name_belongs_to_two_entries():
    for entries in (catalog.devices(), catalog.links()):
        names = [re.sub(r"\W|_", "", n).lower() for e in entries for n in {e.name, *e.aliases}]
        assert [name for name, count in Counter(names).items() if count > 1] == []


def test_every_string_of_the_published_measurements_resolves(reference_data: Path):
    resolvers = {
        "gpu": catalog.find_device,
        "dtype": catalog.dtype,
        "intra_node_net": catalog.find_link,
        "inter_node_net": catalog.find_link,
    }
    for name, resolve in resolvers.items():
        strings = column(reference_data, "references/measured_open.csv", name)
        assert len(strings) >= 8
        for string in strings:
            assert resolve(string), string


def test_hardware_of_the_other_published_tables_resolves_or_is_unknown(reference_data: Path):
    for file in ("references/gemm.csv", "references/collectives.csv"):
        for name in column(reference_data, file, "gpu"):
            if "unknown" in name or "Gaudi" in name:
                with pytest.raises(UserError):
                    catalog.find_device(name)
            else:
                assert catalog.find_device(name), name


def test_accelerators_of_benchmark_submissions_are_known_exactly(reference_data: Path):
    files = sorted((reference_data / "mlperf" / "systems").glob("*.json"))
    systems = [json.loads(file.read_text()) for file in files]
    names = {system["accelerator_model_name"] for system in systems}
    names.update(column(reference_data, "mlperf/results.csv", "accelerator"))
    assert len(names) >= 10
    assert [name for name in names if not catalog.find_device(name).exact] == []


@pytest.mark.parametrize(
    "written, name, node_bytes_per_s",
    [
        ("nvlink4", "NVLink4", None),
        ("NVLink4 450GB/s uni", "NVLink4", None),
        ("NVLink3 (AR LUT 229 GB/s busbw 8 GPU)", "NVLink3", None),
        ("NVLink5 NVL72 900GB/s uni", "NVLink5-NVL72", None),
        ("NVLINK Gen5 1800 GB/s + NVSWITCH Gen4", "NVLink5", None),
        ("8x400Gb/s IB NDR", "InfiniBand-NDR", 400e9),
        ("4x200Gb/s IB HDR (config inter_node_bandwidth 800 Gb/s)", "InfiniBand-HDR", 100e9),
        ("4x100Gb/s Omni-Path per node (JZ)", "Omni-Path-100", 50e9),
        ("4x ConnectX-8 IB XDR 800 Gb/s", "InfiniBand-XDR", None),
        ("10G Ethernet", "Ethernet-10", None),
        ("shared memory", "loopback", None),
    ],
)
def test_a_description_names_a_link_and_what_a_node_has_of_it(
    written: str, name: str, node_bytes_per_s: float | None
):
    match = catalog.find_link(written)
    assert match.link is LINKS[name] and match.exact
    assert match.node_bytes_per_s == node_bytes_per_s


@pytest.mark.parametrize(
    "written, name",
    [
        ("NVLink", "NVLink4"),
        ("8x400Gb/s (not stated; platform RDMA)", "InfiniBand-NDR"),
        ("800Gb/s/GPU", "InfiniBand-XDR"),
        ("1600Gb/s RoCE per node", "RoCE-200"),
        ("xGMI", "xGMI-MI300"),
    ],
)
def test_an_unstated_link_is_taken_as_something_and_noted(written: str, name: str):
    match = catalog.find_link(written)
    assert match.link is LINKS[name] and not match.exact and match.note


@pytest.mark.parametrize(
    "device, generation",
    [("V100", "NVLink2"), ("A100", "NVLink3"), ("H200", "NVLink4"), ("GB300", "NVLink5-NVL72")],
)
def test_the_device_tells_an_unstated_nvlink_generation(device: str, generation: str):
    assert catalog.find_link("NVLink", catalog.device(device)).link is LINKS[generation]


def test_a_single_node_has_no_network():
    assert catalog.find_link("single node").link is None
    with pytest.raises(UserError, match="no network"):
        catalog.link("single node")


@pytest.mark.parametrize("written", ["", "token ring", "NVLink4 + EFA", "NVLink9", "NDR ring"])
def test_an_unknown_link_is_refused(written: str):
    with pytest.raises(UserError, match="is not in the catalog"):
        catalog.find_link(written)


@pytest.mark.parametrize(
    "written, dtype",
    [
        ("bfloat16", "bf16"),
        ("BF16", "bf16"),
        ("half", "fp16"),
        ("float16", "fp16"),
        ("float32", "fp32"),
        ("fp8-cs", "fp8"),
        ("fp8 (unsplit col)", "fp8"),
        ("fp8_mx", "mxfp8"),
        ("NVFP4", "nvfp4"),
    ],
)
def test_a_dtype_has_several_names(written: str, dtype: str):
    assert catalog.dtype(written) == dtype


@pytest.mark.parametrize("written", ["tf32", "fp4", "int8", "fp64", ""])
def test_a_dtype_without_peaks_is_refused(written: str):
    with pytest.raises(UserError, match="is not in the catalog"):
        catalog.dtype(written)


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


def test_a_cluster_file_may_use_any_name_of_its_parts(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    text = "name: mine\ndevice: NVIDIA H100 80GB HBM3\ndevices_per_node: 8\ninter_link: ib ndr\n"
    file.write_text(text)
    for path in (file, str(file)):
        cluster = catalog.cluster(path)
        assert (cluster.device, cluster.inter_link) == ("H100-SXM", "InfiniBand-NDR")
        assert cluster.intra_link is None


@pytest.mark.parametrize(
    "line, message",
    [
        ("device: h1000", r"mine.yaml:2: device 'h1000' is not in the catalog; allowed: .*h100"),
        (
            "device: H100\nintra_link: nvlnk4",
            r"mine.yaml:3: link 'nvlnk4' .* did you mean 'nvlink4'",
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


def test_an_unknown_cluster_or_missing_file_is_refused():
    with pytest.raises(
        UserError, match=r"dgx-h100, .*or a path that ends in .yaml|dgx-h100"
    ) as refused:
        catalog.cluster("dgx-h10")
    assert refused.value.remedy == "did you mean 'dgx-h100'?"
    with pytest.raises(UserError, match="cannot be read"):
        catalog.cluster("nowhere/mine.yaml")
