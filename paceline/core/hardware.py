"""Devices, links and clusters."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import (
    NonNegativeFloat,
    PositiveFloat,
    ValidationError,
    field_serializer,
    field_validator,
)

from paceline.core.errors import UserError
from paceline.core.hosts import check_name, first_repeated
from paceline.core.launchers import Capabilities, LauncherName, capabilities
from paceline.core.secrets import REDACTED, is_secret
from paceline.core.value import NonNegativeInt, PositiveInt, RunLabel, Value

Dtype = Literal["fp32", "fp16", "bf16", "fp8", "mxfp8", "mxfp4", "nvfp4"]
NARROW: tuple[Dtype, ...] = ("fp8", "mxfp8", "mxfp4", "nvfp4")
"""Narrower than 16 bits: for matrix products, and each with a peak of its own."""
NATIVE_NARROW: tuple[Dtype, ...] = ("fp8", "mxfp8", "nvfp4")
"""Those of them that the native trainer multiplies in."""

ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""Names go into scripts unquoted, because a shell takes no others."""

NO_GRES = "none"
"""Of `cluster.slurm.gres`: leave the option out, where a site has no generic resources."""
CONTAINER_PYTHON = "python3"
"""As the image itself finds it."""

INTERFACE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,14}")


class Peak(Value):
    """A dense peak: FLOP/s without structured sparsity, and where the figure is printed."""

    flops_per_s: PositiveFloat
    source: str


class Device(Value):
    """One accelerator (or `cpu`) as its data sheet describes it."""

    name: str
    vendor: str
    family: str
    """What an unstated variant resolves to, for example `H100`."""
    aliases: tuple[str, ...] = ()
    peaks: dict[Dtype, Peak] = {}
    """Dense peaks by dtype; a dtype that the device lacks is absent."""
    memory_bytes: PositiveFloat | None = None
    memory_bytes_per_s: PositiveFloat | None = None
    memory_source: str | None = None
    context_bytes: PositiveFloat | None = None
    """Memory taken by the driver's context before any tensor, where measured."""
    power_w: PositiveFloat | None = None
    note: str | None = None

    def peak_flops_per_s(self, dtype: Dtype) -> float | None:
        """Dense peak in FLOP/s, or None when no data sheet states one."""
        peak = self.peaks.get(dtype)
        return peak.flops_per_s if peak else None

    @property
    def has_only_fp16(self) -> bool:
        """Whether fp16 is the one 16-bit dtype that it has a peak in."""
        return "fp16" in self.peaks and "bf16" not in self.peaks


class Link(Value):
    """A class of interconnect, per device and per direction."""

    name: str
    aliases: tuple[str, ...] = ()
    kind: Literal["intra", "inter"]
    bytes_per_s: PositiveFloat | None = None
    """Nominal bandwidth of one device in one direction; None where only a measurement can tell."""
    latency_s: NonNegativeFloat | None = None
    source: str
    note: str | None = None


class SshSettings(Value):
    """How hosts are reached; everything else is in the user's own ssh configuration."""

    config: str | None = None
    """SSH configuration file in place of ~/.ssh/config."""
    connect_timeout_s: PositiveInt = 10
    """Seconds after which a host that does not answer counts as down."""
    alive_interval_s: PositiveInt = 5
    """Seconds between keep-alive messages. Three missing ones are a lost connection."""


@dataclass(frozen=True)
class SlurmOption:
    """The sbatch option that a setting becomes."""

    name: str
    variable: str | None = None
    """Variable of the user's shell that sets it where the cluster does not."""
    in_steps: bool = False
    """Whether srun gets it for a step of an allocation as well."""


