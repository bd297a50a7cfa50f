"""From a recipe and this machine to what exactly will run, or why it cannot."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from paceline.core.errors import SystemFaultError, UserError
from paceline.core.hardware import NARROW, Cluster, Dtype
from paceline.core.job import Job
from paceline.core.layout import AXIS_FIELDS
from paceline.core.memory import memory_per_device, min_devices_to_fit
from paceline.core.parallel_run import ParallelRun
from paceline.core.run import PLACEHOLDER_FIELDS, RunSpec
from paceline.core.shape import num_parameters
from paceline.core.training import MatmulPrecision
from paceline.core.units import gib, percent
from paceline.engines import engine, native
from paceline.files import catalog, references
from paceline.files.recipe import (
    LONGEST_NAME,
    Recipe,
    load_recipe,
    parse_override,
    recipe_names,
    recipe_path,
    resolve,
)
from paceline.files.run_folder import runs_root
from paceline.files.staged import with_staged_files
from paceline.files.yaml_file import validate
from paceline.machines import launcher
from paceline.machines.node.binding import bound
from paceline.machines.placement import (
    Request,
    choose_cluster,
    device_kind,
    find_device,
    in_current_allocation,
)
from paceline.machines.probe.gemm import GemmProbe, probe_gemm
from paceline.machines.probe.inventory import inventory
from paceline.runs.checkpoints import with_checkpoint
from paceline.runs.compilation import compiled_here
from paceline.runs.data_files import TokenFile, with_data_file, with_tokens

ENGINE = "command"
LAUNCHERS = frozenset(
    {"torchrun", "accelerate", "deepspeed", "python", "python3", "{python}", "bash", "sh"}
)
"""Programs after which a run is not called, because what they start says more."""
SETTABLE = ("time_limit_s", "hang_limit_s", "engine_settings")
"""What can be set of a command without a recipe."""


def requested_recipe(request: Request) -> Recipe:
    """The recipe of a request; of a bare command one that states nothing but how it is watched.

    Raises UserError for a field that only a recipe has.
    """
    if request.recipe or not request.command:
        recipe = load_recipe(request.recipe, request.variant, request.overrides)
        return recipe.model_copy(update={"engine": ENGINE}) if request.command else recipe
    return _bare_recipe(request)


def on_one_device(request: Request, recipe: Recipe, machine: dict[str, Any]) -> Request:
    """A command that is started once a node takes one process of a CPU, if nobody says more."""
    stated = request.devices or request.cluster or any(h.slots for h in request.where.hosts)
    if not request.command or request.per == "device" or stated:
        return request
    kind, _ = device_kind(request.device, machine)
    return replace(request, devices=recipe.layout.smallest_world) if kind == "cpu" else request


def with_command(spec: RunSpec, request: Request) -> RunSpec:
    """The run of the request's command, if it has one."""
    if not request.command:
        return spec
    settings = {**spec.engine_settings, "per": request.per or "node"}
    if request.devices:
        settings["devices"] = request.devices
    return spec.model_copy(
        update={
            "command": request.command,
            "engine_settings": settings,
            "bare": not request.recipe,
        }
    )


def command_name(command: tuple[str, ...]) -> str:
    """What a bare run is called: the first script in its command, else its program."""
    program = PurePath(command[0]).name
    if program in LAUNCHERS:
        scripts = (word for word in command[1:] if re.search(r"\w\.(py|sh)$", word))
        program = next((PurePath(word).name for word in scripts), program)
    name = "".join(letter for letter in program if letter.isprintable())
    return name[:LONGEST_NAME] or "command"


