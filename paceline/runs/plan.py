"""Plan of a run: what a recipe runs on this machine, or why it cannot run."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from paceline.core.errors import SystemFaultError, UserError, few_names
from paceline.core.hardware import NARROW, Cluster, Dtype
from paceline.core.job import Job
from paceline.core.layout import AXIS_FIELDS
from paceline.core.memory import memory_per_device, min_devices_to_fit
from paceline.core.parallel_run import ParallelRun
from paceline.core.run import PLACEHOLDER_FIELDS, RunSpec
from paceline.core.shape import num_parameters
from paceline.core.training import MatmulPrecision
from paceline.core.units import gib, percent
from paceline.engines import engine, native, sizes_in_files
from paceline.engines import notes as engine_notes
from paceline.files import catalog, references
from paceline.files.recipe import (
    LONGEST_NAME,
    Recipe,
    full_key,
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
from paceline.machines.node.binding import with_binding
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
from paceline.runs.compilation import choose_compilation
from paceline.runs.data_files import TokenFile, with_data_file, with_tokens

ENGINE = "command"
LAUNCHERS = frozenset(
    {"torchrun", "accelerate", "deepspeed", "python", "python3", "{python}", "bash", "sh"}
)
"""Programs that do not give a run its name; the script that they start does."""
SETTABLE_FIELDS = ("time_limit_s", "hang_limit_s", "engine_settings")
"""Fields that can be set for a command without a recipe."""


def requested_recipe(request: Request) -> Recipe:
    """Return the recipe of a request; a bare command's recipe only limits time and silence.

    Raises UserError for a field that only a recipe has.
    """
    if request.recipe or not request.command:
        recipe = load_recipe(request.recipe, request.variant, request.overrides)
        return recipe.model_copy(update={"engine": ENGINE}) if request.command else recipe
    return _bare_recipe(request)


def with_one_process(request: Request, recipe: Recipe, machine: dict[str, Any]) -> Request:
    """Return the request with one process on a CPU for a command that is launched per node."""
    has_placement = request.devices or request.cluster or any(h.slots for h in request.where.hosts)
    if not request.command or request.per == "device" or has_placement:
        return request
    kind, _ = device_kind(request.device, machine)
    return replace(request, devices=recipe.layout.smallest_world) if kind == "cpu" else request


def with_command(spec: RunSpec, request: Request) -> RunSpec:
    """Return the run with the request's command, if it has one."""
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
    """Return the name of a bare run: the first script in its command, or its program."""
    program = PurePath(command[0]).name
    if program in LAUNCHERS:
        scripts = (word for word in command[1:] if re.search(r"\w\.(py|sh)$", word))
        program = next((PurePath(word).name for word in scripts), program)
    name = "".join(letter for letter in program if letter.isprintable())
    return name[:LONGEST_NAME] or "command"


def _bare_recipe(request: Request) -> Recipe:
    if request.variant is not None:
        raise UserError("--variant", "needs a recipe, and there is none", remedy="leave it out")
    fields: dict[str, Any] = {}
    for text in request.overrides:
        key, value = parse_override(text)
        name, _, subkey = key.partition(".")
        if name not in SETTABLE_FIELDS:
            raise UserError(
                f"--set {text}",
                "needs a recipe, and there is none",
                allowed=few_names(SETTABLE_FIELDS, name),
                remedy="give the RECIPE that the command trains",
            )
        if subkey and not isinstance(fields.get(name, {}), dict):
            raise UserError(f"--set {text}", f"{name} has a value already")
        fields[name] = {**fields.get(name, {}), subkey: value} if subkey else value
    training = {**PLACEHOLDER_FIELDS["training"], "batch_per_device": 1}
    name = command_name(request.command)
    content = {**PLACEHOLDER_FIELDS, "training": training, "time_limit_s": None, **fields}
    where = " ".join(f"--set {text}" for text in request.overrides) or "command"
    return validate(Recipe, {**content, "name": name, "title": name, "engine": ENGINE}, where)


BUSY_LIMIT = 0.2
"""Fraction of busy cores above which a notice says that the run is disturbed."""

OPTIMIZER_MASTERS = ("nemo", "megatron", "primus", "mlperf")
"""Prefixes of engines that keep fp32 master weights in the optimizer state."""
SUGGESTED_DEVICES = ("H100-SXM", "H200-SXM", "B200")
"""Devices that an error suggests if a run does not fit."""


@dataclass(frozen=True)
class Plan:
    """All decisions about a run before it starts."""

    spec: RunSpec
    job: Job
    inventory: dict[str, Any]
    notices: tuple[str, ...] = field(default=())
    token_files: tuple[TokenFile, ...] = field(default=())
    """Texts to tokenize before the run."""
    differences: tuple[str, ...] = field(default=())
    """Sizes that the engine's own files set otherwise than the recipe, such as `layout.cp 8`."""

    @property
    def script(self) -> str:
        """Job script."""
        return launcher(self.spec.cluster.launcher).render(self.job)


