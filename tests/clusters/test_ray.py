"""Runs on real raylets of this machine: good and bad ends, and scaling over four nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.core.errors import EXIT_INCOMPLETE, EXIT_SYSTEM_FAULT
from paceline.files.run_folder import LOGS_FOLDER, STEPS_FOLDER
from tests.clusters.ray_bed import RayBed, ray_bed
from tests.clusters.test_scale import QUICK
from tests.runs.test_flow import SMALL, only_run, result_of
from tests.surroundings import own_folders
from tests.waiting import wait_until

FOREVER = ("--set", "steps=1000000", "--set", "compile=none")
NODES = [f"127.0.0.{number}" for number in range(2, 6)]


@pytest.fixture(scope="module")
def unshared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the last node sees other files."""
    return tmp_path_factory.mktemp("unshared")


@pytest.fixture(scope="module")
def ray_nodes(unshared: Path) -> Iterator[RayBed]:
    """Four nodes of two CPUs."""
    with ray_bed(4, {3: unshared}) as bed:
        yield bed


def cluster_file(bed: RayBed, folder: Path, **changes: str) -> str:
    """A cluster file of two nodes with one rank each."""
    fields = {
        "name": "rays",
        "device": "cpu",
        "devices_per_node": "1",
        "threads_per_device": "1",
        "nodes": "2",
        "launcher": "ray",
        "ray": f'{{address: "{bed.address}"}}',
        **changes,
    }
    file = folder / "cluster.yaml"
    file.write_text("".join(f"{name}: {value}\n" for name, value in fields.items()))
    return str(file)


def start(runs: Path, *words: str) -> subprocess.Popen[str]:
    """A command of Paceline in the background."""
    return subprocess.Popen(
        [sys.executable, "-m", "paceline", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **own_folders(runs)},
    )


def train(bed: RayBed, runs: Path, *words: str, **changes: str) -> subprocess.Popen[str]:
    """`paceline run` of a tiny model on two nodes."""
    file = cluster_file(bed, runs, **changes)
    return start(runs, "run", "tiny-llama", "--no-probe", *SMALL, "--cluster", file, *words)


def finish(process: subprocess.Popen[str], limit_s: float = 120) -> str:
    """The errors of a command that ends."""
    try:
        return process.communicate(timeout=limit_s)[1]
    finally:
        process.kill()


def rank_pids(runs: Path) -> list[int]:
    """Process ids of the ranks, once both have made some steps; empty before."""
    texts = [path.read_text() for path in sorted(runs.glob(f"*/{STEPS_FOLDER}/rank-*.jsonl"))]
    if len(texts) < 2 or any(text.count('{"event": "step"') < 5 for text in texts):
        return []
    return [json.loads(text.splitlines()[0])["pid"] for text in texts]


def left(runs: Path) -> list[list[str]]:
    """Command lines of processes of a run, and of its driver, that are still there."""
    found: list[list[str]] = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            folder = process.cwd()
            is_driver = any("driver_program" in word for word in words) and any(
                str(runs) in value for value in process.environ().values()
            )
        except psutil.Error:
            continue
        if folder.startswith(str(runs)) or is_driver:
            found.append(words)
    return found


def disturbed(bed: RayBed, runs: Path, disturb: Any) -> tuple[int, str]:
    """Exit code and errors of an endless run that is disturbed after its first steps."""
    process = train(bed, runs, *FOREVER, hosts=f"[{NODES[0]}, {NODES[1]}]")
    try:
        wait_until(lambda: rank_pids(runs) or process.poll() is not None, "steps", 120)
        assert process.poll() is None, process.communicate()
        disturb(process)
        errors = finish(process, 90)
    finally:
        process.kill()
    wait_until(lambda: not left(runs), "the end of all processes", 20)
    return process.returncode, errors


def test_a_run_over_two_raylets_ends_well_and_leaves_nothing(
    ray_nodes: RayBed, tmp_path: Path
) -> None:
    process = train(ray_nodes, tmp_path, "--set", "steps=20", hosts=f"[{NODES[2]}, {NODES[1]}]")
    errors = finish(process)
    assert process.returncode == 0, errors
    assert f"running on {NODES[2]},{NODES[1]}" in errors.replace(", ", ","), errors
    folder = only_run(tmp_path)
    assert len(list((folder / STEPS_FOLDER).iterdir())) == 2
    assert {path.name for path in (folder / LOGS_FOLDER).glob("host-*")} == {
        f"host-{NODES[1]}.log",
        f"host-{NODES[2]}.log",
    }
    assert result_of(tmp_path)["status"] == "ok" and not left(tmp_path)
    assert not list(folder.glob(".paceline-*"))


def test_a_killed_rank_is_the_reason(ray_nodes: RayBed, tmp_path: Path) -> None:
    disturbed(ray_nodes, tmp_path, lambda _: os.kill(rank_pids(tmp_path)[1], signal.SIGKILL))
    result = result_of(tmp_path)
    assert result["status"] == "failed" and result["reason"] == "rank 1 was killed by SIGKILL"


