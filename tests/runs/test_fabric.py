"""What carries collectives is stored in the run, required of it, and known to comparisons."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.core.fabric import FabricProof
from paceline.core.hardware import Cluster
from paceline.core.result import Result
from paceline.files.documents import write_value
from paceline.files.run_folder import RUN_FILE
from paceline.runs.difference import run_diff
from paceline.runs.outcome import evaluate
from tests.command import paceline
from tests.example import make_spec, noisy
from tests.files.rank_files import step_times, write_ranks
from tests.files.test_run_folder import make_record
from tests.runs.test_flow import SMALL

PAYLOAD, CALLS = 1 << 20, 5
SENT = PAYLOAD * CALLS
SMALL_PAYLOAD = {"bytes": PAYLOAD // 2, "time_s": 0.008, "spread": 0.0}


def interface(name: str, sent: int = SENT, kind: str = "net", address: str = "") -> dict[str, Any]:
    return {"name": name, "kind": kind, "address": address, "sent_bytes": sent}


def run_folder(
    folder: Path,
    *interfaces: dict[str, Any],
    nccl: dict[str, str] | None = None,
    probes: Sequence[dict[str, Any]] = ({}, {}),
    **cluster: Any,
) -> Path:
    """A run of two nodes whose first host sent by these interfaces during the probe.

    `probes` are fields of the probes of both ranks.
    """
    fields = {"name": "two", "device": "cpu", "nodes": 2, "devices_per_node": 1, **cluster}
    site = Cluster.model_validate(fields)
    spec = make_spec(ranks=site.world_size, cluster=site)
    write_value(folder / RUN_FILE, make_record(name=folder.name, spec=spec))
    probe = {
        **{"bytes": PAYLOAD, "calls": CALLS, "time_s": 0.01, "spread": 0.02},
        **{"small": SMALL_PAYLOAD, "interfaces": list(interfaces)},
    }
    last = {**probe, "time_s": 0.02, "interfaces": []}
    first, last = probe | probes[0], last | probes[1]
    write_ranks(
        folder,
        spec,
        step_times(noisy(20)),
        changes={0: {"fabric": first}, 1: {"fabric": last}},
    )
    (folder / "logs").mkdir()
    for host, line in (nccl or {}).items():
        text = f"{host}:7:8 [0] NCCL INFO {line}\n"
        (folder / f"logs/nccl.{host}.7.log").write_text(text)
    return folder


def evaluated(folder: Path) -> tuple[Result, FabricProof]:
    result = evaluate(folder).result
    assert result.fabric is not None
    return result, result.fabric


def test_counters_show_the_interface_and_the_probe_its_rate(tmp_path: Path) -> None:
    quiet = interface("eth1", sent=2000)
    _, proof = evaluated(run_folder(tmp_path / "a", interface("eth0"), quiet))

    assert (proof.between_nodes, proof.interfaces) == (("sockets",), ("eth0",))
    # Two ranks: a link carries the payload once. The slowest rank needs 0.02 s.
    assert proof.bus_bytes_per_s == PAYLOAD / 0.02
    assert proof.evidence == ("interface counters", "probe")


def test_two_payloads_show_the_rate_without_latency(tmp_path: Path) -> None:
    """The slowest rank takes 4 ms more for the larger payload, with a spread of 0.4 ms."""
    small = {**SMALL_PAYLOAD, "time_s": 0.016}
    times = {"small": small}
    _, proof = evaluated(run_folder(tmp_path / "a", interface("eth0"), probes=(times, times)))
    assert proof.asymptotic_bytes_per_s == pytest.approx(PAYLOAD / 2 / 0.004)
    assert proof.asymptotic_spread == pytest.approx(0.1)
    assert proof.bus_bytes_per_s == PAYLOAD / 0.02

    equal = {"small": {**small, "time_s": 0.02}}
    _, proof = evaluated(run_folder(tmp_path / "b", interface("eth0"), probes=(equal, equal)))
    assert proof.asymptotic_bytes_per_s is None and proof.asymptotic_spread is None


def test_ports_of_rdma_devices_count_before_sockets(tmp_path: Path) -> None:
    ports = [interface(f"mlx5_{n}:1", SENT // 4 * (n < 3), "InfiniBand") for n in range(4)]
    _, proof = evaluated(run_folder(tmp_path / "a", *ports, interface("eth0")))

    assert proof.between_nodes == ("infiniband",)
    assert (proof.used_ports, proof.available_ports) == (3, 4)


def test_the_rate_is_compared_with_the_clusters_link(tmp_path: Path) -> None:
    _, proof = evaluated(run_folder(tmp_path / "a", interface("eth0"), inter_link="0.1 GB/s"))
    assert (proof.expected_bytes_per_s, proof.link) == (0.1e9, "0.1 GB/s")
    assert "52% of 100 MB/s (0.1 GB/s)" in proof.sentence


def test_the_log_of_nccl_counts_before_the_counters(tmp_path: Path) -> None:
    log = {
        "a": "Channel 00/0 : 0[0] -> 1[0] [send] via NET/gIB/0/GDRDMA",
        "b": "Channel 00/0 : 0[0] -> 1[0] [receive] via NET/gIB/0",
    }
    _, proof = evaluated(run_folder(tmp_path / "a", interface("eth0"), nccl=log))
    assert proof.between_nodes == ("gib",) and proof.gpu_direct == 0.5


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (interface("docker0", address="172.17.0.1"), "an interface of a container or pod network"),
        (interface("eth1", address="169.254.0.9"), "the link-local address 169.254.0.9"),
    ],
)
def test_an_interface_that_nobody_requested_is_named(
    tmp_path: Path, use: dict[str, Any], reason: str
) -> None:
    result, _ = evaluated(run_folder(tmp_path / "a", use))
    assert any(reason in warning and "--interface" in warning for warning in result.warnings)
    result, _ = evaluated(run_folder(tmp_path / "b", use, interface=use["name"]))
    assert not any(reason in warning for warning in result.warnings)


def test_a_requirement_without_evidence_is_not_met(tmp_path: Path) -> None:
    _, proof = evaluated(run_folder(tmp_path / "a", require_transport="rdma"))
    assert "no evidence" in (proof.problem or "")
    _, proof = evaluated(run_folder(tmp_path / "b", interface("eth0"), require_transport="rdma"))
    assert proof.problem == (
        "rdma is required (--require-transport), but collectives use TCP sockets (eth0)"
    )


def test_another_transport_is_a_difference_between_runs(tmp_path: Path) -> None:
    port = interface("mlx5_0:1", kind="Ethernet")
    runs = run_folder(tmp_path / "a", port), run_folder(tmp_path / "b", interface("eth0"))
    named = {d.item: (d.a, d.b) for d in run_diff(*map(evaluate, runs)).differences}
    assert named["transport of collectives"] == ("RoCE between nodes", "TCP sockets between nodes")


def test_a_run_on_another_transport_is_invalid(tmp_path: Path) -> None:
    """Two processes here communicate by gloo over loopback, which is not NVLink."""
    words = ["run", "tiny-llama", "--no-probe", "--devices", "2", *SMALL, "--set", "steps=400"]
    done = paceline(*words, "--require-transport", "nvlink", "--json", runs=tmp_path)

    result = json.loads(done.stdout)
    assert done.returncode == 3 and result["status"] == "failed"
    assert result["steps_done"] < 400  # ended at once
    assert result["fabric"]["within_node"] == ["loopback"]
    assert "nvlink is required" in result["reason"]


def test_a_requirement_that_cannot_apply_is_refused(tmp_path: Path) -> None:
    words = ["run", "tiny-llama", "--devices", "2", "--require-transport"]
    done = paceline(*words, "rdma", "--dry-run", runs=tmp_path)
    assert done.returncode == 1 and "one node" in done.stderr
    done = paceline(*words, "carrier-pigeon", "--dry-run", runs=tmp_path)
    assert done.returncode == 1 and "infiniband" in done.stderr