def make_plan(request: Request, machine: dict[str, Any] | None = None) -> Plan:
    """Return the plan for a request; raise UserError if it cannot run on this machine.

    `machine` is the machine's inventory if the caller has just taken it.
    """
    recipe = requested_recipe(request)
    for name in recipe.references:
        references.find_rows(name)
    recipe = with_staged_files(recipe)
    runs = runs_root(request.runs_dir)
    token_files: tuple[TokenFile, ...] = ()
    data_notices: list[str] = []
    if not request.command:
        recipe, data_notices = _with_data(recipe, request)
        recipe, token_files = with_tokens(recipe, runs, recipe.name)
        recipe = with_checkpoint(recipe, runs)
    machine = machine or inventory()
    cluster, notices = choose_cluster(with_one_process(request, recipe, machine), recipe, machine)
    recipe, cluster, differences = _with_sizes_in_files(recipe, cluster, request)
    # The memory needs of the user's own program are unknown.
    force = request.force or bool(request.command)
    if not force:
        check_total_memory(recipe, cluster)
    spec = resolve(recipe, cluster, _native_bf16(cluster, machine), request.variant)
    spec = with_command(spec, request)
    spec, compile_notices = choose_compilation(spec, recipe.training.compile)
    if differences:
        notices.append(f"sizes from the engine's own files: {', '.join(differences)}")
    notices += [*data_notices, *compile_notices, *recipe.notes]
    if request.timeout_s is not None:
        spec = spec.model_copy(update={"time_limit_s": request.timeout_s})
    _check(spec, force)
    notices += [*engine_notes(spec), *busy_notice(machine, cluster)]
    job = with_binding(engine(spec.engine).job(spec, spec.recipe))
    return Plan(spec, job, machine, tuple(notices), token_files, differences)


SAME_SIZE = {"training.global_batch": ("training.batch_per_device",)}
"""Fields of a recipe that state the size of another one."""


def _with_sizes_in_files(
    recipe: Recipe, cluster: Cluster, request: Request
) -> tuple[Recipe, Cluster, tuple[str, ...]]:
    """Return recipe and cluster with the sizes in the engine's files, and all that differ.

    A field that the user sets stays; the engine then reports the contradiction. Raises UserError
    for files that need more nodes or devices, or other ones than requested.
    """
    user_fields = {full_key(text.partition("=")[0]) for text in request.overrides}
    layout, training = dict[str, int](), dict[str, int | None]()
    hardware: dict[str, Any] = {}
    differences: list[str] = []
    for field_name, size in sizes_in_files(recipe, cluster).items():
        part, _, name = field_name.partition(".")
        if not user_fields.isdisjoint({field_name, part, *SAME_SIZE.get(field_name, ())}):
            continue
        if part == "cluster":
            ours, hardware[name] = getattr(cluster, name), size
            if size > ours or (name == "nodes" and request.where.nodes not in (None, size)):
                raise UserError(
                    f"{recipe.name} on {_describe(cluster)}",
                    f"the engine's own files set {field_name} {size}, but it is {ours} here",
                    remedy="use a cluster of that size, or other files",
                )
        elif part == "layout":
            ours, layout[name] = getattr(recipe.layout, name), size
        else:
            ours = recipe.training.batch(cluster.world_size, cluster.nodes)
            training = {name: size, "batch_per_device": None}
        if size != ours:
            source = "cluster" if part == "cluster" else "recipe"
            differences.append(f"{field_name} {size} ({source}: {ours})")
    if hosts := cluster.hosts[: hardware.get("nodes", cluster.nodes)]:
        hardware["hosts"] = hosts
    return (
        recipe.model_copy(
            update={
                "layout": recipe.layout.model_copy(update=layout),
                "training": recipe.training.model_copy(update=training),
            }
        ),
        cluster.model_copy(update=hardware),
        tuple(differences),
    )


def _with_data(recipe: Recipe, request: Request) -> tuple[Recipe, list[str]]:
    """Return the recipe with absolute data paths, and a notice if a dry run's data is not here."""
    try:
        return with_data_file(recipe, recipe_path(request.recipe).parent), []
    except UserError as error:
        path = recipe.data.path
        is_indexed = recipe.data.source in ("indexed", "tokens")
        if not (request.dry_run and is_indexed and path and Path(path).is_absolute()):
            raise
        return recipe, [f"{error.where} {error.what}; the run needs it on every node"]


