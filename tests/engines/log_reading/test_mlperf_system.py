"""What NVIDIA's launch scripts print of the machine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.engines.log_reading.log_content import LogContent
from paceline.engines.log_reading.mlperf_system import System

LAUNCH = ":::DLPAL reg/image:1 174 18 node[01-18] 'unknown' GB300_18x4x1xtp2pp3cp4_8b\n"


def described(**fields: Any) -> str:
    system = {
        "system_name": "X",
        "number_of_nodes": "18",
        "accelerators_per_node": "4",
        "accelerator_model_name": "NVIDIA GB300",
    }
    return f":::SYSJSON {json.dumps({**system, **fields})}\n"


def read(*blocks: str) -> LogContent:
    log, system = LogContent(), System()
    for block in blocks:
        system.read(block.encode())
    system.keep(log)
    return log


def test_the_configurations_name_states_devices_and_parallel_sizes():
    assert read(LAUNCH).facts == {"num_devices": 72, "tp": 2, "pp": 3, "cp": 4}


def test_the_description_states_devices_and_their_name():
    assert read(described()).facts == {"num_devices": 72, "device": "NVIDIA GB300"}


def test_a_line_that_the_shell_echoes_first_changes_nothing():
    echoed = f"+ echo '{LAUNCH.rstrip()}'\n+ echo '{described().rstrip()}'\n"

    assert read(echoed + LAUNCH + described()).facts == read(LAUNCH + described()).facts


def test_a_description_whose_echo_is_quoted_is_read_from_its_own_line():
    echoed = described(sw_notes="it's").replace("it's", "it'\\''s")

    assert read(echoed, described()).facts["num_devices"] == 72


def test_what_was_launched_goes_before_what_one_node_sees():
    log = read(LAUNCH + described(number_of_nodes="1"))

    assert log.facts["num_devices"] == 72 and log.facts["device"] == "NVIDIA GB300"
    assert "1 x 4 by the system description" in log.remarks[0]
    assert log.remarks[0].endswith(": 18 x 4 is used")


REUSED = ":::DLPAL reg/image:1 174 4 host[2-5] 'unknown' DGXH200_1x8x1xtp1pp1cp2\n"
"""A configuration for one node, launched on four."""


def test_hosts_go_before_the_name_of_a_configuration_that_was_reused():
    log = LogContent(facts={"platform": "4xNVIDIA H200"})
    system = System()
    system.read((REUSED + described(number_of_nodes="4", accelerators_per_node="8")).encode())
    system.keep(log)

    assert (log.facts["num_devices"], log.facts["cp"]) == (32, 2)
    assert log.remarks == [
        "sources for the device count disagree (4 hosts in the launch line, 4 x 8 by the system "
        "description, 1 x 8 by the configuration's name, 4 by the platform's name): 4 x 8 is used"
    ]


def test_without_hosts_the_description_goes_before_a_name_of_fewer_nodes():
    launch = ":::DLPAL DGXH200_1x8x1xtp1pp1cp2\n"

    log = read(launch + described(number_of_nodes="4", accelerators_per_node="8"))

    assert log.facts["num_devices"] == 32 and "1 x 8 by the configuration's name" in log.remarks[0]


def test_a_name_tells_the_devices_that_a_node_was_started_with():
    log = read(LAUNCH + described(accelerators_per_node="8"))

    assert log.facts["num_devices"] == 72 and "18 x 8 by the system description" in log.remarks[0]


def test_a_submitted_description_goes_before_the_name_and_behind_the_hosts():
    system, submitted = System(), {"number_of_nodes": "4", "accelerators_per_node": "8"}
    system.read(b":::DLPAL DGXH200_1x8x1xtp1pp1cp2\n")

    devices = system.devices(submitted=submitted)

    assert devices is not None and devices.num_devices == 32
    later = System()
    later.read(REUSED.replace("174 4", "174 2").encode())
    hosts = later.devices(submitted=submitted)
    assert hosts is not None and hosts.num_devices == 16 and "2 hosts" in str(hosts.doubt)


def test_a_platform_that_counts_the_devices_of_a_node_is_no_contradiction():
    log = LogContent(facts={"platform": "8xNVIDIA H200"})
    system = System()
    system.read(REUSED.replace("174 4", "174 1").encode())
    system.keep(log)

    assert log.facts["num_devices"] == 8 and log.remarks == []


@pytest.mark.parametrize("nodes", ["", "x", "0", "-1", 18, None, "٣", "9" * 30])
def test_a_description_without_counts_states_none(nodes: object):
    assert "num_devices" not in read(described(number_of_nodes=nodes)).facts


@pytest.mark.parametrize(
    "text",
    [
        ":::SYSJSON \n",
        ":::SYSJSON [1]\n",
        ":::SYSJSON " + "[" * 20_000,
        ":::DLPAL a b c\n",
        ":::DLPAL x_0x0x1xtp1pp1cp1\n",
        ":::DLPAL",
    ],
)
def test_lines_that_say_nothing_are_passed_over(text: str):
    assert read(text).facts == {}
