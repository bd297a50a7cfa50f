"""Plan a sweep: expand the combinations, check which can run, and order them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any

from paceline.core.errors import UserError
from paceline.core.layout import AXIS_FIELDS, Layout
from paceline.core.run import RunSpec
from paceline.estimate.calibrate.lookup import FileEvidence
from paceline.estimate.estimates import MAX_P_OOM_TO_FIT, MAX_P_OOM_TO_RUN
from paceline.files.recipe import full_key, load_recipe
from paceline.layouts.sweep.prediction import predict, prune_reasons
from paceline.layouts.sweep.result import Prediction
from paceline.machines.placement import Request, find_device
from paceline.machines.probe.inventory import inventory
from paceline.runs.compilation import COMPILE, with_equal_compilation
from paceline.runs.plan import Plan, make_plan
from paceline.runs.tasks.host_partitioning import partition_hosts
from paceline.runs.tasks.slot import JobSlot

OPTION_FIELDS = {
    **{axis: f"layout.{axis}" for axis in AXIS_FIELDS},
    "zero": "layout.zero_stage",
    "mbs": "layout.micro_batch",
    "recompute": "layout.recompute",
    "gbs": "training.global_batch",
}
"""Short options of a sweep, and the recipe field that each sets."""
MAX_COMBINATIONS = 2000
"""Maximum combinations of one sweep."""
_OPEN, _CLOSE, _QUOTES = "[{(", "]})", "\"'"


@dataclass(frozen=True)
class Dimension:
    """One varied field with its values as written after `--set field=`."""

    field: str
    values: tuple[str, ...]
    option: str | None = None
    """Short option that gave the values; None is `--set`."""

    def as_option(self, value: str) -> str:
        """Return one value as the user typed it: `--tp 4`, `--set layout.vp=2`."""
        return f"{self.option} {value}" if self.option else f"--set {self.field}={value}"

    @property
    def short_name(self) -> str:
        """Short name such as `mbs`, or the last part of the field."""
        names = {field: name for name, field in OPTION_FIELDS.items()}
        return names.get(self.field, self.field.rpartition(".")[2])


def dimensions(
    option_texts: Mapping[str, str | None], overrides: Iterable[str]
) -> tuple[tuple[Dimension, ...], tuple[str, ...]]:
    """Return the varied dimensions, and the overrides that are fixed.

    `option_texts` maps the options of OPTION_FIELDS to their text. A value with commas is a list;
    text in brackets, braces or quotes is one element. Raises UserError without any list, for a
    repeated field, an empty value, or too many combinations.
    """
    lists: list[tuple[str, str, str, str | None]] = [
        (f"--{name}", OPTION_FIELDS[name], text, f"--{name}")
        for name, text in option_texts.items()
        if text is not None
    ]
    by_field: dict[str, Dimension] = {}
    fixed: list[str] = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or len(split_list(value)) < 2:
            fixed.append(text)
        else:
            lists.append((f"--set {text}", full_key(key.strip()), value, None))
    for where, name, text, option in lists:
        if name in by_field:
            raise UserError(where, f"{name} is given twice", remedy="put its values in one list")
        values = tuple(dict.fromkeys(split_list(text)))
        if "" in values:
            raise UserError(where, "contains an empty value", allowed="values separated by commas")
        by_field[name] = Dimension(name, values, option)
    _check(by_field.values())
    return tuple(by_field.values()), tuple(fixed)


def combinations(dimensions: Sequence[Dimension]) -> Iterator[dict[str, str]]:
    """Yield every combination as field -> value; the last dimension changes fastest."""
    fields = [dimension.field for dimension in dimensions]
    for values in product(*(dimension.values for dimension in dimensions)):
        yield dict(zip(fields, values, strict=True))


def split_list(text: str) -> list[str]:
    """Split at commas outside brackets, braces and quotes: `1,[2,3]` has two parts."""
    parts, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in _QUOTES and not parts[-1].strip():
            quote = sign
        elif sign in _OPEN:
            depth += 1
        elif sign in _CLOSE:
            depth -= 1
        elif sign == "," and depth <= 0:
            parts.append("")
            continue
        parts[-1] += sign
    return [part.strip() for part in parts]


def _check(dimensions: Collection[Dimension]) -> None:
    sizes = [len(dimension.values) for dimension in dimensions]
    if not sizes or max(sizes) < 2:
        single_values = ", ".join(
            f"{dimension.short_name} {dimension.values[0]}" for dimension in dimensions
        )
        raise UserError(
            "paceline sweep",
            "has nothing to vary"
            + (f": {single_values} is a single value" if single_values else ""),
            allowed=f"lists for {', '.join(f'--{name}' for name in OPTION_FIELDS)} or --set",
            remedy="for example --tp 1,2 --mbs 1,2,4",
        )
    if prod(sizes) > MAX_COMBINATIONS:
        raise UserError(
            "paceline sweep",
            f"asks for {prod(sizes):,} combinations",
            allowed=f"at most {MAX_COMBINATIONS:,}",
        )


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
RAMP_UP = "training.ramp_up"


@dataclass(frozen=True)
class SweepOptions:
    """Options of a sweep; the request has the fixed overrides."""

    request: Request
    dimensions: tuple[Dimension, ...]
    repeats: int = 1
    name: str | None = None
    prune: bool = True
    nodes_per_trial: int | None = None
    """None without max_parallel gives all requested nodes to one run at a time."""
    max_parallel: int | None = None
    prune_above: float = MAX_P_OOM_TO_RUN
    """OOM probability above which a combination is not run."""
    stack: str | None = None
    """Software assumed for predictions; None is that of the recipe's engine."""
    study: tuple[dict[str, str], ...] = ()
    """Combinations of a published table; empty for all combinations of the dimensions."""

    @property
    def combinations(self) -> list[dict[str, str]]:
        """Every combination as field -> value."""
        return list(self.study or combinations(self.dimensions))