def _bare_recipe(request: Request) -> Recipe:
    if request.variant is not None:
        raise UserError("--variant", "is of a recipe, and there is none", remedy="leave it out")
    fields: dict[str, Any] = {}
    for text in request.overrides:
        key, value = parse_override(text)
        name, _, rest = key.partition(".")
        if name not in SETTABLE:
            raise UserError(
                f"--set {text}",
                "is of a recipe, and there is none",
                allowed=", ".join(SETTABLE),
                remedy="give the RECIPE that says what the command trains",
            )
        if rest and not isinstance(fields.get(name, {}), dict):
            raise UserError(f"--set {text}", f"{name} was given as a whole before")
        fields[name] = {**fields.get(name, {}), rest: value} if rest else value
    training = {**PLACEHOLDER_FIELDS["training"], "batch_per_device": 1}
    name = command_name(request.command)
    content = {**PLACEHOLDER_FIELDS, "training": training, "time_limit_s": None, **fields}
    where = " ".join(f"--set {text}" for text in request.overrides) or "command"
    return validate(Recipe, {**content, "name": name, "title": name, "engine": ENGINE}, where)


BUSY_LIMIT = 0.2
"""Share of the cores in use beyond which a run is told to be disturbed."""

OPTIMIZER_MASTERS = ("nemo", "megatron", "primus", "mlperf")
"""What names of engines begin with whose fp32 masters are states of the optimizer."""
SUGGESTED = ("H100-SXM", "H200-SXM", "B200")
"""Devices that a refusal names as places where the run would fit."""


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before anything starts."""

    spec: RunSpec
    job: Job
    inventory: dict[str, Any]
    notices: tuple[str, ...] = field(default=())
    token_files: tuple[TokenFile, ...] = field(default=())
    """What is tokenized first, where it was not before."""

    @property
    def script(self) -> str:
        """The very text that runs."""
        return launcher(self.spec.cluster.launcher).render(self.job)


def make_plan(request: Request, machine: dict[str, Any] | None = None) -> Plan:
    """The plan for a request on this machine; raises UserError when it cannot run here.

    `machine` is its inventory where it was taken just before.
    """
    recipe = requested_recipe(request)
    for name in recipe.references:
        references.find_rows(name)
    recipe = with_staged_files(recipe)
    runs = runs_root(request.runs_dir)
    token_files: tuple[TokenFile, ...] = ()
    if not request.command:
        recipe = with_data_file(recipe, recipe_path(request.recipe).parent)
        recipe, token_files = with_tokens(recipe, runs, recipe.name)
        recipe = with_checkpoint(recipe, runs)
    machine = machine or inventory()
    cluster, notices = choose_cluster(on_one_device(request, recipe, machine), recipe, machine)
    # What a program of the user's own needs is not known.
    force = request.force or bool(request.command)
    if not force:
        refuse_what_cannot_fit(recipe, cluster)
    spec = resolve(recipe, cluster, _native_bf16(cluster, machine), request.variant)
    spec = with_command(spec, request)
    spec, said = compiled_here(spec, recipe.training.compile)
    notices += said
    if request.timeout_s is not None:
        spec = spec.model_copy(update={"time_limit_s": request.timeout_s})
    _check(spec, force)
    notices += busy_notice(machine, cluster)
    job = bound(engine(spec.engine).job(spec, spec.recipe))
    return Plan(spec, job, machine, tuple(notices), token_files)


def plan_again(spec: RunSpec) -> Plan:
    """The plan for one more run of `spec`; raises UserError where this machine is another one."""
    machine, cluster = inventory(), spec.cluster
    gpus = [gpu["name"] for gpu in machine["gpus"]]
    gpu_names = ", ".join(dict.fromkeys(gpus))
    device_label = machine["cpu"]["model"] if cluster.device == "cpu" else gpu_names
    same = cluster.device_label in (None, device_label) or not cluster.runs_here
    gpus_here = len(gpus) if cluster.runs_here else cluster.devices_per_node
    if not same or (cluster.device != "cpu" and gpus_here < cluster.devices_per_node):
        raise UserError(
            f"{spec.recipe} on {_describe(cluster)}",
            f"was measured on {cluster.device_label or cluster.device}; "
            f"here is {device_label or 'no GPU'}",
            remedy="repeats of one group must run on one kind of machine",
        )
    _check(spec, force=True)
    cluster, notices = in_current_allocation(cluster)
    spec = spec.model_copy(update={"cluster": cluster})
    job = bound(engine(spec.engine).job(spec, spec.recipe))
    return Plan(spec, job, machine, (*notices, *busy_notice(machine, cluster)))


def as_of_now(plan: Plan, beside_others: bool = False) -> Plan:
    """The plan with what the machine is and does at this moment; runs beside it are no notice."""
    now, cluster = inventory(), plan.spec.cluster
    before = busy_notice(plan.inventory, cluster)
    lasting = [notice for notice in plan.notices if notice not in before]
    busy = [] if beside_others else busy_notice(now, cluster)
    return replace(plan, inventory=now, notices=(*lasting, *busy))


def refuse_what_cannot_fit(recipe: Recipe, cluster: Cluster) -> None:
    """Raise UserError when even the training states exceed all memory of the cluster together."""
    memory_bytes = _device_memory_bytes(cluster)
    if memory_bytes is None:
        return
    whole = memory_per_device(
        ParallelRun(
            recipe.layout.model_copy(update=_ONE_DEVICE),
            recipe.model,
            1,
            seq_len=recipe.training.seq_len,
            dtype=_dtype(recipe),
            lora=recipe.lora,
        )
    )
    total = memory_bytes * cluster.world_size
    if whole.states_bytes > total:
        raise UserError(
            f"{recipe.name} on {_describe(cluster)}",
            f"cannot fit: weights, gradients and optimizer of {num_parameters(recipe.model):,} "
            f"parameters take {gib(whole.states_bytes)}, all memory here is {gib(total)}",
            remedy=f"would fit: {would_fit(recipe)}; here try `paceline run {_sibling(recipe)}`",
        )


def _sibling(recipe: Recipe) -> str:
    """The recipe of the same structure that every machine can run, else the first one to try."""
    tiny = f"{recipe.name}-tiny"
    return tiny if tiny in recipe_names() else "tiny-llama"


_ONE_DEVICE = {
    **dict.fromkeys(AXIS_FIELDS, 1),
    "sequence_parallel": False,
    "dp_shard": None,
    "schedule": "1f1b",
    "cp_exchange": "all-gather",
    "gradient_sync": None,
    "recompute_budget": None,
}


def _dtype(recipe: Recipe) -> Dtype:
    return "bf16" if recipe.training.dtype == "auto" else recipe.training.dtype


def would_fit(recipe: Recipe) -> str:
    """The fewest devices (power of two) of some catalog kinds that hold the run, as a phrase."""
    phrases: list[str] = []
    for name in SUGGESTED:
        device = catalog.device(name)
        count = min_devices_to_fit(
            recipe.model,
            recipe.training.seq_len,
            _dtype(recipe),
            device.memory_bytes or 0.0,
            recipe.lora,
            device.context_bytes or 0.0,
        )
        if count:
            phrases.append(f"{count} x {name}")
    if not phrases:
        return f"no number of {' or '.join(SUGGESTED)} with data parallelism alone"
    layout = {"zero_stage": 3, "recompute": "full", "micro_batch": 1, **_ONE_DEVICE}
    changed = [
        f"--set layout.{name}={'null' if value is None else str(value).lower()}"
        for name, value in layout.items()
        if getattr(recipe.layout, name) != value
    ]
    with_changes = f" with {' '.join(changed)}" if changed else ""
    return f"{' or '.join(phrases)}{with_changes}, by the static memory bound"


def reachable_rate(spec: RunSpec, machine: dict[str, Any]) -> GemmProbe | None:
    """The matrix-product probe for the run's dtype and device; None when it cannot be measured."""
    kind = "cpu" if spec.cluster.device == "cpu" else "cuda"
    try:
        return probe_machine(
            machine,
            kind,
            (spec.training.dtype,),
            spec.training.matmul_precision,
            python=spec.cluster.python,
        )
    except SystemFaultError:
        return None


