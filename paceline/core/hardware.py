"""Devices, links and clusters, and sites: clusters with the levels of their network."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
    JsonValue,
    NonNegativeFloat,
    PositiveFloat,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

from paceline.core.errors import UserError
from paceline.core.fabric import Requirement
from paceline.core.hosts import check_name, first_repeated
from paceline.core.launchers import Capabilities, LauncherName, capabilities
from paceline.core.secrets import REDACTED, is_secret
from paceline.core.value import NonNegativeInt, PositiveInt, RunLabel, Value

Dtype = Literal["fp32", "fp16", "bf16", "fp8", "mxfp8", "mxfp4", "nvfp4"]
NARROW: tuple[Dtype, ...] = ("fp8", "mxfp8", "mxfp4", "nvfp4")
"""Types narrower than 16 bits. They are used in GEMMs, and each has its own peak."""
NATIVE_NARROW: tuple[Dtype, ...] = ("fp8", "mxfp8", "nvfp4")
"""Narrow types that the native trainer supports."""

ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""Pattern of variable names. Names go into scripts unquoted, and shells accept no others."""

OMIT = "none"
"""Value of `cluster.slurm.gres` and `cluster.slurm.mem` that omits the option."""
CONTAINER_PYTHON = "python3"
"""Interpreter in a container, found through the PATH of the image."""

INTERFACE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,14}")


class Peak(Value):
    """A dense peak in FLOP/s, without structured sparsity, and its source."""

    flops_per_s: PositiveFloat
    source: str


class Device(Value):
    """An accelerator (or `cpu`) as its data sheet describes it."""

    name: str
    vendor: str
    family: str
    """Family of the device, such as `H100`. A family name resolves to its default variant."""
    aliases: tuple[str, ...] = ()
    peaks: dict[Dtype, Peak] = {}
    """Dense peaks by dtype. Unsupported dtypes are absent."""
    memory_bytes: PositiveFloat | None = None
    memory_bytes_per_s: PositiveFloat | None = None
    memory_source: str | None = None
    context_bytes: PositiveFloat | None = None
    """Memory of the driver's context before any tensor is allocated, if measured."""
    power_w: PositiveFloat | None = None
    note: str | None = None

    def peak_flops_per_s(self, dtype: Dtype) -> float | None:
        """Return the dense peak in FLOP/s; None if the data sheet states none."""
        peak = self.peaks.get(dtype)
        return peak.flops_per_s if peak else None

    @property
    def has_only_fp16(self) -> bool:
        """True if fp16 is the only 16-bit dtype with a peak."""
        return "fp16" in self.peaks and "bf16" not in self.peaks


class Link(Value):
    """A class of interconnect, per device and per direction."""

    name: str
    aliases: tuple[str, ...] = ()
    kind: Literal["intra", "inter"]
    bytes_per_s: PositiveFloat | None = None
    """Nominal bandwidth of one device in one direction. Unset means that it must be measured."""
    latency_s: NonNegativeFloat | None = None
    source: str
    note: str | None = None


class SshSettings(Value):
    """SSH settings. Everything else belongs in the user's own SSH configuration."""

    config: str | None = None
    """SSH configuration file in place of ~/.ssh/config."""
    connect_timeout_s: PositiveInt = 10
    """Seconds after which a silent host counts as down."""
    alive_interval_s: PositiveInt = 5
    """Seconds between keep-alive messages. After three missing messages the connection counts as
    lost."""


class RaySettings(Value):
    """Settings of an existing Ray cluster."""

    address: str | None = None
    """Address of the cluster, or of its dashboard (`http://HOST:8265`), to which runs are submitted
    as jobs. Unset is RAY_ADDRESS, else `auto`."""
    python: str | None = None
    """Local interpreter with the cluster's versions of Ray and Python. Unset is Paceline's."""
    resources: dict[str, NonNegativeFloat] = {}
    """Resources per node that add to, or replace, one CPU and one GPU per device."""
    runtime_env: dict[str, JsonValue] = {}
    """Runtime environment, e.g. `pip` or `image_uri`."""

    @field_validator("runtime_env")
    @classmethod
    def _without_variables(cls, runtime_env: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if "env_vars" in runtime_env:
            raise ValueError("env_vars is not allowed; set variables with `env` of the cluster")
        return runtime_env


_QUANTITY = r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?"
Quantity = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    Field(pattern=f"^{_QUANTITY}$", json_schema_extra={"type": ["string", "integer"]}),
]
"""Amount of a resource as Kubernetes writes it: `8`, `500m`, `64Gi`."""
KubernetesName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
"""Name of an object: lower-case letters, digits, `-` and `.`."""
LabelKey = Annotated[
    str, Field(pattern=r"^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?$")
]
WorkloadKind = Literal["jobset", "job", "pytorchjob", "trainjob", "mpijob", "rayjob"]
AbsolutePath = Annotated[str, Field(pattern=r"^/[^\x00-\x1f:]+$")]
TolerationText = Annotated[
    str,
    Field(pattern=r"^[\w./-]+(=[\w.-]*)?(:(NoSchedule|PreferNoSchedule|NoExecute))?$|^:NoExecute$"),
]
"""Toleration as kubectl writes a taint: `KEY[=VALUE][:EFFECT]`."""


