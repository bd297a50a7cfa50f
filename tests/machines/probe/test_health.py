"""What a driver, a kernel's log and a disk say of a node is taken at its word, and no further."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.machines.probe import health

WELL: dict[str, Any] = {
    "ecc_uncorrected": "0",
    "rows_pending": "No",
    "rows_failed": "No",
    "hw_slowdown": "Not Active",
    "sw_thermal_slowdown": "Not Active",
}
ROOM = {"folder_free_bytes": 500e9, "folder_bytes": 1e12, "temporary_free_bytes": 50e9, "xids": []}


def test_a_healthy_node_has_no_faults():
    assert health.faults(ROOM, [WELL, WELL]) == [] and health.remarks([WELL]) == []


def test_what_is_not_told_is_no_fault():
    silent = dict.fromkeys(WELL)
    assert health.faults({"xids": None}, [silent, {}]) == []
    assert health.faults({}, []) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ecc_uncorrected": "3"}, "GPU 1 has 3 uncorrected memory errors"),
        ({"rows_failed": "Yes"}, "GPU 1 could not remap"),
        ({"rows_pending": "Yes"}, "GPU 1 needs a reset"),
        (
            {"hw_slowdown": "Active", "hw_thermal_slowdown": "Active"},
            "GPU 1 is slowed down by the hardware because of heat",
        ),
        ({"hw_power_brake_slowdown": "Active"}, "brake signal"),
    ],
)
def test_a_sick_gpu_is_named_once(changes: dict[str, Any], words: str):
    (fault,) = health.faults(ROOM, [WELL, {**WELL, **changes}])
    assert words in fault


def test_a_clock_lowered_by_software_is_only_a_remark():
    hot = {**WELL, "sw_thermal_slowdown": "Active"}
    assert health.faults(ROOM, [hot]) == []
    assert health.remarks([WELL, hot]) == ["GPU 1 lowers its clock because of heat"]


def test_errors_of_hardware_count_and_those_of_programs_do_not():
    xids = [
        {"xid": 31, "address": "0000:17:00"},
        {"xid": 79, "address": "0000:17:00"},
        {"xid": 79, "address": "0000:17:00"},
    ]
    assert health.faults({**ROOM, "xids": xids}, []) == [
        "the kernel's log has Xid 79 (the GPU fell off the bus) of GPU 0000:17:00"
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"folder_free_bytes": 1e8}, "100 MB (0.0%) are free in the run folder"),
        ({"folder_free_bytes": 1.5e10}, "15.0 GB (1.5%) are free in the run folder"),
        ({"temporary_free_bytes": 0}, "0 B are free in its temporary folder"),
    ],
)
def test_a_full_disk_is_a_fault(changes: dict[str, float], words: str):
    (fault,) = health.faults({**ROOM, **changes}, [])
    assert words in fault