def probe_machine(
    machine: dict[str, Any],
    kind: str,
    dtypes: tuple[Dtype, ...],
    matmul_precision: MatmulPrecision = "high",
    *,
    python: str | None = None,
    fresh: bool = False,
) -> GemmProbe:
    """The matrix-product probe of one GPU, or of all cores of a CPU (`kind` cpu or cuda)."""
    cores = machine["cpu"]["usable_cores"]
    identity = {
        "device": machine["cpu"]["model"] if kind == "cpu" else machine["gpus"],
        "cores": cores,
        "torch": machine["packages"].get("torch"),
    }
    threads = cores if kind == "cpu" else None
    return probe_gemm(
        python or sys.executable, identity, kind, dtypes, threads, matmul_precision, fresh
    )


def _native_bf16(cluster: Cluster, machine: dict[str, Any]) -> bool:
    if cluster.device == "cpu":
        return bool(machine["cpu"]["native_bf16"])
    device = find_device(cluster.device)
    return device is None or device.peak_flops_per_s("bf16") is not None


def _no_such_dtype(spec: RunSpec) -> list[str]:
    """That a narrow dtype is none of the device's, where the catalog knows the device."""
    if native.emulated(spec):
        return []
    device, dtype = find_device(spec.cluster.device), spec.training.dtype
    if device is None or dtype not in NARROW or device.peak_flops_per_s(dtype) is not None:
        return []
    can = ", ".join(device.peaks) or "none that the catalog knows"
    return [f"{device.name} does not compute in {dtype}; it does in {can}"]