class KubernetesSettings(Value):
    """Settings of a Kubernetes cluster. Each node of a run is one pod."""

    image: str | None = Field(default=None, pattern=r"^[\w./:@-]+$")
    """Container image of the pods; required."""
    kind: WorkloadKind = "jobset"
    """Kind of the workload. `job` needs no operator."""
    context: str | None = None
    """Context of kubectl. Unset is its current one."""
    namespace: KubernetesName | None = None
    """Namespace. Unset is that of the context."""
    queue: KubernetesName | None = None
    """Local queue of Kueue."""
    topology: LabelKey | None = None
    """Topology level of Kueue that all pods must share."""
    gang: Literal["volcano", "coscheduling"] | None = None
    """Scheduler that starts all pods together."""
    scheduler: str | None = None
    """Name of the scheduler, if it is not the default of `gang`."""
    priority_class: KubernetesName | None = None
    """Priority class of the pods."""
    service_account: KubernetesName | None = None
    """Service account of the pods."""
    pull_secrets: tuple[KubernetesName, ...] = ()
    """Secrets for pulling the image."""
    cpus: Quantity | None = None
    """CPUs per pod."""
    memory: Quantity | None = None
    """Memory per pod."""
    shm: Quantity | None = None
    """Size of /dev/shm. Unset is half of the node's memory."""
    gpu_resource: LabelKey | None = None
    """Resource of the GPUs. Unset follows the vendor of `device`."""
    resources: dict[LabelKey, Quantity] = {}
    """Further resources per pod, for example `rdma/hca: 8`."""
    efa: NonNegativeInt = 0
    """EFA interfaces per pod."""
    networks: dict[str, KubernetesName] = {}
    """GKE networks by interface, for example `eth2: rdma-0`."""
    claims: dict[KubernetesName, KubernetesName] = {}
    """Device classes (DRA) by the name of their claim. All devices of a node are claimed."""
    compute_domain: bool = False
    """Create a ComputeDomain (NVL72)."""
    host_network: bool = False
    """Use the network of the node."""
    privileged: bool = False
    """Run privileged containers."""
    node_selector: dict[LabelKey, str] = {}
    """Labels that nodes must have."""
    tolerations: tuple[TolerationText, ...] = ()
    """Taints to tolerate: `KEY[=VALUE][:EFFECT]`."""
    exclude: tuple[str, ...] = ()
    """Nodes to exclude."""
    annotations: dict[LabelKey, str] = {}
    """Annotations of the pods."""
    volumes: dict[AbsolutePath, str] = {}
    """Volumes by mount path: the name of a claim, or a folder of the node."""
    results: KubernetesName | None = None
    """Volume claim for checkpoints and profiles, which are lost without one."""
    runtime: KubernetesName = "torch-distributed"
    """Runtime of a TrainJob."""


@dataclass(frozen=True)
class SlurmOption:
    """The sbatch option that a setting maps to."""

    name: str
    variable: str | None = None
    """Environment variable of the user that provides the value if the cluster does not."""
    in_steps: bool = False
    """True if srun also receives the option for steps of an allocation."""


