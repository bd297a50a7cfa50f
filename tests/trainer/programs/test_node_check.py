"""Two processes that stand for two hosts measure themselves and each other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from paceline.trainer.measure.clock import HostClock
from paceline.trainer.programs import node_check
from paceline.trainer.programs.bandwidth import BLOCKS, sustained_rates
from tests.ports import free_port
from tests.trainer.example import LIMIT_S, program

QUESTION = {"device": "cpu", "dtype": "fp32", "seconds": 0.1, "at_once": 1, "rounds": [[[0, 1]]]}


def start(
    folder: Path, rank: int, rounds: list[list[list[int]]] = QUESTION["rounds"], **environment: str
) -> subprocess.Popen[bytes]:
    """One process that is a whole node."""
    (folder / "question.json").write_text(json.dumps(QUESTION | {"rounds": rounds}))
    env = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "PACELINE_STORE": "rank0",
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    return subprocess.Popen(
        [sys.executable, program("programs.node_check"), "question.json"], cwd=folder, env=env
    )


def lines(folder: Path, rank: int) -> list[dict[str, Any]]:
    text = (folder / "check" / f"rank-{rank:05d}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """What both nodes wrote."""
    folder, port = tmp_path_factory.mktemp("check"), str(free_port())
    nodes = [start(folder, rank, WORLD_SIZE="2", MASTER_PORT=port) for rank in range(2)]
    assert [node.wait(LIMIT_S) for node in nodes] == [0, 0]
    return [lines(folder, rank) for rank in range(2)]


def test_every_part_is_done_in_its_order(told: list[list[dict[str, Any]]]) -> None:
    for rank, events in enumerate(told):
        assert [line["event"] for line in events] == [
            "facts",
            "rate",
            "rate",
            "pair",
            "health",
            "end",
        ]
        assert all((line["rank"], line["node"]) == (rank, rank) for line in events)


def test_rates_come_in_blocks_and_the_value_is_their_median(
    told: list[list[dict[str, Any]]],
) -> None:
    for events in told:
        rates = {line["what"]: line for line in events if line["event"] == "rate"}
        assert set(rates) == {"gemm", "memory"}
        for line in rates.values():
            assert len(line["rates"]) == line["n"] == BLOCKS
            assert line["value"] == median(line["rates"]) > 0


def test_both_ends_of_a_pair_tell_of_it(told: list[list[dict[str, Any]]]) -> None:
    pairs = [next(line for line in events if line["event"] == "pair") for events in told]
    assert [pair["partner"] for pair in pairs] == [1, 0]
    assert all(pair["bus_bytes_per_s"] > 0 and pair["latency_s"] > 0 for pair in pairs)


def test_a_node_that_sits_out_a_round_is_found_in_the_next(tmp_path: Path) -> None:
    rounds, port = [[[0, 1]], [[0, 2]], [[1, 2]]], str(free_port())
    nodes = [
        start(
            tmp_path,
            rank,
            rounds,
            WORLD_SIZE="3",
            MASTER_PORT=port,
            PACELINE_COLLECTIVE_LIMIT_S="60",
        )
        for rank in range(3)
    ]
    assert [node.wait(LIMIT_S) for node in nodes] == [0, 0, 0]

    told = [lines(tmp_path, rank) for rank in range(3)]

    partners = [[x["partner"] for x in events if x["event"] == "pair"] for events in told]
    assert partners == [[1, 2], [0, 2], [0, 1]]
    assert not [line for events in told for line in events if line["event"] == "fault"]


def test_a_node_whose_partner_never_comes_still_measures_itself(tmp_path: Path) -> None:
    port = str(free_port())
    alone = start(tmp_path, 0, WORLD_SIZE="2", MASTER_PORT=port, PACELINE_COLLECTIVE_LIMIT_S="2")
    assert alone.wait(LIMIT_S) == 0
    events = lines(tmp_path, 0)
    assert [line["part"] for line in events if line["event"] == "fault"] == ["join"]
    assert {line["what"] for line in events if line["event"] == "rate"} == {"gemm", "memory"}
    assert events[-1]["event"] == "end"


def fake_command(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_a_driver_that_lacks_some_fields_still_tells_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_command(
        tmp_path,
        "nvidia-smi",
        """case "$1" in
