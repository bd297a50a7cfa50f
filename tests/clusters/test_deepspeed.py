"""The first procedure by DeepSpeed itself: sub-clusters over SSH to their table, and Slurm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.engines.launch.environments import installed
from tests.clusters.bed import Bed
from tests.clusters.test_scale import cluster_file
from tests.surroundings import own_folders

STEPS = 6
SMALL = (
    *("num_layers=1", "hidden_size=64", "ffn_size=128", "embedding_size=32", "seq_len=64"),
    *("dtype=fp32", f"steps={STEPS}", "training.lr_schedule.warmup=3", "training.lr=3e-3"),
)
ARGUMENTS = ["opt-350m-sft-tiny", "--engine", "deepspeed_chat"]
ARGUMENTS += [word for change in SMALL for word in ("--set", change)]
pytestmark = pytest.mark.skipif(
    installed("deepspeed_chat") is None, reason="`make frameworks` has not made its environment"
)


def called(bed: Bed, runs: Path, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **bed.env,
        **own_folders(runs),
        "PACELINE_ENGINES": os.environ["PACELINE_ENGINES"],
    }
    command = [sys.executable, "-m", "paceline", verb, *ARGUMENTS, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)


def test_sub_clusters_of_both_sizes_train_at_once_and_give_the_published_table(
    ssh_hosts: Bed, tmp_path: Path
) -> None:
    cluster = cluster_file(ssh_hosts, "ssh", tmp_path)
    hosts = ssh_hosts.names[:2]
    options = ["--cluster", cluster, "--hosts", ",".join(hosts), "--sizes", "1,2"]
    limits = ["--extra-rounds", "0", "--name", "trial", "--min-per-node", "0.001", "--json"]
    done = called(ssh_hosts, tmp_path, "scale", *options, *limits)

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert len(result["runs"]) == 3 and result["missing"] == 0
    header, *rows = (tmp_path / "trial" / "results.csv").read_text().splitlines()
    assert header == "Hostnames,Throughput (samples/sec),Status"
    assert len(rows) == 3 and all(row.endswith(",Success") for row in rows)
    logs = sorted(tmp_path.glob("*/logs/rank-00000.log"))
    assert len(logs) == 3 and all("Throughput: " in log.read_text() for log in logs)
    assert len([*tmp_path.glob("*/logs/rank-00001.log")]) == 1


def test_slurm_starts_it_on_two_nodes(slurm_cluster: Bed, tmp_path: Path) -> None:
    cluster = cluster_file(slurm_cluster, "slurm", tmp_path)
    done = called(slurm_cluster, tmp_path, "run", "--cluster", cluster, "--nodes", "2", "--json")

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["status"] == "ok" and result["metrics"]["samples_per_s"]["value"] > 0
    assert not [warning for warning in result["warnings"] if "but the plan" in warning]