@dataclass(frozen=True)
class Combination:
    """One combination: its plan, or the reason why it has none."""

    settings: dict[str, str]
    layout: Layout
    plan: Plan | None = None
    refusal: str | None = None
    prune_reason: str | None = None
    prediction: Prediction | None = None

    @property
    def runs(self) -> bool:
        """True if the combination will run."""
        return self.plan is not None and self.prune_reason is None


@dataclass(frozen=True)
class Sweep:
    """All combinations in the order in which they run; the others follow."""

    name: str
    recipe: str
    variant: str | None
    dimensions: tuple[Dimension, ...]
    choices: tuple[Combination, ...]
    repeats: int = 1
    notices: tuple[str, ...] = field(default=())
    slots: tuple[JobSlot, ...] = (JobSlot(1),)
    """Slots that execute one run at a time each."""
    queued: bool = False
    """True if runs are submitted to Slurm's queue as job arrays."""
    max_parallel: int | None = None
    """Maximum number of array tasks that run at the same time."""
    stack: str | None = None
    """Software assumed for predictions, if the user set it."""

    def group(self, plan: Plan) -> str:
        """Return the name of the group with the runs of one combination."""
        return f"{self.name}-{plan.spec.key}"


def new_sweep(options: SweepOptions, evidence: FileEvidence | None) -> Sweep:
    """Return the planned sweep without running or writing anything.

    Raises UserError for an invalid value of a field. A combination that cannot run is included with
    its reason.
    """
    request, notices = without_ramp_up(options.request)
    recipe = load_recipe(request.recipe, request.variant, request.overrides)
    for dimension in options.dimensions:
        _check_values(request, dimension)
    place = partition_hosts(
        request, recipe, inventory(), options.nodes_per_trial, options.max_parallel
    )
    machine = place.inventory
    request = _with_equal_devices(place.request, options, machine)
    choices = _without_duplicates(_all_combinations(request, options, machine))
    plans = [choice.plan for choice in choices if choice.plan]
    notices += [*place.notices, *(notice for plan in plans for notice in plan.notices)]
    choices, prediction_notices = _with_predictions(choices, evidence, options)
    notices += prediction_notices
    return Sweep(
        name=group_name(
            options.name,
            "sweep",
            recipe.name,
            options.request,
            options.request.overrides,
            sorted(dimension.field for dimension in options.dimensions),
        ),
        recipe=recipe.name,
        variant=request.variant,
        dimensions=options.dimensions,
        choices=_run_order(choices),
        repeats=options.repeats,
        notices=tuple(dict.fromkeys(notices)),
        slots=place.slots,
        queued=place.queued or _runs_in_queue([choice.plan for choice in choices if choice.plan]),
        max_parallel=options.max_parallel,
        stack=options.stack,
    )


