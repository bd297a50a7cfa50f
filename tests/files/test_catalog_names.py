from __future__ import annotations

import csv
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.core.hardware import Device
from paceline.files import catalog

DEVICES = {device.name: device for device in catalog.devices()}
LINKS = {link.name: link for link in catalog.links()}


def column(folder: Path, file: str, name: str) -> list[str]:
    with (folder / file).open(newline="") as rows:
        return sorted({row[name] for row in csv.DictReader(rows)})


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
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000-Server"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000-Workstation"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA A30", "A30"),
        ("NVIDIA A40", "A40"),
        ("Tesla T4", "T4"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H800", "H800-SXM"),
        ("NVIDIA GB10", "GB10"),
        ("NVIDIA A800-SXM4-80GB", "A800-SXM-80GB"),
        ("NVIDIA A800-SXM4-40GB", "A800-SXM-40GB"),
        ("NVIDIA A800 80GB PCIe", "A800-PCIe-80GB"),
        ("NVIDIA A800-PCIE-40GB", "A800-PCIe-40GB"),
        ("Tesla V100S-PCIE-32GB", "V100S-PCIe-32GB"),
        ("NVIDIA GH200 120GB", "GH200-96GB"),
        ("NVIDIA GH200 144G HBM3e", "GH200-144GB"),
        ("NVIDIA L20", "L20"),
        ("AMD Instinct MI100", "MI100"),
        ("AMD Instinct MI210", "MI210"),
        ("AMD Instinct MI250", "MI250-GCD"),
        ("AMD Instinct MI250X", "MI250X-GCD"),
        ("AMD Instinct MI300A", "MI300A"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI325X", "MI325X"),
        ("GAUDI2", "Gaudi2"),
        ("Intel Gaudi 2", "Gaudi2"),
        ("HL-225", "Gaudi2"),
        ("Intel Gaudi 3", "Gaudi3"),
        ("HL-325L", "Gaudi3"),
        ("trn1.32xlarge", "Trainium1"),
        ("AWS Trainium2", "Trainium2"),
        ("trn2.48xlarge", "Trainium2"),
        ("Trainium3", "Trainium3"),
        ("Ascend910PremiumA", "Ascend-910A"),
        ("Ascend910B2", "Ascend-910B2"),
        ("Ascend910B3", "Ascend-910B3"),
        ("Ascend910B4", "Ascend-910B4"),
        ("TPU v3", "TPU-v3"),
        ("TPU v4", "TPU-v4"),
        ("TPU v5 lite", "TPU-v5e"),
        ("TPU v5", "TPU-v5p"),
        ("TPU v6 lite", "TPU-v6e"),
        ("TPU7x-Ironwood", "TPU-v7"),
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
        ("RTX PRO 6000", "RTX-PRO-6000-Server", "RTX-PRO-6000-Workstation"),
        ("A100-SXM (memory size not stated)", "A100-SXM-80GB", "A100-SXM-40GB"),
        ("NVIDIA A100 PCIe", "A100-PCIe-80GB", "A100-PCIe-40GB"),
        ("V100-16GB", "V100-SXM2-16GB", "V100-PCIe-16GB"),
        ("B200-192GB", "B200", "192gb is unknown for B200"),
        ("H100-SXM-96GB-HBM2e-500W", "H100-SXM", "no public data sheet"),
        ("MI250X", "MI250X-OAM", "MI250X-GCD where devices are counted like that"),
        ("MI250", "MI250-OAM", "MI250-GCD where devices are counted like that"),
        ("Ascend-910C", "Ascend-910C-package", "Ascend-910C-die where devices are counted"),
        ("Ascend910_9382", "Ascend-910C-die", "no source states the rate by this name"),
        ("Ascend-910B", "Ascend-910B2", "any of Ascend-910B2, Ascend-910B3, Ascend-910B4"),
        ("Ascend910", "Ascend-910A", "dies of the 910C"),
        ("A800", "A800-SXM-80GB", "A800-PCIe-40GB"),
    ],
)
def test_an_unstated_variant_is_taken_as_the_family_default_and_noted(
    written: str, name: str, open_point: str
):
    match = catalog.find_device(written)
    assert match.device.name == name and not match.exact
    assert match.note and match.note.startswith(written) and open_point in match.note


def test_an_unstated_variant_has_the_memory_rate_that_its_source_states():
    assert catalog.find_device("H100-SXM-96GB-HBM2e-500W").device.memory_bytes_per_s == 2.4e12
    assert catalog.device("H100-SXM").memory_bytes_per_s == 3.35e12


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
        "RTX 4090 D",
        "NVIDIA GeForce RTX 5090 Laptop GPU",
        "NVIDIA A10G",
        "NVIDIA L20X",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "TPU v2",
        "TPU v44",
        "Intel Gaudi 4",
        "Ascend910B1",
        "Ascend 950PR",
        "AMD Instinct MI308X",
        "inf2.48xlarge",
        "NVIDIA GH200 480GB MIG 1g.12gb",
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
    assert refused.value.remedy == (
        "did you mean 'H100'? Its peak is 989.5 TFLOP/s in bf16. "
        "`paceline recipes devices` lists them"
    )


@pytest.mark.parametrize("written", ["MI251X", "A8000", "H80", "TPU v44", "Gaudi-33"])
def test_a_suggested_device_is_shown_with_its_peak(written: str):
    with pytest.raises(UserError) as refused:
        catalog.device(written)
    name, peak, dtype = re.findall(
        r"did you mean '(.+)'\? Its peak is ([\d,.]+) TFLOP/s in (\w+)\.",
        refused.value.remedy or "",
    )[0]
    flops_per_s = catalog.device(name).peaks[dtype].flops_per_s
    assert float(peak.replace(",", "")) == pytest.approx(flops_per_s / 1e12, rel=1e-3)


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
            if "unknown" in name:
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
    [
        ("V100", "NVLink2"),
        ("A100", "NVLink3"),
        ("H200", "NVLink4"),
        ("GB300", "NVLink5-NVL72"),
        ("H800", "NVLink4-H800"),
    ],
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