def _check(spec: RunSpec, force: bool) -> None:
    problems = [*engine(spec.engine).unsupported(spec), *_no_such_dtype(spec)]
    if problems:
        raise UserError(
            f"{spec.recipe} on {_describe(spec.cluster)}",
            "; ".join(problems),
            remedy="change it with --set",
        )
    if force:
        return
    if slow := native.emulated(spec):
        raise UserError(
            f"{spec.recipe} on {_describe(spec.cluster)}",
            "; ".join(slow),
            remedy="change it with --set, or see what it does to the loss with --force",
        )
    limit = _device_memory_bytes(spec.cluster)
    if limit is None:
        return
    device = find_device(spec.cluster.device)
    need = memory_per_device(
        spec.parallel,
        (device and device.context_bytes) or 0.0,
        optimizer_masters=spec.engine.startswith(OPTIMIZER_MASTERS),
    )
    if need.total_bytes > limit:
        raise UserError(
            f"{spec.recipe} on {_describe(spec.cluster)}",
            f"cannot fit: a device needs at least {gib(need.total_bytes)} "
            f"(states {gib(need.states_bytes)}, activations {gib(need.activations_bytes)}) "
            f"and has {gib(limit)}",
            remedy="try --set layout.zero_stage=3, --set layout.recompute=full or a smaller "
            "layout.micro_batch; --force runs it all the same",
        )


def busy_notice(machine: dict[str, Any], cluster: Cluster) -> list[str]:
    """What should be told when other programs use the cores of this machine, and it trains.

    A job of its own begins later and on other nodes, of which this machine says nothing.
    """
    busy = machine["cpu_busy_fraction"]
    if busy <= BUSY_LIMIT or not (cluster.runs_here or cluster.allocation):
        return []
    return [f"other programs use {percent(busy, 0)} of the cores: expect a wider spread"]


def _device_memory_bytes(cluster: Cluster) -> float | None:
    if cluster.device_memory_bytes:
        return cluster.device_memory_bytes
    device = find_device(cluster.device)
    return device.memory_bytes if device else None


def _describe(cluster: Cluster) -> str:
    memory = _device_memory_bytes(cluster)
    room = f" with {gib(memory)} each" if memory else ""
    return f"{cluster.world_size} x {cluster.device}{room}"
