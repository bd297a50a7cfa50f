"""Which switch each host hangs on, for sub-clusters that stay under one."""

from __future__ import annotations

import re
from pathlib import Path

from paceline.core.errors import UserError, unreadable
from paceline.core.hosts import expand

_SLURM = re.compile(r"SwitchName=(\S+)\s.*?\bNodes=(\S+)")


def read_topology(path: Path) -> dict[str, str]:
    """Host -> switch, from lines `HOSTS SWITCH` or those of Slurm's topology.conf.

    Of Slurm's lines those with nodes count, in the order of the file. Raises UserError with the
    line number for a line that is neither.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(str(path), error) from error
    switches: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        place = f"{path}:{number}"
        hosts, switch = _split(line.partition("#")[0].strip(), place)
        switches |= {host: switch for host in expand(hosts, place) if host not in switches}
    return switches


def _split(text: str, where: str) -> tuple[str, str]:
    """The hosts and the switch that a line names; no hosts where it has none."""
    if text.startswith("SwitchName="):
        match = _SLURM.match(text)
        return (match[2], match[1]) if match else ("", "")
    words = text.split()
    if len(words) not in (0, 2):
        raise UserError(where, "is no host and its switch", allowed="node[01-16] switch-1")
    return (words[0], words[1]) if words else ("", "")
