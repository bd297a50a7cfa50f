"""The network between real hosts: all pairs are measured, and the one with a slow link is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.scaling.network.report import NetworkReport
from tests.clusters.bed import Bed
from tests.clusters.test_check import paceline


def measured(bed: Bed, runs: Path, *arguments: str) -> NetworkReport:
    over_ssh = ("--hosts", "node-[001-004]", "--ssh-config", str(bed.ssh_config))
    brief = ("--max-bytes", "262144", "--seconds", "1", "--json", "--runs-dir", str(runs))
    done = paceline(bed, "probe", "network", *over_ssh, *brief, *arguments)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (Path(document.pop("folder")) / "report.html").is_file()
    return NetworkReport.model_validate(document)


@pytest.mark.alone
def test_every_pair_of_hosts_is_measured_and_collectives_are_right(ssh_hosts: Bed, tmp_path: Path):
    report = measured(ssh_hosts, tmp_path, "--ops", "all_reduce,send_recv")
    assert len(report.pairs) == 4 * 3 and not report.faults
    assert {host.host for host in report.hosts} == {f"node-00{n}" for n in range(1, 5)}
    assert all(host.partners == 3 for host in report.hosts)
    assert {row.operation for row in report.collectives} == {"all_reduce", "send_recv"}
    assert all(row.ranks == 4 and row.wrong == 0 for row in report.collectives)
    assert "12 directions between 4 hosts" in " ".join(report.sentences)