class SlurmSettings(Value):
    """Slurm settings of a site. None omits the option.

    To add an option of sbatch, add a field with a SlurmOption.
    """

    partition: Annotated[str | None, SlurmOption("partition", "SBATCH_PARTITION")] = None
    """Partition."""
    account: Annotated[str | None, SlurmOption("account", "SBATCH_ACCOUNT")] = None
    """Account."""
    qos: Annotated[str | None, SlurmOption("qos", "SBATCH_QOS")] = None
    """Quality of service."""
    reservation: Annotated[str | None, SlurmOption("reservation", "SBATCH_RESERVATION")] = None
    """Reservation."""
    constraint: Annotated[str | None, SlurmOption("constraint", "SBATCH_CONSTRAINT")] = None
    """Required node features."""
    gres: Annotated[str | None, SlurmOption("gres", "SBATCH_GRES", in_steps=True)] = None
    """Generic resources per node. Unset requests the GPUs of the run, `none` omits the option."""
    cpus_per_task: Annotated[PositiveInt | None, SlurmOption("cpus-per-task")] = None
    """CPUs per node (one task runs per node)."""
    mem: Annotated[str | None, SlurmOption("mem", "SBATCH_MEM_PER_NODE")] = None
    """Memory per node. Unset requests all of it, `none` omits the option."""
    time: Annotated[str | None, SlurmOption("time", "SBATCH_TIMELIMIT")] = None
    """Time limit of a job, e.g. `2:00:00`. Unset is the limit of `--timeout` or the recipe, else
    `SBATCH_TIMELIMIT`."""
    hint: Annotated[str | None, SlurmOption("hint", "SBATCH_HINT")] = None
    """CPU usage hint, e.g. `nomultithread`."""
    exclude: Annotated[tuple[str, ...], SlurmOption("exclude")] = ()
    """Nodes to exclude."""
    segment: Annotated[PositiveInt | None, SlurmOption("segment", "SBATCH_SEGMENT_SIZE")] = None
    """Nodes that must be in one block of the network."""
    container_image: str | None = None
    """Container image. Needs the Pyxis plugin."""
    container_mounts: tuple[str, ...] = ()
    """Mounts of the container."""
    requeue: bool = False
    """Allow Slurm to requeue the jobs."""
    retries: NonNegativeInt = 1
    """Restarts of a job without a node that failed."""
    allocation: str | None = None
    """Id of a running job. Runs become steps of it."""

    @classmethod
    def declared_options(cls) -> dict[str, SlurmOption]:
        """Return the sbatch options by field name."""
        return {
            name: part
            for name, field in cls.model_fields.items()
            for part in field.metadata
            if isinstance(part, SlurmOption)
        }

    def options(self, *, steps: bool = False) -> dict[str, str]:
        """Return the options that are set, by sbatch name. With `steps`, return those of srun."""
        options: dict[str, str] = {}
        for field, option in self.declared_options().items():
            value: str | int | tuple[str, ...] | None = getattr(self, field)
            is_unset = value in (None, ()) or (field in ("gres", "mem") and value == OMIT)
            if not is_unset and (option.in_steps or not steps):
                options[option.name] = ",".join(value) if isinstance(value, tuple) else str(value)
        return options

    def with_variables(
        self, environment: Mapping[str, str], *, has_limit: bool = False
    ) -> SlurmSettings:
        """Return the settings with unset fields filled from the user's SBATCH_ variables.

        With `has_limit`, the run has a time limit of its own, which the variable does not replace.
        Raises UserError for a variable with an invalid value.
        """
        values = {
            field: value
            for field, option in self.declared_options().items()
            if option.variable and getattr(self, field) is None
            if not (has_limit and field == "time")
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
    """The machines of a run: equal nodes with one kind of device, and the launcher.

    Fields marked as labels state where and how something runs. They do not change what runs.
    """

    name: RunLabel[str]
    """Name of the cluster."""
    device: str
    """Device of the nodes (`paceline recipes devices`)."""
    device_label: RunLabel[str | None] = None
    """Name that the machine reports for its device, e.g. the CPU model."""
    nodes: PositiveInt = 1
    """Number of nodes."""
    devices_per_node: PositiveInt
    """Devices per node. Each device runs one rank."""
    device_memory_bytes: RunLabel[PositiveFloat | None] = None
    """Memory per device; overrides the catalog. For `cpu`, host memory divided by the number of
    processes."""
    intra_link: str | None = None
    """Link between the devices of a node."""
    inter_link: str | None = None
    """Link between nodes."""
    launcher: RunLabel[LauncherName] = "local"
    """Launcher of programs on the nodes."""
    hosts: RunLabel[tuple[str, ...]] = ()
    """Hosts in rank order. If empty, the scheduler chooses them."""
    interface: RunLabel[str | None] = None
    """Network interface for rendezvous and collectives, e.g. ib0. Unset leaves the choice to
    PyTorch."""
    require_transport: RunLabel[Requirement | None] = None
    """Required transport of collectives: `rdma`, `infiniband`, `roce`, `efa`, `gib` or `sockets`
    between nodes, `nvlink` within a node. Runs on another one fail."""
    bind: str = "none"
    """CPU binding of ranks: `auto` (the cores nearest to the device), `none`, or a file."""
    ssh: RunLabel[SshSettings] = SshSettings()
    """SSH settings."""
    slurm: RunLabel[SlurmSettings] = SlurmSettings()
    """Slurm settings."""
    ray: RunLabel[RaySettings] = RaySettings()
    """Ray settings."""
    kubernetes: RunLabel[KubernetesSettings] = KubernetesSettings()
    """Kubernetes settings."""
    python: str | None = None
    """Python interpreter on the nodes. Unset is Paceline's, or `python3` in a container."""
    stage: RunLabel[str | None] = None
    """Folder of staged assets on the local disks of the nodes. Unset is the shared folder of this
    machine."""
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
            raise ValueError(f"{twice} is listed twice")
        return hosts

    @field_validator("interface")
    @classmethod
    def _name_of_interface(cls, interface: str | None) -> str | None:
        if interface is not None and not INTERFACE_NAME.fullmatch(interface):
            raise ValueError(f"{interface!r} is not a network interface")
        return interface

    @field_validator("stage")
    @classmethod
    def _is_absolute(cls, stage: str | None) -> str | None:
        if stage is not None and not (stage.startswith("/") and stage.isprintable()):
            raise ValueError(f"{stage!r} is not an absolute path")
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
        """Number of devices, one rank each."""
        return self.nodes * self.devices_per_node

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the launcher."""
        return capabilities(self.launcher)

    @property
    def runs_here(self) -> bool:
        """True if ranks are processes of this machine."""
        return self.capabilities.runs_here

    @property
    def allocation(self) -> str | None:
        """Id of the running job whose steps the runs become; None if there is none."""
        return self.slurm.allocation if self.capabilities.allocations else None

    @property
    def waits_in_queue(self) -> bool:
        """True if a job waits in a queue before it starts."""
        return self.capabilities.queues and self.allocation is None

    @property
    def scheduler_picks_hosts(self) -> bool:
        """True if the scheduler chooses the nodes, so that they are known only after the start."""
        return self.waits_in_queue and not self.hosts

    @property
    def in_container(self) -> bool:
        """True if programs run in a container, where the paths of this machine do not exist."""
        can = self.capabilities
        return can.needs_image or (can.containers and self.slurm.container_image is not None)

    @property
    def interpreter(self) -> str:
        """Interpreter that runs a job's programs."""
        return self.python or (CONTAINER_PYTHON if self.in_container else sys.executable)


def with_secrets(env: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a stored cluster, with secrets filled in from `environment`.

    Raises UserError for a secret that is not set there. Stored files contain only its name.
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


MAX_LEVELS = 4


class FabricLevel(Value):
    """One level of a fabric: the number of neighboring devices that it connects, and its speed."""

    name: str = Field(min_length=1, max_length=40)
    """Name of the level."""
    devices: PositiveInt | None = None
    """Devices that the level connects. Unset, for the last level only, is all."""
    link: str | None = None
    """Link between the members of the level. Unset uses the rate of the level below."""
    oversubscription: Annotated[float, Field(ge=1, le=1000)] = 1.0
    """Bandwidth of the level below divided by the bandwidth of this level."""
    latency_s: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Additional one-way latency in seconds."""


class Site(Cluster):
    """File of a cluster: the settings for runs, and the fabric for estimates."""

    fabric: tuple[FabricLevel, ...] = Field(default=(), max_length=MAX_LEVELS)
    """Levels of the network, from the NVLink domain upwards."""
    placement: Literal["in-order", "scattered"] = "in-order"
    """`in-order` if neighboring ranks share a switch, `scattered` if nodes can be anywhere."""

    @model_validator(mode="after")
    def _levels_hold_each_other(self) -> Site:
        sizes = [level.devices for level in self.fabric]
        if None in sizes[:-1]:
            raise ValueError("fabric: only the last level may omit devices")
        level_sizes = [size for size in sizes if size is not None]
        for inner, outer in pairwise(level_sizes):
            if outer <= inner or outer % inner:
                raise ValueError(
                    f"fabric: a level of {outer} devices is not a multiple of the level of {inner} "
                    f"below it; allowed: a larger multiple, such as {2 * inner}"
                )
        if level_sizes and max(level_sizes[0], self.devices_per_node) % min(
            level_sizes[0], self.devices_per_node
        ):
            raise ValueError(
                f"fabric: {level_sizes[0]} devices are {self._partial_nodes}, or a divisor of it"
            )
        if level_sizes[1:] and level_sizes[1] % self.devices_per_node:
            raise ValueError(f"fabric: {level_sizes[1]} devices are {self._partial_nodes}")
        if len(level_sizes) == len(sizes) > 0 and level_sizes[-1] < self.world_size:
            raise ValueError(
                f"fabric: the last level connects {level_sizes[-1]} of {self.world_size} devices; "
                "omit its number to connect all"
            )
        if self.fabric and self.fabric[0].oversubscription != 1:
            raise ValueError(
                "fabric: the first level cannot be oversubscribed, because no level is below it"
            )
        if self.fabric and (self.intra_link or self.inter_link):
            raise ValueError(
                "fabric: set the link of each level instead of intra_link and inter_link"
            )
        return self

    @property
    def _partial_nodes(self) -> str:
        return f"not whole nodes; allowed: a multiple of {self.devices_per_node}"

    @property
    def as_cluster(self) -> Cluster:
        """The cluster settings that runs use."""
        fields = self.model_fields_set & set(Cluster.model_fields)
        return Cluster.model_validate({name: getattr(self, name) for name in fields})
