"""This machine's description: what it rests on, what is open, and that already exists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.errors import SystemFaultError, UserError
from paceline.mlperf.check import official_checker
from paceline.mlperf.submission import system_description
from paceline.mlperf.submission.description_check import FIELDS, UNKNOWN
from paceline.mlperf.submission.system_description import describe

CLUSTER = "name: east\ndevice: {device}\nnodes: 4\ndevices_per_node: 8\n"


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without the official package, which takes its time."""
    monkeypatch.setattr(system_description, "checker_rulesets", list)


def filled(*but: str) -> list[str]:
    """Settings for every open field."""
    values = {"status": "Preview", "division": "closed", "submitter": "Example"}
    names = [name for name in FIELDS if name != "other_software_stack" and name not in but]
    return [f"{name}={values.get(name, '1')}" for name in names]


@pytest.mark.skipif(
    not official_checker.checker_rulesets(), reason="mlperf-logging is not installed"
)
def test_a_filled_description_is_complete_by_the_official_checker(tmp_path: Path):
    path = tmp_path / "new/box.json"
    description = describe(None, filled(), path)

    assert (description.status, description.unknown, description.findings) == ("complete", (), ())
    assert description.checker and description.checker.startswith("mlperf-logging 4")
    assert json.loads(path.read_text()) == description.description
    with pytest.raises(UserError, match="--ruleset 9: is not known"):
        describe(None, [], None, "9")


def test_what_this_machine_does_not_tell_is_open(unchecked: None):
    description = describe(None, filled("cooling", "status"), None)

    assert {field.field for field in description.unknown} == {"cooling", "status"}
    assert str(description.description["cooling"]).startswith(UNKNOWN)
    assert (description.status, description.output, description.checker) == (
        "incomplete",
        None,
        None,
    )
    assert "the official checker did not run" in description.notes[0]


@pytest.mark.skipif(
    not official_checker.checker_rulesets(), reason="mlperf-logging is not installed"
)
def test_without_the_checkers_answer_no_description_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(official_checker, "PROGRAM", tmp_path / "crashes.py")
    (tmp_path / "crashes.py").write_text("raise OSError('no room')")

    description = describe(None, filled(), None)

    assert (description.status, description.findings) == ("incomplete", ())
    assert "official checker: the checker crashed: OSError: no room" in description.notes[-1]


@pytest.mark.skipif(
    not official_checker.checker_rulesets(), reason="mlperf-logging is not installed"
)
def test_a_wrong_setting_is_a_finding_and_no_open_field():
    description = describe(None, [*filled("cooling"), "status=onprem"], None)

    assert description.status == "failed" and [field.key for field in description.findings] == [
        "status"
    ]
    assert [field.field for field in description.unknown] == ["cooling"]


def test_an_existing_file_is_not_touched(tmp_path: Path, unchecked: None):
    path = tmp_path / "box.json"
    path.write_text("mine")

    with pytest.raises(UserError, match="already exists"):
        describe(None, [], path)
    assert path.read_text() == "mine"
    with pytest.raises(SystemFaultError, match="cannot be written"):
        describe(None, [], path / "below.json")


def test_a_cluster_of_machines_like_this_one_says_what_it_takes_for_granted(
    tmp_path: Path, unchecked: None
):
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER.format(device="cpu"))
    description = describe(str(path), [], None)

    assert description.description["number_of_nodes"] == "4"
    assert "all 4 nodes of east are assumed to equal this machine" in description.notes


def test_a_machine_without_the_clusters_devices_is_no_node_of_it(
    tmp_path: Path, unchecked: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(system_description, "inventory", lambda: {"gpus": []})
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER.format(device="H100"))
    description = describe(str(path), [], None)

    assert "it is not a node of east" in description.notes[0]
    assert str(description.description["host_memory_capacity"]).startswith(UNKNOWN)
    assert description.description["accelerator_model_name"] == "H100-SXM"
