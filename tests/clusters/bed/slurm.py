"""A real Slurm: the controller on a host of its own, one slurmd on every other host."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.clusters.bed.accounting import Accounting
from tests.clusters.bed.host import Host
from tests.clusters.bed.plan import Plan
from tests.clusters.bed.process import BedError, call
from tests.waiting import wait_until

CONTROLLER = """\
ClusterName=bed
SlurmctldHost={head.name}({head.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A job that is queued again starts when the credentials of its first start have expired.
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld
SlurmdLogFile={folder}/log/slurmd-%n
# Any layout of control groups will do, and no right to raise limits is needed.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=2
PropagateResourceLimits=NONE
# The nodes are as large as they are said to be below.
SlurmdParameters=config_overrides
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
MessageTimeout=10
KillWait=3
MinJobAge=600
BatchStartTimeout=15
UnkillableStepTimeout=20
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,default_queue_depth=500
PriorityType=priority/basic
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
GresTypes=gpu
JobRequeue=1
PlugStackConfig={folder}/plugstack.conf
"""
NODE = (
    "NodeName={host.name} NodeAddr={host.address} CPUs=16 RealMemory=64000 Gres=gpu:{gpus} "
    "State=UNKNOWN\n"
)
PARTITIONS = """\
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=60 State=UP
PartitionName=small Nodes={first} MaxTime=5 State=UP
"""
CONTAINERS = Path(__file__).with_name("containers.c")
CONTAINER_ROOT = Path(__file__).with_name("container_root.sh")
USABLE = ("idle", "mixed", "allocated")


@dataclass
class Slurm:
    """The daemons of a bed and the settings that clients name in SLURM_CONF."""

    folder: Path
    head: Host
    nodes: Sequence[Host]
    plan: Plan
    accounting: Accounting | None = None

    @property
    def conf(self) -> Path:
        """Value of SLURM_CONF."""
        return self.folder / "slurm.conf"

    def prepare(self) -> None:
        """Writes keys and settings."""
        for name in ("munge", "state", "spool", "log", "gpu"):
            (self.folder / name).mkdir(parents=True)
        key = self.folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        text = CONTROLLER.format(folder=self.folder, head=self.head)
        text += self.accounting.settings if self.accounting else ""
        text += self.plan.slurm_lines
        text += "".join(NODE.format(host=host, gpus=self.plan.gpus) for host in self.nodes)
        self.conf.write_text(text + PARTITIONS.format(first=self.nodes[0].name))
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        self._write_gpus()
        self._write_plugins()
        if self.accounting:
            self.accounting.prepare()

    def start_head(self) -> None:
        """Starts the controller and, with accounting, the daemons that it needs first."""
        munge = self.folder / "munge"
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
        names = [f"--{option}={munge / name}" for option, name in files.items()]
        self.head.call("munged", "--force", *names, f"--log-file={self.folder}/log/munged")
        if self.accounting:
            self.accounting.start()
        self.head.call("slurmctld", "-f", str(self.conf))
        wait_until(lambda: "is UP" in self.ask("scontrol", "ping"), "slurmctld")

    def start(self, hosts: Sequence[Host]) -> None:
        """Starts slurmd on these hosts and waits until the controller has heard of them."""
        for host in hosts:
            host.call("slurmd", "-N", host.name, "-f", str(self.conf))
        for host in hosts:
            wait_until(lambda host=host: self.is_known(host), f"{host.name} to be known to Slurm")

    def stop(self, host: Host, number: int = 9) -> None:
        """Ends the slurmd of a host, but not the job steps on it."""
        pid = (self.folder / f"slurmd-{host.name}.pid").read_text().strip()
        if "slurmd" not in host.call("cat", f"/proc/{pid}/cmdline"):
            raise BedError(f"process {pid} of {host.name} is not slurmd")
        host.call("kill", f"-{number}", pid)
        wait_until(
            lambda: host.run("kill", "-0", pid).returncode, f"the end of slurmd on {host.name}"
        )

    def drain(self, host: Host, reason: str = "bed") -> None:
        """The node takes no new jobs."""
        self.ask("scontrol", "update", f"nodename={host.name}", "state=drain", f"reason={reason}")

    def resume(self, host: Host) -> None:
        """A node that was drained or lost takes jobs again."""
        self.ask("scontrol", "update", f"nodename={host.name}", "state=resume")
        wait_until(lambda: self.state(host) in USABLE, f"{host.name} to be idle")

    def cancel_all(self) -> None:
        """Cancels every job and waits until none is left in the queue."""
        if self.jobs():
            self.ask("scancel", "--user=root")
            wait_until(lambda: not self.jobs(), "the end of cancelled jobs", 40)

    def recover(self) -> None:
        """Starts each slurmd that does not run and resumes each node that takes no jobs."""
        for host in self.nodes:
            if not any("slurmd -N" in line for line in host.processes().values()):
                self.start([host])
            if self.state(host) not in USABLE:
                self.resume(host)

    def jobs(self) -> list[str]:
        """Numbers of the jobs that wait or run."""
        return self.ask("squeue", "-h", "-o", "%i").split()

    def state(self, host: Host) -> str:
        """What sinfo calls the state of a node; a * behind it means that it does not answer."""
        return self.ask("sinfo", "-h", "-p", "batch", "-n", host.name, "-o", "%T").strip()

    def is_known(self, host: Host) -> bool:
        """True when slurmd on the host takes connections and the controller does not miss it."""
        state = self.state(host)
        in_use = bool(state) and not state.startswith("unk") and not state.endswith("*")
        return in_use and listens(host.address, 6818)

    def ask(self, *argv: str) -> str:
        """What one of Slurm's programs printed; nothing where it failed, as while daemons start."""
        try:
            return call(argv, env={"SLURM_CONF": str(self.conf)})
        except BedError:
            return ""

    def _write_gpus(self) -> None:
        # Without a device file each, slurmd counts no GPUs and the node is drained.
        count = self.plan.gpus
        for index in range(count):
            call(["mknod", "-m", "666", f"{self.folder}/gpu/nvidia{index}", "c", "1", "3"])
        line = f"Name=gpu File={self.folder}/gpu/nvidia[0-{count - 1}]\n" if count else ""
        (self.folder / "gres.conf").write_text(line)

    def _write_plugins(self) -> None:
        plugin = self.folder / "containers.so"
        if self.plan.containers:
            call(["gcc", "-shared", "-fPIC", "-o", str(plugin), str(CONTAINERS)])
        line = f"required {plugin} {CONTAINER_ROOT}\n" if self.plan.containers else ""
        (self.folder / "plugstack.conf").write_text(line)


def listens(address: str, port: int) -> bool:
    """True when a connection is taken."""
    with suppress(OSError), socket.create_connection((address, port), timeout=1):
        return True
    return False
