"""The bed by hand: `python -m tests.clusters.bed up --hosts 8 --slurm`, `down`, `exec`, `fault`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.clusters.bed import Bed, BedError, Host, Plan
from tests.clusters.bed.site import beds

Fault = Callable[[Bed, Host, str], None]
FAULTS: dict[str, Fault] = {
    "crash": lambda bed, host, _: host.crash(),
    "boot": lambda bed, host, _: bed.boot(host.name),
    "unplug": lambda bed, host, _: host.unplug(),
    "plug": lambda bed, host, _: host.plug(),
    "freeze": lambda bed, host, _: host.freeze(),
    "thaw": lambda bed, host, _: host.thaw(),
    "limit": lambda bed, host, cores: host.limit(float(cores) if cores else None),
    "fill-disk": lambda bed, host, folder: host.fill_disk(Path(folder)),
    "uncover": lambda bed, host, path: host.uncover(Path(path)),
    "lock-out": lambda bed, host, _: bed.sshd.lock_out(host),
    "let-in": lambda bed, host, _: bed.sshd.let_in(host),
    "drain": lambda bed, host, _: bed.slurm.drain(host),
    "resume": lambda bed, host, _: bed.slurm.resume(host),
    "stop-slurmd": lambda bed, host, _: bed.slurm.stop(host),
    "start-slurmd": lambda bed, host, _: bed.slurm.start([host]),
}


def arguments() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.clusters.bed", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start a bed and print what a shell needs to use it")
    up.add_argument("--hosts", type=int, default=4)
    up.add_argument("--slurm", action="store_true", help="Slurm in addition to SSH")
    up.add_argument("--no-accounting", action="store_true", help="Slurm without sacct")
    up.add_argument("--containers", action="store_true", help="Slurm takes the options of Pyxis")
    up.add_argument("--cores", type=float, help="processors for each host")
    run = commands.add_parser("exec", help="run a command inside a host")
    run.add_argument("host")
    run.add_argument("argv", nargs=argparse.REMAINDER)
    fault = commands.add_parser("fault", help="put a fault on a host or take it away")
    fault.add_argument("fault", choices=sorted(FAULTS))
    fault.add_argument("host")
    fault.add_argument("value", nargs="?", default="", help="processors, or a folder or file")
    repair = commands.add_parser("repair", help="take all faults, jobs and foreign processes away")
    down = commands.add_parser("down", help="end a bed")
    for command in (up, run, fault, repair, down):
        command.add_argument("--name", default="bed")
    commands.add_parser("list", help="the beds that are up")
    return parser.parse_args()


def start(options: argparse.Namespace) -> None:
    """Starts a bed and prints a script for the shell."""
    began = time.monotonic()
    plan = Plan(
        options.hosts,
        slurm=options.slurm,
        accounting=not options.no_accounting,
        containers=options.containers,
        cores=options.cores,
    )
    bed = Bed.up(options.name, plan)
    print(
        f"# {plan.hosts} hosts in {time.monotonic() - began:.1f} s; ssh -F $BED_SSH_CONFIG node-001"
    )
    settings = {
        **bed.settings,
        "BED_SSH_CONFIG": bed.ssh_config,
        "BED_HOSTFILE": bed.hostfile,
        "BED_SHARED": bed.shared,
    }
    for name, value in settings.items():
        print(f"export {name}={value}")


def main() -> None:
    """Does what the command line asks for."""
    options = arguments()
    if options.command == "list":
        print("\n".join(site.name for site in beds() if site.up))
        return
    if options.command == "up":
        start(options)
        return
    bed = Bed.find(options.name)
    if options.command == "down":
        bed.down()
    elif options.command == "repair":
        bed.repair()
    elif options.command == "fault":
        FAULTS[options.fault](bed, bed.host(options.host), options.value)
    else:
        command = options.argv[1:] if options.argv[:1] == ["--"] else options.argv
        argv = bed.host(options.host).argv(command)
        os.execvpe(argv[0], argv, bed.env)


try:
    main()
except (BedError, TimeoutError, ValueError) as error:
    sys.exit(f"bed: {error}")