*name,uuid*) echo "NVIDIA H100, GPU-1, 550.1, 81559 MiB, 00000000:17:00.0";;
*ecc*) echo "[N/A]";;
*remapped*) exit 2;;
*temperature*) echo 61;;
*clocks_event*) exit 2;;
*clocks_throttle*) echo "Active, Not Active, Active, Not Active";;
esac""",
    )
    fake_command(
        tmp_path, "dmesg", 'echo "[1.0] NVRM: Xid (PCI:0000:17:00): 79, pid=1, fell off the bus"'
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (gpu,) = node_check.gpus()
    assert (gpu["name"], gpu["ecc_uncorrected"], gpu["temperature_c"]) == (
        "NVIDIA H100",
        None,
        "61",
    )
    assert (gpu["hw_slowdown"], gpu["hw_thermal_slowdown"]) == ("Active", "Not Active")
    assert "rows_failed" not in gpu
    assert node_check.xids() == [{"address": "0000:17:00", "xid": 79}]
    fake_command(tmp_path, "dmesg", "exit 1")
    assert node_check.xids() is None


@pytest.mark.parametrize(
    "said", ["N/A", "[N/A]", "[Not Supported]", "[Unknown Error]", "[GPU is lost]"]
)
def test_what_a_driver_does_not_tell_is_unknown(said: str) -> None:
    assert node_check._smi_value(f" {said} ") is None
    assert node_check._smi_value(" 0 ") == "0"


def test_remapped_rows_are_asked_for_in_either_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_command(
        tmp_path,
        "nvidia-smi",
        """case "$1" in
--query-gpu=name,uuid*) printf 'NVIDIA H200, GPU-%s, 580, 143771 MiB, 0000:1%s:00.0\\n' 1 1 2 2;;
--query-remapped-rows=*) printf 'Yes, No\\nNo, No\\n';;
*) exit 2;;
esac""",
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    found = node_check.gpus()

    assert [(gpu["rows_pending"], gpu["rows_failed"]) for gpu in found] == [
        ("Yes", "No"),
        ("No", "No"),
    ]


def test_a_bound_rank_tells_the_cores_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_BOUND", json.dumps({"host_cores": "0-3,8"}))
    assert node_check.node_facts()["num_cores"] == 5


def test_a_throttled_device_cannot_look_fast_between_its_pauses() -> None:
    calls = iter(range(10_000))

    class Pausing(HostClock):
        """Every second block has a pause."""

        def seconds(self, start: float, end: float) -> float:
            return 0.5 if next(calls) % 2 else 1.5

    assert median(sustained_rates(lambda: None, 1.0, Pausing(), 0.1)) == pytest.approx(
        (2 + 2 / 3) / 2
    )


HANGS = "import time; time.sleep(600)"
FAILS = "import torch; raise RuntimeError('no such device')"
DIES = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"


SLOW_IMPORT = """
class SlowTorch:
    def find_spec(self, name, *_):
        if name == "torch":
            time.sleep(2)

sys.meta_path.insert(0, SlowTorch())
"""


@pytest.mark.parametrize(
    ("before", "trouble", "limit_s", "reason"),
    [
        ("", HANGS, 1.0, "the device did not answer within 1 s"),
        ("", DIES, LIMIT_S, f"the device's process was killed by signal {signal.SIGSEGV:d}"),
        ("", FAILS, LIMIT_S, "no such device"),
        (SLOW_IMPORT, FAILS, 1.0, "no such device"),
    ],
)
def test_the_fault_of_a_device_is_a_line_whatever_becomes_of_its_process(
    tmp_path: Path, before: str, trouble: str, limit_s: float, reason: str
) -> None:
    text = f"""
import sys, time
from paceline.trainer.programs import node_check
{before}
node_check.NodeCheck.open_device = lambda self: exec({trouble!r})
sys.exit(node_check.main("question.json"))
"""
    (tmp_path / "question.json").write_text(json.dumps(QUESTION | {"alone_s": limit_s}))
    subprocess.run([sys.executable, "-c", text], cwd=tmp_path, check=True, timeout=LIMIT_S)
    facts, fault, health, end = lines(tmp_path, 0)
    assert (facts["event"], health["event"], end["event"]) == ("facts", "health", "end")
    assert fault["event"] == "fault" and fault["reason"] == reason
