"""What every node runs: a script free of secrets, and an agent that starts and ends the ranks."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from paceline.core.hardware import Cluster
from paceline.core.job import Job
from paceline.machines.node import agent
from paceline.machines.node.script import (
    NODE_SCRIPT,
    prepare_node,
    random_ports,
    render_node,
    rendezvous_port,
    secret_variables,
)
from paceline.runs.ending import agent_exits
from tests.machines.ranks import rank_pids

PLACE = """
import os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR",
         "MASTER_PORT")
words = [*(os.environ[name] for name in names), *sys.argv[1:]]
os.write(1, (" ".join(words) + "\\n").encode())
"""
FAILING = """
import os, sys, time
open(f"pid-{os.environ['RANK']}", "w").write(str(os.getpid()))
if os.environ["RANK"] == "3":
    while not (os.path.exists("pid-2") and os.path.getsize("pid-2")):
        time.sleep(0.01)  # the other must have started for its end to be seen
    exec(sys.argv[1])
time.sleep(60)
"""


def make_job(program: str, *arguments: str, **fields: object) -> Job:
    return Job(
        name="test",
        python=sys.executable,
        program=("rank.py", *arguments),
        files={"rank.py": program},
        nodes=2,
        devices_per_node=2,
        **fields,  # type: ignore[arg-type]
    )


def start(folder: Path, node: int = 1) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", str(folder / NODE_SCRIPT), str(node), "127.0.0.1", "29999"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_ranks_know_their_place(tmp_path: Path):
    prepare_node(make_job(PLACE, "a b", "$(id)"), tmp_path)
    output, _ = start(tmp_path).communicate(timeout=60)
    assert sorted(output.splitlines()) == [
        f"{rank} {rank - 2} 4 2 1 127.0.0.1 29999 a b $(id)" for rank in (2, 3)
    ]


@pytest.mark.parametrize(
    ("end", "printed_code", "code"), [("sys.exit(7)", 7, 7), ("os.kill(os.getpid(), 9)", -9, 137)]
)
def test_the_first_failure_is_told_and_ends_the_others(
    tmp_path: Path, end: str, printed_code: int, code: int
):
    prepare_node(make_job(FAILING, end), tmp_path)
    began = time.monotonic()
    process = start(tmp_path)
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert process.returncode == code and agent_exits([output]) == {3: printed_code}
    assert not any(psutil.pid_exists(pid) for pid in rank_pids(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_an_agent_that_is_asked_to_end_ends_its_ranks(tmp_path: Path, number: signal.Signals):
    prepare_node(make_job(FAILING, "time.sleep(60)"), tmp_path)
    process = start(tmp_path)
    ranks = rank_pids(tmp_path)
    os.kill(ranks[0], signal.SIGSTOP)  # a stopped rank must not hold the ending up
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert not any(psutil.pid_exists(pid) for pid in ranks)


def test_an_order_to_end_disturbs_no_ending_that_has_begun(tmp_path: Path):
    stubborn = FAILING.replace(
        "import os, sys, time",
        "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)",
    )
    prepare_node(make_job(stubborn, "time.sleep(0.5); sys.exit(7)"), tmp_path)
    process = start(tmp_path)
    ranks, out = rank_pids(tmp_path), process.stdout
    assert out and out.readline().startswith("@exit rank=3")
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 7
    assert not any(psutil.pid_exists(pid) for pid in ranks) and out.read() == ""
    out.close()


def test_rank_0_listens_at_no_loopback_address_where_a_peer_is_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
):
    assert agent.off_loopback("0", "localhost") == {}
    monkeypatch.setenv(agent.PEER, "127.0.0.1")
    assert agent.off_loopback("0", "localhost") == {}
    outside = agent.address_towards("192.0.2.1")  # sends nothing
    if not outside:
        pytest.skip("this machine has no way to other networks")
    monkeypatch.setenv(agent.PEER, outside)
    assert agent.off_loopback("0", "localhost")["MASTER_ADDR"] == outside
    assert "MASTER_ADDR" not in agent.off_loopback("1", outside)
    assert outside in [agent.interface_address(name) for _, name in socket.if_nameindex()]
    assert agent.address_of("no such name") == agent.address_towards("no such name") == ""


def test_the_failures_of_all_nodes_are_put_in_order():
    logs = [
        "x\n@exit rank=5 code=-9 at=12.500\n",
        "@exit rank=1 code=1 at=11.250\ny",
        "no @exit rank=2 code=1 at=1.000",
    ]
    assert list(agent_exits(logs).items()) == [(1, 1), (5, -9)]


def test_secrets_are_in_no_file(tmp_path: Path):
    env = {
        "HF_TOKEN": "hf_secret",
        "NGC_API_KEY": "ngc_secret",
        "OMP_NUM_THREADS": "4",
        "https_proxy": "http://me:my_secret@proxy:3128",
        "MYSQL_PWD": "secret",
    }
    job = make_job(PLACE, env=env)
    prepare_node(job, tmp_path)
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert "secret" not in path.read_text().replace("SECRET", "").lower()
    assert set(env) - set(secret_variables(env)) == {"OMP_NUM_THREADS"}
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
    interfaces = dict(re.findall(r"export (\w+SOCKET_IFNAME)=(\S+)", script))
    assert interfaces == {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"}  # not ib01


def test_neighbouring_runs_meet_at_different_ports():
    ports = {rendezvous_port(f"run-{n}") for n in range(100)}
    assert len(ports) > 90 and all(20_000 <= port < 30_000 for port in ports)


def test_equal_runs_of_two_users_try_different_ports():
    first, second = random_ports(), random_ports()
    assert len(set(first)) == len(first) and first != second
    assert all(20_000 <= port < 30_000 for port in first + second)