class SlurmSettings(Value):
    """What a site asks of jobs; None leaves out the option.

    A field with a SlurmOption is all that a further option of sbatch takes.
    """

    partition: Annotated[str | None, SlurmOption("partition", "SBATCH_PARTITION")] = None
    """Partition of the jobs."""
    account: Annotated[str | None, SlurmOption("account", "SBATCH_ACCOUNT")] = None
    """Account of the jobs."""
    qos: Annotated[str | None, SlurmOption("qos", "SBATCH_QOS")] = None
    """Quality of service of the jobs."""
    reservation: Annotated[str | None, SlurmOption("reservation", "SBATCH_RESERVATION")] = None
    """Reservation of the jobs."""
    constraint: Annotated[str | None, SlurmOption("constraint", "SBATCH_CONSTRAINT")] = None
    """Node features that the jobs require."""
    gres: Annotated[str | None, SlurmOption("gres", "SBATCH_GRES", in_steps=True)] = None
    """Generic resources per node. Unset requests the GPUs of the run, `none` omits the option."""
    cpus_per_task: Annotated[PositiveInt | None, SlurmOption("cpus-per-task")] = None
    """CPUs per node; there is one task per node."""
    hint: Annotated[str | None, SlurmOption("hint", "SBATCH_HINT")] = None
    """CPU usage hint, for example `nomultithread`."""
    exclude: Annotated[tuple[str, ...], SlurmOption("exclude")] = ()
    """Nodes that are not used."""
    segment: Annotated[PositiveInt | None, SlurmOption("segment", "SBATCH_SEGMENT_SIZE")] = None
    """Number of nodes that must be in one block of the network."""
    container_image: str | None = None
    """Container image of the jobs. Needs the Pyxis plugin."""
    container_mounts: tuple[str, ...] = ()
    """Mounts of the container."""
    requeue: bool = False
    """Allow Slurm to requeue the jobs."""
    retries: NonNegativeInt = 1
    """Number of times that a job is restarted without a node that it lost."""
    allocation: str | None = None
    """Id of a running job; runs become steps of it."""

    @classmethod
    def declared_options(cls) -> dict[str, SlurmOption]:
        """Return the options of sbatch by the names of their fields."""
        return {
            name: part
            for name, field in cls.model_fields.items()
            for part in field.metadata
            if isinstance(part, SlurmOption)
        }

    def options(self, *, steps: bool = False) -> dict[str, str]:
        """Return the options that are set, by their names in sbatch; for `steps`, those of srun."""
        options: dict[str, str] = {}
        for field, option in self.declared_options().items():
            value: str | int | tuple[str, ...] | None = getattr(self, field)
            omitted = value in (None, ()) or (field == "gres" and value == NO_GRES)
            if not omitted and (option.in_steps or not steps):
                options[option.name] = ",".join(value) if isinstance(value, tuple) else str(value)
        return options

    def with_variables(self, environment: Mapping[str, str]) -> SlurmSettings:
        """Return the settings with those that are unset taken from the user's SBATCH_ variables.

        Raises UserError for a variable whose value does not fit.
        """
        values = {
            field: value
            for field, option in self.declared_options().items()
            if option.variable and getattr(self, field) is None
            if (value := environment.get(option.variable))
        }
        try:
            return SlurmSettings.model_validate({**self.model_dump(), **values}) if values else self
        except ValidationError as error:
            problem = error.errors()[0]
            option = self.declared_options()[str(problem["loc"][0])]
            raise UserError(
                f"{option.variable}={problem['input']}",
                problem["msg"],
                remedy="change or unset the variable",
            ) from error


