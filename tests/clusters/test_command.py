"""A program of the user's own on two hosts over SSH, once a node, its steps told by every one."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from paceline import steplog
from tests.clusters.bed import Bed
from tests.command import paceline
from tests.runs.test_flow import result_of

LOOP = """
import sys, time
import steplog

print(sys.argv[1:])
for _ in range(60):
    with steplog.step(tokens=100):
        time.sleep(0.005)
"""


def test_a_command_is_started_once_on_every_host(ssh_hosts: Bed, tmp_path: Path) -> None:
    shutil.copy(steplog.__file__, tmp_path / "steplog.py")
    (tmp_path / "loop.py").write_text(LOOP)
    hosts = ssh_hosts.names[:2]
    arguments = ["--node", "{node_rank} of {nodes}", "--api-key", "Zx81-qLm4-77fy"]
    place = ["--hosts", ",".join(hosts), "--ssh-config", ssh_hosts.ssh_config, "--device", "cpu"]
    done = paceline(
        "run", *place, "--", sys.executable, "loop.py", *arguments, runs=tmp_path, cwd=tmp_path
    )

    assert done.returncode == 0, done.stderr
    result = result_of(tmp_path)
    assert (result["status"], result["steps_done"]) == ("ok", 60)
    assert [rank["host"] for rank in result["ranks"]] == [*hosts]
    logs = [path.read_text() for path in sorted(tmp_path.glob("*/logs/rank-*.log"))]
    assert logs == [f"{['--node', f'{node} of 2', *arguments[2:]]}\n" for node in (0, 1)]
    (script,) = tmp_path.glob("*/node.sh")
    assert arguments[3] not in script.read_text()
