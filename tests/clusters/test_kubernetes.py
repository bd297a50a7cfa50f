"""Runs on a small Kubernetes of this machine, through the real kubectl: good and bad ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import EXIT_INCOMPLETE, EXIT_SYSTEM_FAULT, SystemFaultError
from paceline.engines import engine
from paceline.files.run_folder import LOGS_FOLDER, STEPS_FOLDER, read_record
from paceline.machines import kubernetes
from paceline.machines.kubernetes.manifest import workload_name
from paceline.runs import flow
from tests.clusters.kubernetes_bed import Kubernetes, kubernetes_bed
from tests.clusters.test_scale import QUICK
from tests.machines.kubernetes.clusters import job_on
from tests.runs.test_flow import SMALL, only_run, result_of
from tests.surroundings import own_folders
from tests.waiting import wait_until

WAITING = 'echo "started on $NODE_NAME"; sleep 300'
"""Program of the user that says where it runs."""
MESSAGES = "messages.txt"
TINY = ["opt-350m-sft-tiny", *QUICK[QUICK.index("--set") :], "--set", "layout.micro_batch=1"]


@pytest.fixture(scope="module")
def bed() -> Iterator[Kubernetes]:
    """Four nodes with room for one pod each."""
    with kubernetes_bed(4) as cluster:
        yield cluster


@pytest.fixture
def cluster(bed: Kubernetes) -> Iterator[Kubernetes]:
    """The cluster, without the faults and objects of other tests."""
    yield bed
    bed.quota = bed.image_error = None
    bed.lost.clear()
    for resource in ("jobsets", "jobs", "pods", "services", "configmaps", "secrets"):
        for item in bed.of(resource):
            bed.delete(resource, item)
    for event in bed.of("events"):
        bed.store("events", event, "DELETED")
    wait_until(lambda: not left(bed), "the end of all objects", 45)


def left(cluster: Kubernetes) -> list[str]:
    """Objects of runs that are still there."""
    return [name for kind, name in cluster.items if kind not in ("nodes", "events")]


def cluster_file(folder: Path, settings: str = "", **changes: str) -> str:
    """A cluster file of two nodes with one rank each."""
    fields = {
        "name": "pods",
        "device": "cpu",
        "devices_per_node": "1",
        "threads_per_device": "1",
        "nodes": "2",
        "launcher": "kubernetes",
        "python": sys.executable,
        "kubernetes": f"{{image: any/image, {settings}}}",
        **changes,
    }
    file = folder / "cluster.yaml"
    file.write_text("".join(f"{name}: {value}\n" for name, value in fields.items()))
    return str(file)


def start(cluster: Kubernetes, runs: Path, *words: str) -> subprocess.Popen[str]:
    """A command of Paceline in the background, whose messages go to a file."""
    with (runs / MESSAGES).open("w") as messages:
        return subprocess.Popen(
            [sys.executable, "-m", "paceline", *words],
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
            env={**os.environ, **own_folders(runs), "KUBECONFIG": str(cluster.kubeconfig)},
        )


def train(
    cluster: Kubernetes, runs: Path, *words: str, settings: str = "", **changes: str
) -> subprocess.Popen[str]:
    """`paceline run` of a tiny model on two nodes."""
    file = cluster_file(runs, settings, **changes)
    return start(
        cluster, runs, "run", "tiny-llama", "--no-probe", *SMALL, "--cluster", file, *words
    )


def verb(cluster: Kubernetes, runs: Path, *words: str) -> dict[str, Any]:
    """The JSON of a verb that ends well and leaves no objects."""
    process = start(cluster, runs, *words, "--json")
    try:
        text, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, messages(runs)
    assert not left(cluster)
    return json.loads(text)


def finish(process: subprocess.Popen[str], runs: Path, limit_s: float = 120) -> str:
    """The messages of a command that ends."""
    try:
        process.communicate(timeout=limit_s)
        return messages(runs)
    finally:
        process.kill()


def messages(runs: Path) -> str:
    """The messages of a command so far."""
    return (runs / MESSAGES).read_text()


def interrupted(process: subprocess.Popen[str], runs: Path, text: str) -> None:
    """Interrupts a command once it has printed a text, and waits for its end."""
    try:
        wait_until(lambda: text in messages(runs) or process.poll() is not None, text, 60)
        assert text in messages(runs), messages(runs)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == EXIT_INCOMPLETE


def program(
    cluster: Kubernetes, runs: Path, text: str = WAITING, **changes: str
) -> subprocess.Popen[str]:
    """`paceline run` of a program of the user on two nodes."""
    file = cluster_file(runs, **changes)
    return start(cluster, runs, "run", "--cluster", file, "--", "bash", "-c", text)


def output(runs: Path) -> str:
    """What the ranks have printed, as far as it has arrived here."""
    return "".join(path.read_text() for path in sorted(runs.glob(f"*/{LOGS_FOLDER}/rank-*.log")))


def disturbed(
    cluster: Kubernetes, runs: Path, disturb: Callable[[subprocess.Popen[str]], None]
) -> tuple[int, str]:
    """Exit code and errors of an endless program that is disturbed after its start."""
    process = program(cluster, runs)
    try:
        wait_until(
            lambda: output(runs).count("started on") == 2 or process.poll() is not None,
            "the output of both ranks",
            60,
        )
        assert process.poll() is None, messages(runs)
        disturb(process)
        errors = finish(process, runs, 90)
    finally:
        process.kill()
    return process.returncode, errors


def pod_on(cluster: Kubernetes, node: str) -> str:
    """Name of the pod on a node."""
    (pod,) = [p for p in cluster.of("pods") if p["spec"].get("nodeName") == node]
    return pod["metadata"]["name"]


def test_a_run_over_two_pods_ends_well_and_leaves_nothing(
    cluster: Kubernetes, tmp_path: Path
) -> None:
    words = ("--set", "steps=20")
    process = train(cluster, tmp_path, *words, hosts="[node-003, node-002]")
    errors = finish(process, tmp_path)
    assert process.returncode == 0, errors
    assert "running on node-[002-003]" in errors, errors
    folder = only_run(tmp_path)
    assert result_of(tmp_path)["status"] == "ok" and not left(cluster)
    steps = [p.read_text().count('{"event": "step"') for p in (folder / STEPS_FOLDER).iterdir()]
    assert steps == [20, 20]
    assert {path.name for path in (folder / LOGS_FOLDER).glob("host-*")} == {
        "host-node-002.log",
        "host-node-003.log",
    }
    starts = [p.read_text().splitlines()[0] for p in (folder / STEPS_FOLDER).iterdir()]
    assert {json.loads(line)["host"] for line in starts} == {"node-002", "node-003"}
    fabric = result_of(tmp_path)["fabric"]
    assert fabric["between_nodes"] == ["sockets"] and len(fabric["interfaces"]) == 1
    assert "Collectives: TCP sockets between nodes" in errors


def test_a_slow_node_is_named_by_its_node(cluster: Kubernetes, tmp_path: Path) -> None:
    slow = cluster.bed.host("node-002")
    slow.limit(0.4)
    try:
        place = cluster_file(tmp_path, hosts="[node-001, node-002]")
        words = ("run", *TINY, "--no-probe", "--set", "steps=60")
        result = verb(cluster, tmp_path, *words, "--cluster", place)
    finally:
        slow.limit(cluster.bed.plan.cores)
    assert result["straggler"]["host"] == "node-002", result["straggler"]


@pytest.mark.nightly
def test_repeats_a_sweep_and_a_trial_of_mlperf_follow_each_other(
    cluster: Kubernetes, tmp_path: Path
) -> None:
    place = ("--cluster", cluster_file(tmp_path))
    tiny = (*TINY, "--set", "global_batch=4")
    once = ("--no-probe", "--repeat", "1", "--group", "base")
    verb(cluster, tmp_path, "run", *tiny, *place, *once)
    series = verb(cluster, tmp_path, "run", "--no-probe", "--repeat", "2", "--resume", "base")
    assert series["groups"][0]["ok"] == 2
    parts = ("--mbs", "1,2", "--nodes-per-trial", "1", "--name", "parts")
    swept = verb(cluster, tmp_path, "sweep", *tiny, *place, *parts)
    assert [(row["status"], row["nodes"]) for row in swept["rows"]] == 2 * [("ok", 1)]
    trials = ("--trials", "1", "--set", "layout.micro_batch=4", "--set", "steps=4")
    scored = verb(cluster, tmp_path, "mlperf", "run", "llama31-8b", "--tiny", *place, *trials)
    (trial,) = scored["score"]["runs"]
    assert trial["file"] == "result_0.txt" and trial["minutes"], trial
    names = {json.loads(path.read_text())["name"] for path in tmp_path.rglob("kubernetes.json")}
    assert len(names) == 5


@pytest.mark.parametrize(
    ("reason", "status", "message"),
    [
        ("Error", "failed", "ended with code 137 (killed)"),
        ("OOMKilled", "oom", "OOMKilled: its container used more memory than its limit"),
    ],
)
def test_a_killed_pod_is_named_with_its_node(
    cluster: Kubernetes, tmp_path: Path, reason: str, status: str, message: str
) -> None:
    disturbed(cluster, tmp_path, lambda _: cluster.kill(pod_on(cluster, "node-002"), reason))
    result = result_of(tmp_path)
    assert result["status"] == status, result
    assert result["reason"].startswith("node-002 (pod paceline-bash-"), result["reason"]
    assert message in result["reason"] and not left(cluster)


def test_a_deleted_pod_is_named_with_its_node(cluster: Kubernetes, tmp_path: Path) -> None:
    def delete(_: object) -> None:
        cluster.delete("pods", cluster.items["pods", pod_on(cluster, "node-001")])

    disturbed(cluster, tmp_path, delete)
    reason = result_of(tmp_path)["reason"]
    assert reason.startswith("node-001 (pod ") and "was deleted by another user" in reason


def test_a_lost_node_is_named(cluster: Kubernetes, tmp_path: Path) -> None:
    disturbed(cluster, tmp_path, lambda _: cluster.lose("node-002"))
    result = result_of(tmp_path)
    assert result["status"] == "failed", result
    assert result["reason"].startswith("node-002 (pod paceline-bash-"), result["reason"]
    assert "was evicted from a node that Kubernetes lost" in result["reason"], result["reason"]
    assert not left(cluster)


def test_two_controllers_touch_only_their_own_pods(cluster: Kubernetes, tmp_path: Path) -> None:
    folders = [tmp_path / "ended", tmp_path / "finished"]
    for folder in folders:
        folder.mkdir()
    text = 'echo "started on $NODE_NAME"; sleep 8; echo "ended on $NODE_NAME"'
    ended, finished = (program(cluster, folder, text) for folder in folders)
    try:
        for folder in folders:
            begun = lambda folder=folder: output(folder).count("started on") == 2  # noqa: E731
            wait_until(begun, "the start of both", 90)
        ended.send_signal(signal.SIGINT)
        finish(ended, folders[0], 90)
        finish(finished, folders[1], 90)
    finally:
        for process in (ended, finished):
            process.kill()
            process.wait()
    assert result_of(folders[0])["status"] == "cancelled"
    assert read_record(only_run(folders[1])).exit_code == 0, messages(folders[1])
    assert output(folders[1]).count("ended on") == 2 and not left(cluster)


def test_a_failed_rank_is_the_reason(cluster: Kubernetes, tmp_path: Path) -> None:
    process = program(cluster, tmp_path, 'if [ "$PET_NODE_RANK" = 1 ]; then exit 7; fi; sleep 300')
    finish(process, tmp_path)
    result = result_of(tmp_path)
    assert result["status"] == "failed" and "7" in result["reason"], result
    assert not left(cluster)


def test_ctrl_c_ends_the_pods_and_leaves_nothing(cluster: Kubernetes, tmp_path: Path) -> None:
    code, _ = disturbed(cluster, tmp_path, lambda process: process.send_signal(signal.SIGINT))
    assert code == EXIT_INCOMPLETE and result_of(tmp_path)["status"] == "cancelled"
    assert not left(cluster)


def test_a_time_limit_ends_the_pods_and_keeps_their_output(
    cluster: Kubernetes, tmp_path: Path
) -> None:
    words = ("run", "--timeout", "4", "--cluster", cluster_file(tmp_path))
    process = start(cluster, tmp_path, *words, "--", "bash", "-c", WAITING)
    errors = finish(process, tmp_path)
    result = result_of(tmp_path)
    assert process.returncode == EXIT_SYSTEM_FAULT and result["status"] == "timeout", errors
    assert output(tmp_path).count("started on") == 2 and not left(cluster)


def test_pending_pods_are_counted_with_their_reason(cluster: Kubernetes, tmp_path: Path) -> None:
    process = program(cluster, tmp_path, hosts="[node-001, node-001x]")
    text = "1 of 2 pods pending: 0/4 nodes are available: 1 Insufficient cpu."
    interrupted(process, tmp_path, text)
    assert not left(cluster)


def test_an_exceeded_quota_is_shown(cluster: Kubernetes, tmp_path: Path) -> None:
    cluster.quota = 1
    process = program(cluster, tmp_path)
    interrupted(process, tmp_path, "is forbidden: exceeded quota: small, requested: pods=1")
    assert not left(cluster)


def test_an_image_that_cannot_be_pulled_is_refused(cluster: Kubernetes, tmp_path: Path) -> None:
    cluster.image_error = "couldn't parse image name"
    process = program(cluster, tmp_path)
    errors = finish(process, tmp_path)
    assert process.returncode == 2
    assert "its container cannot start: InvalidImageName: couldn't parse" in errors, errors
    assert not left(cluster)


def test_a_name_that_is_taken_is_refused_and_not_deleted(
    cluster: Kubernetes, tmp_path: Path
) -> None:
    job = job_on({}, device="cpu", devices_per_node=1)
    name = workload_name(job, str(tmp_path))
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}}
    cluster.create("services", service)
    kubernetes.prepare(job, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        with pytest.raises(SystemFaultError, match=f'services "{name}" already exists'):
            kubernetes.submit(job, tmp_path)
    wait_until(lambda: left(cluster) == [name], "the end of what was created", 10)


def test_a_new_controller_takes_a_run_over(cluster: Kubernetes, tmp_path: Path) -> None:
    text = 'echo "started on $NODE_NAME"; sleep 6; echo "ended on $NODE_NAME"'
    process = program(cluster, tmp_path, text)
    try:
        wait_until(lambda: output(tmp_path).count("started on") == 2, "the start", 60)
    finally:
        process.kill()
        process.communicate()
    folder = only_run(tmp_path)
    spec = read_record(folder).spec
    assert spec is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        for name, value in own_folders(tmp_path).items():
            patch.setenv(name, value)
        job = engine(spec.engine).job(spec, spec.recipe)
        report = flow.resume(folder, tmp_path, job, lambda _: None)
    assert report is not None and read_record(folder).exit_code == 0
    assert output(tmp_path).count("ended on") == 2
    wait_until(lambda: not left(cluster), "the end of its objects", 60)


def test_a_run_without_a_controller_can_be_ended(cluster: Kubernetes, tmp_path: Path) -> None:
    process = program(cluster, tmp_path, "echo started; sleep 600")
    try:
        wait_until(lambda: output(tmp_path).count("started") == 2, "the start", 60)
    finally:
        process.kill()
        process.communicate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        assert kubernetes.cancel_orphan(only_run(tmp_path))
    wait_until(lambda: not left(cluster), "the end of its objects", 60)


def test_a_program_of_the_user_finds_its_variables(cluster: Kubernetes, tmp_path: Path) -> None:
    text = 'echo "$PET_NODE_RANK of $PET_NNODES at $PET_MASTER_ADDR on $NODE_NAME"'
    finish(program(cluster, tmp_path, text), tmp_path)
    for node in (0, 1):
        assert f"{node} of 2 at paceline-bash-" in output(tmp_path), output(tmp_path)
    assert output(tmp_path).count(" on node-00") == 2


def test_nodes_are_listed_and_unfit_ones_are_named(
    cluster: Kubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    names = tuple(cluster.bed.names)
    settings = {"exclude": [names[2]]}
    site = job_on(settings, device="cpu", devices_per_node=1).cluster
    assert site is not None
    cluster.items["nodes", names[1]]["spec"]["unschedulable"] = True
    try:
        hosts = kubernetes.available_hosts(site)
        pinned = site.model_copy(update={"hosts": (*names, "node-x"), "nodes": 5})
        unfit = kubernetes.unfit_hosts(pinned, tmp_path)
    finally:
        del cluster.items["nodes", names[1]]["spec"]["unschedulable"]
    assert [host.name for host in hosts] == [names[0], names[3]]
    assert {name: why.reason for name, why in unfit.items()} == {
        names[1]: "is cordoned",
        names[2]: "is excluded (kubernetes.exclude)",
        "node-x": "is not a node of the cluster",
    }


@pytest.mark.nightly
def test_scale_over_four_pods_makes_the_table_of_ssh(cluster: Kubernetes, tmp_path: Path) -> None:
    file = cluster_file(tmp_path, nodes="4")
    process = start(cluster, tmp_path, "scale", *QUICK, "--cluster", file, "--json")
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 0, messages(tmp_path)
    result = json.loads(text)
    assert [(row["nodes"], row["n"]) for row in result["sizes"]] == [(1, 4), (2, 2), (4, 1)]
    alone = [run["hosts"][0] for run in result["runs"] if len(run["hosts"]) == 1]
    assert sorted(alone) == cluster.bed.names and result["missing"] == 0
    assert not left(cluster)