def _check_values(request: Request, dimension: Dimension) -> None:
    """Raise UserError with the option as typed for an invalid value."""
    for value in dimension.values:
        changes = (*request.overrides, f"{dimension.field}={value}")
        try:
            load_recipe(request.recipe, request.variant, changes)
        except UserError as error:
            what = error.what.removeprefix(f"{dimension.field}: ")
            raise UserError(
                dimension.as_option(value), what, allowed=error.allowed, remedy=error.remedy
            ) from error


def without_ramp_up(request: Request) -> tuple[Request, list[str]]:
    """Return the request without the recipe's batch ramp-up, and a notice.

    Layouts are compared at one batch; small early batches would rule out many. A ramp-up that the
    user set explicitly is kept.
    """
    recipe = load_recipe(request.recipe, request.variant, request.overrides)
    keys = [full_key(text.partition("=")[0].strip()) for text in request.overrides]
    if recipe.training.ramp_up is None or any(key.startswith(RAMP_UP) for key in keys):
        return request, []
    changed_request = replace(request, overrides=(*request.overrides, f"{RAMP_UP}=null"))
    return changed_request, ["measured at the full batch, without the recipe's ramp-up"]


def _with_equal_devices(
    request: Request, options: SweepOptions, machine: dict[str, Any]
) -> Request:
    """Use one number of devices for all combinations: that of the largest one that can run."""
    devices_are_set = request.devices is not None or request.cluster is not None
    if devices_are_set or any(d.field == "devices" for d in options.dimensions):
        return request
    plans = [_combination(request, settings, machine).plan for settings in options.combinations]
    counts = {plan.spec.cluster.devices_per_node for plan in plans if plan}
    return replace(request, devices=max(counts)) if len(counts) > 1 else request


def _all_combinations(
    request: Request, options: SweepOptions, machine: dict[str, Any]
) -> list[Combination]:
    """Return every combination, with blocks compiled in all or none unless the user set it."""
    choices = [_combination(request, settings, machine) for settings in options.combinations]
    if any(dimension.field == COMPILE for dimension in options.dimensions):
        return choices
    specs = [choice.plan.spec for choice in choices if choice.plan]
    equal = with_equal_compilation(request, specs)
    return _all_combinations(equal, options, machine) if equal else choices


def _combination(
    request: Request, settings: dict[str, str], machine: dict[str, Any]
) -> Combination:
    overrides = (*request.overrides, *(f"{key}={value}" for key, value in settings.items()))
    layout = load_recipe(request.recipe, request.variant, overrides).layout
    try:
        plan = make_plan(replace(request, overrides=overrides), machine)
        return Combination(settings, layout, plan)
    except UserError as error:
        return Combination(settings, layout, refusal=error.what)


def _without_duplicates(choices: Sequence[Combination]) -> list[Combination]:
    """Refuse combinations that would run the same as another one."""
    keys: set[str] = set()
    unique_choices: list[Combination] = []
    for choice in choices:
        key = choice.plan.spec.key if choice.plan else None
        if key in keys:
            choice = replace(choice, plan=None, refusal="runs the same as another")
        unique_choices.append(choice)
        keys |= {key} if key else set()
    return unique_choices


