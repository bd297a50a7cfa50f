"""A calibration is found again by device and dtype, and says where it was measured."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.core.hardware import Cluster
from paceline.estimate.calibrate.calibration import (
    Calibration,
    Placement,
    calibration_path,
    calibrations_folder,
    cpu_machine,
    find_calibration,
    read_calibration,
)
from paceline.estimate.calibrate.lookup import (
    calibration_for,
    evidence_for,
    machine_for,
    read_evidence,
)
from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.fit.refit import cpu_prior
from paceline.estimate.single_estimate import estimate_provenance
from paceline.files.documents import write_value

PLACEMENTS = (
    Placement(ranks=1, threads=2, flops_per_s=2e11, memory_bytes_per_s=2e10, link_bytes_per_s=None),
    Placement(ranks=2, threads=1, flops_per_s=1e11, memory_bytes_per_s=1e10, link_bytes_per_s=2e9),
)


def calibration(**changes: object) -> Calibration:
    """A processor of two cores."""
    plain = Calibration(
        device="Some CPU @ 2 GHz",
        kind="cpu",
        catalog_device="cpu",
        dtype="fp32",
        host=platform.node(),
        date="2026-01-02T03:04:05+00:00",
        torch="2.13",
        cores=2,
        memory_bytes=8e9,
        placements=PLACEMENTS,
        probes=0,
        steps=(),
        undetermined_coefficients=(),
        inseparable_coefficients=(),
        evidence=cpu_prior("fp32"),
    )
    return plain.model_copy(update=changes)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path / "paceline" / "calibrations"


def kept(found: Calibration) -> Path:
    path = calibration_path(found.device, found.dtype)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_value(path, found)
    return path


def test_it_lies_in_the_users_data_folder_by_device_and_dtype(own_folder: Path):
    assert calibrations_folder() == own_folder
    assert kept(calibration()).name == "some-cpu-2-ghz-fp32.json"
    assert find_calibration("Some CPU @ 2 GHz", "fp32") == calibration()
    assert find_calibration("Some CPU @ 2 GHz", "bf16") is None
    assert find_calibration("cpu", "fp32") is None


def test_a_gpu_is_found_by_its_catalog_name_too():
    card = {"kind": "cuda", "catalog_device": "H100-SXM", "dtype": "bf16"}
    kept(calibration(device="NVIDIA H100 80GB HBM3", host="other", **card))
    assert find_calibration("H100-SXM", "bf16") is not None
    here = calibration(device="another H100", date="2020", **card)
    kept(here)
    assert find_calibration("H100-SXM", "bf16") == here


def test_a_gpu_is_found_by_an_alias_of_the_catalog():
    kept(
        calibration(
            device="NVIDIA H100 80GB HBM3", kind="cuda", catalog_device="H100-SXM", dtype="bf16"
        )
    )
    found = calibration_for("H100", "auto")
    assert found is not None and found == calibration_for("H100-SXM", "bf16")
    assert calibration_for("H200", "bf16") is None
    # A run's device calls itself by another name than the one that was calibrated.
    assert evidence_for("H100-SXM", "bf16", "NVIDIA H100 PG520") == found.labelled_evidence()


def test_a_file_that_is_none_spoils_its_own_device_alone(own_folder: Path):
    kept(calibration(device="NVIDIA H100", kind="cuda", catalog_device="H100-SXM", dtype="bf16"))
    (own_folder / "a100-sxm-80gb-bf16.json").write_text('{"schema_version": 0}')
    assert (
        find_calibration("H100-SXM", "bf16") is not None
        and find_calibration("H200-SXM", "bf16") is None
    )
    with pytest.raises(UserError, match="does not contain a calibration"):
        find_calibration("A100-SXM-80GB", "bf16")


def test_it_says_whether_it_is_from_here():
    for host, provenance in ((platform.node(), "measured here"), ("elsewhere", "stored profile")):
        evidence = calibration(host=host).labelled_evidence()
        assert evidence.provenance == provenance
        assert evidence.title.startswith(f"{provenance}: ")


def test_a_title_is_text_and_says_nothing_of_the_provenance():
    entitled = cpu_prior("fp32").model_copy(update={"title": "measured here: not at all"})
    basis = estimate_provenance(entitled, cpu_machine(calibration(), 2), None, None)
    assert (basis.coefficients, basis.title) == ("public prior", "measured here: not at all")


def test_a_file_that_is_none_is_refused(tmp_path: Path):
    path = tmp_path / "x.json"
    path.write_text('{"device": 1}')
    with pytest.raises(UserError, match="does not contain a calibration"):
        read_calibration(path)


def test_its_coefficients_can_be_named_as_evidence(tmp_path: Path):
    given = read_evidence(kept(calibration()))
    assert given.evidence == calibration().labelled_evidence()
    assert given.calibration == calibration() and given.of("cpu", "fp32") == given.evidence
    wrong = tmp_path / "list.json"
    for text in ("[1]", "1", "{}"):
        wrong.write_text(text)
        with pytest.raises(UserError, match="does not contain coefficients"):
            read_evidence(wrong)


def test_coefficients_alone_are_of_any_device(tmp_path: Path):
    path = tmp_path / "own.json"
    path.write_text(shipped_evidence().model_dump_json())
    given = read_evidence(path)
    assert given.calibration is None and given.of_gpus() == shipped_evidence()
    assert given.of("cpu", "bf16") == given.of("H100", "auto") == shipped_evidence()


@pytest.mark.parametrize("change", [{"schema_version": 2}, {"placements": 1}, {"cores": None}])
def test_a_calibration_that_cannot_be_read_is_no_file_of_coefficients_alone(
    tmp_path: Path, change: dict[str, object]
):
    """Else a processor would be estimated by its coefficients and by rates of another file."""
    path = tmp_path / "newer.json"
    path.write_text(json.dumps({**calibration().model_dump(mode="json"), **change}))
    with pytest.raises(
        UserError,
        match="does not contain a calibration; create one with `paceline probe calibrate`",
    ):
        read_evidence(path)


def test_a_calibration_is_of_its_kind_of_device_and_a_processors_of_its_dtype():
    own = read_evidence(kept(calibration()))
    for of_gpu in (lambda: own.of("H100", "auto"), own.of_gpus):
        with pytest.raises(UserError, match="was measured on Some CPU @ 2 GHz and does not"):
            of_gpu()
    words = "fp32.json: was measured in fp32, but .* uses bf16; allowed: a calibration in bf16"
    with pytest.raises(UserError, match=words):
        own.of("cpu", "bf16")
    cluster = Cluster(name="c", device="cpu", devices_per_node=2)
    assert machine_for(cluster, "fp32", cpu_calibration=calibration()).domain == 2
    with pytest.raises(
        UserError, match="this calibration: was measured in fp32, but the training run uses bf16"
    ):
        machine_for(cluster, "bf16", cpu_calibration=calibration())
    card = calibration(device="a card", kind="cuda", catalog_device="H100-SXM", dtype="bf16")
    given = read_evidence(kept(card))
    assert given.of("H100", "fp8") == given.of_gpus() == given.evidence
    with pytest.raises(UserError, match="was measured on a card and does not apply to cpu"):
        given.of("cpu", "bf16")


@pytest.mark.parametrize(
    "wrong",
    [
        {"residual_sd": {}},
        {"residual_sd": {"torch": -0.1}},
        {"medians": {"gemm_hopper": -0.5}},
        {"medians": {"gemm_hopper": float("nan")}},
        {"covariance": {"gemm_hopper": {"gemm_hopper": -1.0}}},
    ],
)
def test_figures_that_no_fit_leaves_are_no_evidence(tmp_path: Path, wrong: dict[str, object]):
    path = tmp_path / "evidence.json"
    path.write_text(json.dumps({**shipped_evidence().model_dump(mode="json"), **wrong}))
    with pytest.raises(UserError, match="does not contain coefficients"):
        read_evidence(path)


def test_processes_share_cores_and_memory():
    two, four = (cpu_machine(calibration(), ranks) for ranks in (2, 4))
    assert two.peak_wide("fp32") == 1e11 and two.device.memory_bytes == 4e9
    assert four.peak_wide("fp32") == 5e10 and four.device.memory_bytes_per_s == 5e9
    assert any("oversubscribed" in note for note in four.notes)
    assert not any("oversubscribed" in note for note in two.notes)
    assert (
        cpu_machine(calibration(), 1).cpu_oversubscription == two.cpu_oversubscription == 1
        and four.cpu_oversubscription == 2
    )


def test_another_dtype_has_no_rate():
    with pytest.raises(UserError, match="no 16-bit peak"):
        cpu_machine(calibration(), 1).peak_16bit()