def replan(spec: RunSpec) -> Plan:
    """Return the plan for another run of `spec`; raise UserError on another kind of machine."""
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
            f"this machine has {device_label or 'no GPU'}",
            remedy="repeats of one group must run on one kind of machine",
        )
    _check(spec, force=True)
    cluster, notices = in_current_allocation(cluster)
    spec = spec.model_copy(update={"cluster": cluster})
    job = with_binding(engine(spec.engine).job(spec, spec.recipe))
    notices += [*engine_notes(spec), *busy_notice(machine, cluster)]
    return Plan(spec, job, machine, tuple(notices))


def refresh(plan: Plan, concurrent: bool = False) -> Plan:
    """Return the plan with current inventory and load; `concurrent` omits the load notice."""
    machine, cluster = inventory(), plan.spec.cluster
    before = busy_notice(plan.inventory, cluster)
    lasting = [notice for notice in plan.notices if notice not in before]
    busy = [] if concurrent else busy_notice(machine, cluster)
    return replace(plan, inventory=machine, notices=(*lasting, *busy))


def check_total_memory(recipe: Recipe, cluster: Cluster) -> None:
    """Raise UserError if the training states exceed the total memory of the cluster."""
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
            remedy=f"would fit: {would_fit(recipe)}; here, try `paceline run {_sibling(recipe)}`",
        )


def _sibling(recipe: Recipe) -> str:
    """Return the tiny variant of the recipe, or a tiny default recipe."""
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
    """Return the smallest device counts (powers of two) that fit the run, as a phrase."""
    phrases: list[str] = []
    for name in SUGGESTED_DEVICES:
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
        return f"no number of {' or '.join(SUGGESTED_DEVICES)} with data parallelism alone"
    layout = {"zero_stage": 3, "recompute": "full", "micro_batch": 1, **_ONE_DEVICE}
    overrides = [
        f"--set layout.{name}={'null' if value is None else str(value).lower()}"
        for name, value in layout.items()
        if getattr(recipe.layout, name) != value
    ]
    with_changes = f" with {' '.join(overrides)}" if overrides else ""
    return f"{' or '.join(phrases)}{with_changes}, by the static memory bound"


def measure_gemm_rate(spec: RunSpec, machine: dict[str, Any]) -> GemmProbe | None:
    """Measure GEMM throughput for the run's dtype and device; None if that fails."""
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
    """Measure GEMM throughput of one GPU, or of all cores of a CPU (`kind` cpu or cuda)."""
    cores = machine["cpu"]["usable_cores"]
    identity = {
        "device": machine["cpu"]["model"] if kind == "cpu" else machine["gpus"],
        "cores": cores,
        "torch": machine["packages"].get("torch"),
    }
    threads = cores if kind == "cpu" else None
    return probe_gemm(
        python=python or sys.executable,
        identity=identity,
        device=kind,
        dtypes=dtypes,
        threads=threads,
        matmul_precision=matmul_precision,
        fresh=fresh,
    )


def _native_bf16(cluster: Cluster, machine: dict[str, Any]) -> bool:
    if cluster.device == "cpu":
        return bool(machine["cpu"]["native_bf16"])
    device = find_device(cluster.device)
    return device is None or device.peak_flops_per_s("bf16") is not None


def _unsupported_dtype(spec: RunSpec) -> list[str]:
    """Return an error if a known device does not support a low-precision dtype."""
    if native.emulation_warnings(spec):
        return []
    device, dtype = find_device(spec.cluster.device), spec.training.dtype
    if device is None or dtype not in NARROW or device.peak_flops_per_s(dtype) is not None:
        return []
    can = ", ".join(device.peaks) or "no dtype of the catalog"
    return [f"{device.name} does not support {dtype}; it supports {can}"]


def _check(spec: RunSpec, force: bool) -> None:
    problems = [*engine(spec.engine).unsupported(spec), *_unsupported_dtype(spec)]
    if problems:
        raise UserError(
            f"{spec.recipe} on {_describe(spec.cluster)}",
            "; ".join(problems),
            remedy="change it with --set",
        )
    if force:
        return
    if slow := native.emulation_warnings(spec):
        raise UserError(
            f"{spec.recipe} on {_describe(spec.cluster)}",
            "; ".join(slow),
            remedy="change it with --set; --force runs it to study the loss",
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
            "layout.micro_batch; --force runs it anyway",
        )


def busy_notice(machine: dict[str, Any], cluster: Cluster) -> list[str]:
    """Return a notice if other programs use the cores of the machine that trains.

    A batch job starts later and on other nodes; the load of this machine does not matter then.
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
    memory_text = f" with {gib(memory)} each" if memory else ""
    return f"{cluster.world_size} x {cluster.device}{memory_text}"
