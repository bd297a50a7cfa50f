"""What every node runs: a script free of secrets, and an agent that starts and ends the ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from paceline.core.hardware import Cluster
from paceline.core.run import Job
from paceline.ending import agent_exits
from paceline.launchers.node import (
    NODE_SCRIPT,
    prepare_node,
    render_node,
    rendezvous_port,
    secret_variables,
)

PLACE = """
import os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
words = [*(os.environ[name] for name in names), *sys.argv[1:]]
os.write(1, (" ".join(words) + "\\n").encode())
"""
FAILING = """
import os, sys, time
open(f"pid-{os.environ['RANK']}", "w").write(str(os.getpid()))
if os.environ["RANK"] == "3":
    exec(sys.argv[1])
time.sleep(60)
"""


def make_job(program: str, *arguments: str, **fields: object) -> Job:
    return Job(
        name="test", python=sys.executable, program=("rank.py", *arguments),
        files={"rank.py": program}, nodes=2, devices_per_node=2, **fields,  # type: ignore[arg-type]
    )  # fmt: skip


def start(folder: Path, node: int = 1) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", str(folder / NODE_SCRIPT), str(node), "127.0.0.1", "29999"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def pids(folder: Path, within_s: float = 30) -> list[int]:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        texts = [path.read_text() for path in folder.glob("pid-*")]
        if len(texts) == 2 and all(texts):
            return [int(text) for text in texts]
        time.sleep(0.02)
    raise AssertionError("the ranks did not start")


def test_ranks_know_their_place(tmp_path: Path):
    prepare_node(make_job(PLACE, "a b", "$(id)"), tmp_path)
    output, _ = start(tmp_path).communicate(timeout=60)
    assert sorted(output.splitlines()) == [
        f"{rank} {rank - 2} 4 2 1 127.0.0.1 29999 a b $(id)" for rank in (2, 3)
    ]


@pytest.mark.parametrize(
    ("end", "told", "code"), [("sys.exit(7)", 7, 7), ("os.kill(os.getpid(), 9)", -9, 137)]
)
def test_the_first_failure_is_told_and_ends_the_others(
    tmp_path: Path, end: str, told: int, code: int
):
    prepare_node(make_job(FAILING, end), tmp_path)
    began = time.monotonic()
    process = start(tmp_path)
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert process.returncode == code and agent_exits([output]) == {3: told}
    assert not any(psutil.pid_exists(pid) for pid in pids(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_an_agent_that_is_asked_to_end_ends_its_ranks(tmp_path: Path, number: signal.Signals):
    prepare_node(make_job(FAILING, "time.sleep(60)"), tmp_path)
    process = start(tmp_path)
    ranks = pids(tmp_path)
    os.kill(ranks[0], signal.SIGSTOP)  # a stopped rank must not hold the ending up
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert not any(psutil.pid_exists(pid) for pid in ranks)


def test_the_failures_of_all_nodes_are_put_in_order():
    logs = [
        "x\n@exit rank=5 code=-9 at=12.500\n",
        "@exit rank=1 code=1 at=11.250\ny",
        "no @exit rank=2 code=1 at=1.000",
    ]
    assert list(agent_exits(logs).items()) == [(1, 1), (5, -9)]


def test_secrets_are_in_no_file(tmp_path: Path):
    env = {"HF_TOKEN": "hf_secret", "NGC_API_KEY": "ngc_secret", "OMP_NUM_THREADS": "4"}
    job = make_job(PLACE, env=env)
    prepare_node(job, tmp_path)
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert "secret" not in path.read_text().replace("SECRET", "").lower()
    assert set(secret_variables(env)) == {"HF_TOKEN", "NGC_API_KEY"}
    assert "export OMP_NUM_THREADS=4\n" in render_node(job)


def test_hostile_names_stay_words():
    env = {"A": "$(touch x); `id`\n\"'"}
    job = make_job(PLACE, "x; id", env=env)
    script = render_node(Job(**{**vars(job), "name": "a\n$(id)"}))
    assert script.splitlines()[1].startswith("# ") and "a $(id)" in script.splitlines()[1]
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    with pytest.raises(ValueError, match="cannot name"):
        render_node(make_job(PLACE, env={"A;id": "1"}))


def test_an_interface_is_told_to_gloo_and_nccl():
    cluster = Cluster(name="c", device="cpu", devices_per_node=2, nodes=2, interface="ib0")
    script = render_node(make_job(PLACE, cluster=cluster))
    assert re.findall(r"export (\w+)=ib0", script) == ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]


def test_neighbouring_runs_meet_at_different_ports():
    ports = {rendezvous_port(f"run-{n}") for n in range(100)}
    assert len(ports) > 90 and all(20_000 <= port < 30_000 for port in ports)
    assert rendezvous_port("a") != rendezvous_port("a", attempt=1)
