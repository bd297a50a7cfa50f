"""A fake ssh: a program of that name that runs the text sent to it on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.core.hardware import Cluster, SshSettings
from paceline.core.job import Job

SSH = """#!/bin/bash
printf '%s\\0' "$@" >>"$STAND_IN/argv"
host=${@: -2:1}
case $host in
stranger*) echo "Host key verification failed." >&2; exit 255 ;;
silent*) exec sleep 600 ;;
talker*) echo "a greeting from the log-in"; echo "motd @rc 9" >&2 ;;
late*) PATH=$STAND_IN/late:$PATH ;;
small*) ulimit -Sn 200 ;;
broken*) echo "ssh: line noise" >&2; exit 3 ;;
esac
export SSH_CONNECTION="127.0.0.1 40000 127.0.0.1 22"
[[ $host == piped* ]] && SSH_CONNECTION="UNKNOWN 65535 UNKNOWN 65535"
exec bash -c "${@: -1}"
"""
DATE = """#!/bin/sh
echo 1000000000.5
"""
RANK = """
import os, sys, time
print("rank", os.environ["RANK"], os.environ.get("MY_TOKEN"), flush=True)
time.sleep(float(sys.argv[1]))
sys.exit(int(sys.argv[2]) if os.environ["RANK"] == "1" else 0)
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the fake on the search path and return the file to which it writes its arguments."""
    (folder / "late").mkdir(parents=True)
    for name, text in (("ssh", SSH), ("late/date", DATE)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN", str(folder))
    return folder / "argv"


def make_job(
    hosts: Sequence[str],
    seconds: float = 0,
    code: int = 0,
    alive_interval_s: int = 5,
    **fields: object,
) -> Job:
    """A job on hosts that all are this machine; rank 1 ends with `code`."""
    # Hosts that answer must do so even where other programs have the cores.
    limits = SshSettings(alive_interval_s=alive_interval_s, connect_timeout_s=30)
    cluster = Cluster(
        name="here",
        device="cpu",
        devices_per_node=1,
        nodes=len(hosts),
        hosts=tuple(hosts),
        launcher="ssh",
        ssh=limits,
    )
    defaults = {"files": {"rank.py": RANK}, "cluster": cluster, **fields}
    return Job(
        name="job",
        python=sys.executable,
        program=("rank.py", str(seconds), str(code)),
        nodes=len(hosts),
        **defaults,
    )  # type: ignore[arg-type]