def _with_predictions(
    choices: Sequence[Combination], evidence: FileEvidence | None, options: SweepOptions
) -> tuple[list[Combination], list[str]]:
    """Return the combinations with predictions and prune reasons, and notices."""
    choices_with_plan = [choice for choice in choices if choice.plan]
    specs = [choice.plan.spec for choice in choices_with_plan if choice.plan]
    if not specs:
        return list(choices), []
    if evidence:  # A wrong calibration file is an error; missing rates are only a notice.
        evidence.of(specs[0].cluster.device, specs[0].training.dtype)
    try:
        predictions = predict(specs, evidence, options.stack)
    except UserError as error:
        if options.stack:
            raise
        remedy = f"; {error.remedy}" if error.remedy else ""
        return list(choices), [f"no predictions: {error.where} {error.what}{remedy}"]
    cluster, device = specs[0].cluster, find_device(specs[0].cluster.device)
    size = cluster.device_memory_bytes or (device and device.memory_bytes)
    limit = None if specs[0].memory_limit_bytes else size
    above = options.prune_above
    prune_reasons = _prune_reasons(specs, predictions, limit, above) if options.prune else []
    reasons = prune_reasons or [None] * len(specs)
    predicted = [
        replace(choice, prediction=prediction, prune_reason=reason)
        for choice, prediction, reason in zip(choices_with_plan, predictions, reasons, strict=True)
    ]
    return [*predicted, *(choice for choice in choices if not choice.plan)], []


def _prune_reasons(
    specs: Sequence[RunSpec],
    predictions: Sequence[Prediction],
    limit_bytes: float | None,
    prune_above: float,
) -> list[str | None]:
    """Return why each run is pruned, compared with equal work on equally many devices."""
    kinds = [(spec.model, spec.lora, spec.training.seq_len, spec.world_size) for spec in specs]
    reasons: dict[int, str | None] = {}
    for kind in dict.fromkeys(kinds):
        rows = [row for row, row_kind in enumerate(kinds) if row_kind == kind]
        tokens = [specs[row].training.global_batch * specs[row].training.seq_len for row in rows]
        why = prune_reasons([predictions[row] for row in rows], tokens, limit_bytes, prune_above)
        reasons.update(zip(rows, why, strict=True))
    return [reasons[row] for row in range(len(specs))]


def _run_order(choices: Sequence[Combination]) -> tuple[Combination, ...]:
    """Sort by expected time, likely OOM last; without predictions, small layouts first."""
    return tuple(sorted(choices, key=_order_key))


def _order_key(choice: Combination) -> tuple[float, ...]:
    layout, plan, expected = choice.layout, choice.plan, choice.prediction
    kind = 0 if choice.runs else 1 if plan else 2
    spec = plan.spec if plan else None
    small = (
        spec.world_size if spec else 0,
        layout.model_devices,
        layout.tp,
        layout.pp,
        layout.micro_batch,
        layout.zero_stage,
        spec.training.global_batch if spec else 0,
    )
    if spec is None or expected is None:
        return (kind, *small)
    per_token = expected.step_time_s / (spec.training.global_batch * spec.training.seq_len)
    return (kind, expected.p_oom > MAX_P_OOM_TO_FIT, per_token, *small)


def group_name(
    explicit_name: str | None, kind: str, recipe: str, request: Request, *content: object
) -> str:
    """Return the given name, or one derived from the request so that a rerun finds its runs."""
    if explicit_name is None:
        # A rerun may be in another allocation.
        where = replace(request.where, allocation=None)
        place = (request.devices, request.device, request.cluster, where)
        digest = hashlib.sha256(repr((*content, place)).encode()).hexdigest()[:4]
        parts = filter(None, (recipe, request.variant, kind, digest))
        return "-".join(re.sub(r"[^A-Za-z0-9._]+", "-", part).strip("-.") for part in parts)
    if not _NAME.fullmatch(explicit_name) or explicit_name == "last":
        raise UserError(
            f"--name {explicit_name}",
            "is not a valid name",
            allowed="letters, digits, . _ and -, but not `last`",
        )
    return explicit_name


def _runs_in_queue(plans: Sequence[Plan]) -> bool:
    """Return whether each run is a job on nodes that Slurm chooses."""
    clusters = [plan.spec.cluster for plan in plans]
    return bool(clusters) and all(cluster.scheduler_picks_hosts for cluster in clusters)
