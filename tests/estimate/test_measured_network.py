"""The fabric probe of a run as the network of an estimate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.model_options import measured_network
from paceline.core.errors import UserError
from paceline.estimate.calibrate.lookup import evidence_for
from paceline.estimate.measured_network import NetworkRate
from paceline.estimate.model.coefficients import coefficient_values
from paceline.estimate.request import EstimateRequest
from paceline.estimate.single_estimate import Estimate, estimate
from tests.command import paceline
from tests.runs.test_fabric import PAYLOAD, interface, run_folder

GPUS = {"device": "H100-SXM", "devices_per_node": 8}
SMALL = {"bytes": PAYLOAD // 8, "time_s": 0.00005, "spread": 0.02}
PROBE = {"spread": 0.02, "time_s": 0.0002, "small": SMALL}


def gpu_run(folder: Path, probe: dict[str, Any] | None = None, **cluster: Any) -> Path:
    """A run of two nodes with eight GPUs each, whose link between nodes is an InfiniBand port."""
    port = interface("mlx5_0:1", kind="InfiniBand")
    probe = PROBE if probe is None else probe
    return run_folder(folder, port, probes=(probe, probe), **{**GPUS, **cluster})


def network_of(folder: Path) -> NetworkRate:
    network = measured_network(str(folder), None)
    assert network is not None
    return network


def estimated(**fields: Any) -> Estimate:
    values = {"recipe": "llama31-8b", "device": "H100-SXM", "devices": 32, **fields}
    return estimate(EstimateRequest(**values), evidence_for("H100-SXM", "bf16"))


def test_the_measured_rate_is_used_as_it_is(tmp_path: Path) -> None:
    """The fitted share of a link's rate does not apply to what collectives reached."""
    network = network_of(gpu_run(tmp_path / "a"))
    rate = 15 / 8 * PAYLOAD * 7 / 8 / 0.00015
    assert network.bus_bytes_per_s == pytest.approx(rate)
    assert network.bytes_per_s == pytest.approx(rate / 8)

    measured = estimated(network=network)
    share = coefficient_values(evidence_for("H100-SXM", "bf16").fit().centre)["inter"]
    link = estimated(inter_link=f"{network.bytes_per_s / share / 1e9} GB/s")
    assert measured.step_time_s == pytest.approx(link.step_time_s, rel=1e-6)


def test_the_estimate_states_the_origin(tmp_path: Path) -> None:
    network = network_of(gpu_run(tmp_path / "a"))
    result = estimated(network=network)
    assert result.measured_network == network
    assert result.provenance.network == "measured"
    (note,) = [note for note in result.notes if "network" in note]
    for part in ("run a", "2 x 8 H100-SXM", "InfiniBand", "mlx5_0:1", "5 measurements", "1 MiB"):
        assert part in note


@pytest.mark.parametrize(
    ("probe", "cluster", "reason"),
    [
        ({**PROBE, "small": {**SMALL, "time_s": 0.0002}}, {}, "do not show the bandwidth"),
        ({**PROBE, "spread": 0.9}, {}, "varies too much"),
        (PROBE, {"nodes": 1}, "on one node"),
        (PROBE, {"nodes": 1, "devices_per_node": 1}, "on one device"),
        (PROBE, {"device": "cpu"}, "gloo"),
        (PROBE, {"require_transport": "efa"}, "efa is required"),
    ],
)
def test_an_unknown_network_stays_unknown(
    tmp_path: Path, probe: dict[str, Any], cluster: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        network_of(gpu_run(tmp_path / "a", probe, **cluster))


def test_nodes_need_as_many_devices_as_those_of_the_run(tmp_path: Path) -> None:
    network = network_of(gpu_run(tmp_path / "a"))
    with pytest.raises(UserError, match="8 devices per node, not 4"):
        estimated(network=network, devices_per_node=4)
    assert estimated(network=network, devices=4).measured_network  # no network is used


def test_the_option_takes_a_run_and_refuses_other_names(tmp_path: Path) -> None:
    folder = gpu_run(tmp_path / "a")
    words = ["estimate", "llama31-8b", "--gpu", "H100", "--gpus", "32", "--compare"]
    words += ["inter=InfiniBand-NDR", "--inter"]
    done = paceline(*words, "a", "--json", runs=tmp_path)
    first, second = json.loads(done.stdout)["scenarios"]
    assert first["measured_network"]["source"] == f"run {folder.name}"
    assert second["measured_network"] is None

    done = paceline(*words, "no-such", runs=tmp_path)
    assert done.returncode == 1 and "a run, or a file" in done.stderr