def test_a_killed_ray_worker_is_named_with_its_node(ray_nodes: RayBed, tmp_path: Path) -> None:
    def kill_worker(_: object) -> None:
        agent = psutil.Process(rank_pids(tmp_path)[1]).parent()
        assert agent is not None
        worker = agent.parent()
        assert worker is not None and worker.cmdline()[0].startswith("ray::"), worker
        worker.kill()

    disturbed(ray_nodes, tmp_path, kill_worker)
    result = result_of(tmp_path)
    assert result["status"] == "failed"
    assert result["reason"].startswith(f"{NODES[1]}: its Ray worker died: "), result["reason"]


def test_ctrl_c_ends_the_ranks_of_all_nodes(ray_nodes: RayBed, tmp_path: Path) -> None:
    code, _ = disturbed(ray_nodes, tmp_path, lambda p: p.send_signal(signal.SIGINT))
    assert code == EXIT_INCOMPLETE and result_of(tmp_path)["status"] == "cancelled"


def test_a_time_limit_ends_the_ranks_and_keeps_their_steps(
    ray_nodes: RayBed, tmp_path: Path
) -> None:
    process = train(ray_nodes, tmp_path, *FOREVER, "--timeout", "15")
    errors = finish(process)
    result, folder = result_of(tmp_path), only_run(tmp_path)
    assert process.returncode == EXIT_SYSTEM_FAULT and result["status"] == "timeout", errors
    assert len(list((folder / STEPS_FOLDER).iterdir())) == 2 and not left(tmp_path)


def test_ranks_end_with_a_killed_controller(ray_nodes: RayBed, tmp_path: Path) -> None:
    disturbed(ray_nodes, tmp_path, lambda process: process.kill())


def test_a_node_without_the_run_folder_sends_its_files_back(
    ray_nodes: RayBed, unshared: Path
) -> None:
    process = train(ray_nodes, unshared, "--set", "steps=20", hosts=f"[{NODES[0]}, {NODES[3]}]")
    errors = finish(process)
    assert process.returncode == 0, errors
    result, folder = result_of(unshared), only_run(unshared)
    assert result["status"] == "ok"
    steps = [p.read_text().count('{"event": "step"') for p in (folder / STEPS_FOLDER).iterdir()]
    assert steps == [20, 20]
    assert (folder / LOGS_FOLDER / f"host-{NODES[3]}.log").exists()
    assert any(f"{NODES[3]} does not see {folder}" in text for text in result["warnings"])


def test_another_version_of_ray_is_refused_with_both_versions(
    ray_nodes: RayBed, tmp_path: Path
) -> None:
    older = tmp_path / "python"
    program = "import ray, runpy, sys; ray.__version__ = '2.9.3'; " + (
        "runpy.run_path(sys.argv[-1], run_name='__main__')"
    )
    older.write_text(f'#!/bin/sh\nexec {sys.executable} -I -c "{program}" "$@"\n')
    older.chmod(0o755)
    settings = f'{{address: "{ray_nodes.address}", python: {older}}}'
    process = train(ray_nodes, tmp_path, ray=settings)
    errors = finish(process)
    assert process.returncode == 2
    for text in ("Version mismatch", "Ray: 2.9.3", "set ray.python to an interpreter"):
        assert text in errors, errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ray": '{address: "127.0.0.1:1"}'}, "127.0.0.1:1: "),
        ({"devices_per_node": "16"}, "2 nodes with 16 CPU each are requested, 0 of its 4 nodes"),
        ({"hosts": "[127.0.0.2, 127.0.0.99]"}, "127.0.0.99 is not one of its nodes: 127.0.0.2"),
    ],
)
def test_a_request_that_ray_cannot_serve_is_refused_at_once(
    ray_nodes: RayBed, tmp_path: Path, changes: dict[str, str], message: str
) -> None:
    process = train(
        ray_nodes, tmp_path, "--set", "global_batch=32", "--set", "layout.micro_batch=1", **changes
    )
    errors = finish(process)
    assert process.returncode == 2 and message in errors, errors


def test_a_check_without_hosts_names_every_node(ray_nodes: RayBed, tmp_path: Path) -> None:
    words = ["check", "--ray-address", ray_nodes.address, "--devices", "1", "--json"]
    process = start(tmp_path, *words)
    output, errors = process.communicate(timeout=180)
    assert process.returncode in (0, 3), errors
    assert all(name in output for name in NODES[:3]), output


@pytest.mark.nightly
def test_scale_over_four_raylets_makes_the_table_of_ssh(ray_nodes: RayBed, tmp_path: Path) -> None:
    file = cluster_file(ray_nodes, tmp_path, nodes="4")
    process = start(tmp_path, "scale", *QUICK, "--cluster", file, "--json")
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    result = json.loads(output)
    assert [(row["nodes"], row["n"]) for row in result["sizes"]] == [(1, 4), (2, 2), (4, 1)]
    alone = [run["hosts"][0] for run in result["runs"] if len(run["hosts"]) == 1]
    assert sorted(alone) == NODES and result["missing"] == 0


def test_a_killed_raylet_is_a_lost_node(ray_nodes: RayBed, tmp_path: Path) -> None:
    started_s = time.monotonic()
    disturbed(ray_nodes, tmp_path, lambda _: ray_nodes.raylet(NODES[1]).kill())
    result = result_of(tmp_path)
    assert result["status"] == "failed" and time.monotonic() - started_s < 240
    reasons = {
        f"{NODES[1]}: {why}" for why in ("Ray lost the node", "its Ray worker did not answer")
    }
    assert result["reason"] in reasons