class Cluster(Value):
    """Where a run happens: devices of one kind in equal nodes, and how programs start there.

    Labels say where something runs and how it gets there, not what runs.
    """

    name: RunLabel[str]
    """Name of the cluster."""
    device: str
    """Device of the nodes, by a name of `paceline devices`."""
    device_label: RunLabel[str | None] = None
    """Name that the machine reports for its device, for example the CPU model."""
    nodes: PositiveInt = 1
    """Number of nodes."""
    devices_per_node: PositiveInt
    """Devices per node, with one rank each."""
    device_memory_bytes: RunLabel[PositiveFloat | None] = None
    """Memory per device, in place of the catalog's value. For `cpu`, host memory divided by the
    processes."""
    intra_link: str | None = None
    """Link between the devices of a node, by a name of `paceline devices --links`."""
    inter_link: str | None = None
    """Link between nodes, by a name of `paceline devices --links`."""
    launcher: RunLabel[LauncherName] = "local"
    """How programs start on the nodes."""
    hosts: RunLabel[tuple[str, ...]] = ()
    """Hosts in the order of their ranks. Without them Slurm chooses."""
    interface: RunLabel[str | None] = None
    """Network interface of rendezvous and collectives, for example ib0. Unset leaves the choice
    to torch."""
    bind: str = "none"
    """CPU binding of ranks: `auto` (the cores nearest to the device), `none`, or a file."""
    ssh: RunLabel[SshSettings] = SshSettings()
    """SSH settings."""
    slurm: RunLabel[SlurmSettings] = SlurmSettings()
    """Slurm settings."""
    python: str | None = None
    """Python interpreter on the nodes. Unset is the one that runs Paceline, or `python3` in a
    container."""
    stage: RunLabel[str | None] = None
    """Folder of staged assets on the local disks of the nodes. Unset is the shared folder of
    this machine."""
    threads_per_device: PositiveInt | None = None
    """CPU threads per rank."""
    env: dict[str, str] = {}
    """Environment variables of the training program. Secrets are redacted in stored files."""

    @field_validator("hosts")
    @classmethod
    def _names_of_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        try:
            hosts = tuple(check_name(name) for name in hosts)
        except UserError as error:
            raise ValueError(str(error)) from error
        if twice := first_repeated(hosts):
            raise ValueError(f"{twice} is named twice")
        return hosts

    @field_validator("interface")
    @classmethod
    def _name_of_interface(cls, interface: str | None) -> str | None:
        if interface is not None and not INTERFACE_NAME.fullmatch(interface):
            raise ValueError(f"{interface!r} is no network interface")
        return interface

    @field_validator("stage")
    @classmethod
    def _is_absolute(cls, stage: str | None) -> str | None:
        if stage is not None and not (stage.startswith("/") and stage.isprintable()):
            raise ValueError(f"{stage!r} is no absolute path")
        return stage

    @field_validator("env")
    @classmethod
    def _names_of_variables(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if not ENVIRONMENT_NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} cannot name an environment variable: use letters, digits and _, "
                    "and no digit first"
                )
        return env

    @field_serializer("env")
    def _without_secrets(self, env: dict[str, str]) -> dict[str, str]:
        return {name: REDACTED if is_secret(name, v) else v for name, v in env.items()}

    @property
    def world_size(self) -> int:
        """Devices, one rank each."""
        return self.nodes * self.devices_per_node

    @property
    def capabilities(self) -> Capabilities:
        """What the launcher can do."""
        return capabilities(self.launcher)

    @property
    def runs_here(self) -> bool:
        """Whether ranks are processes of this machine."""
        return self.capabilities.runs_here

    @property
    def allocation(self) -> str | None:
        """Return the number of the running job that runs are steps of, None without one."""
        return self.slurm.allocation if self.capabilities.allocations else None

    @property
    def waits_in_queue(self) -> bool:
        """Whether a job waits for nodes before it begins."""
        return self.capabilities.queues and self.allocation is None

    @property
    def scheduler_picks_hosts(self) -> bool:
        """Whether the nodes of a job are known only once it has begun."""
        return self.waits_in_queue and not self.hosts

    @property
    def in_container(self) -> bool:
        """Whether programs run in an image, which has none of the paths of this machine."""
        return self.capabilities.containers and self.slurm.container_image is not None

    @property
    def interpreter(self) -> str:
        """What runs a job's programs."""
        return self.python or (CONTAINER_PYTHON if self.in_container else sys.executable)


def with_secrets(env: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a stored cluster, secrets taken from `environment` again.

    Raises UserError for one that is not there: what is stored has its name alone.
    """
    variables: dict[str, str] = {}
    for name, value in env.items():
        if value == REDACTED and name not in environment:
            raise UserError(
                f"cluster.env: {name}",
                "is a secret and was not stored",
                remedy=f"export {name} and try again",
            )
        variables[name] = environment[name] if value == REDACTED else value
    return variables
