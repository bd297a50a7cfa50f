"""From a recipe and what varies to the runs of a sweep: which can run, and in which order."""

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
from paceline.estimate.calibrate.lookup import GivenEvidence
from paceline.estimate.estimates import MAX_P_OOM_TO_FIT, MAX_P_OOM_TO_RUN
from paceline.files.recipe import full_key, load_recipe
from paceline.layouts.sweep.prediction import hopeless, predict
from paceline.layouts.sweep.result import Prediction
from paceline.machines.placement import Request, find_device
from paceline.machines.probe.inventory import inventory
from paceline.runs.compilation import COMPILE, equally_compiled
from paceline.runs.plan import Plan, make_plan
from paceline.runs.tasks.division import divide
from paceline.runs.tasks.slot import JobSlot

SHORT = {
    **{axis: f"layout.{axis}" for axis in AXIS_FIELDS},
    "zero": "layout.zero_stage",
    "mbs": "layout.micro_batch",
    "recompute": "layout.recompute",
    "gbs": "training.global_batch",
}
"""Options with a name of their own, and the field that each sets."""
MOST = 2000
"""Combinations that one sweep takes."""
_OPEN, _CLOSE, _QUOTES = "[{(", "]})", "\"'"


@dataclass(frozen=True)
class Dimension:
    """One field, and its values as they are written after `--set field=`."""

    field: str
    values: tuple[str, ...]
    option: str | None = None
    """The option of its own that its values were given by; None is `--set`."""

    def typed(self, value: str) -> str:
        """One of its values as it was asked for: `--tp 4`, `--set layout.vp=2`."""
        return f"{self.option} {value}" if self.option else f"--set {self.field}={value}"

    @property
    def short(self) -> str:
        """How a person names it: `mbs`, else the field's last name."""
        names = {field: name for name, field in SHORT.items()}
        return names.get(self.field, self.field.rpartition(".")[2])


def dimensions(
    named: Mapping[str, str | None], overrides: Iterable[str]
) -> tuple[tuple[Dimension, ...], tuple[str, ...]]:
    """(what varies, the overrides that do not).

    `named` are the options of SHORT with their text. A value with commas is a list of values; what
    stands in brackets, braces or quotes is one of them. Raises UserError for no list at all, a
    field given twice, an empty value, or too many combinations.
    """
    lists: list[tuple[str, str, str, str | None]] = [
        (f"--{name}", SHORT[name], text, f"--{name}")
        for name, text in named.items()
        if text is not None
    ]
    varied: dict[str, Dimension] = {}
    fixed: list[str] = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or len(split_list(value)) < 2:
            fixed.append(text)
        else:
            lists.append((f"--set {text}", full_key(key.strip()), value, None))
    for where, name, text, option in lists:
        if name in varied:
            raise UserError(where, f"{name} is given twice", remedy="put its values in one list")
        values = tuple(dict.fromkeys(split_list(text)))
        if "" in values:
            raise UserError(where, "has an empty value", allowed="values separated by commas")
        varied[name] = Dimension(name, values, option)
    _check(varied.values())
    return tuple(varied.values()), tuple(fixed)


def combinations(varied: Sequence[Dimension]) -> Iterator[dict[str, str]]:
    """Every combination as field -> value, the last dimension changing fastest."""
    fields = [dimension.field for dimension in varied]
    for values in product(*(dimension.values for dimension in varied)):
        yield dict(zip(fields, values, strict=True))


def split_list(text: str) -> list[str]:
    """The parts between commas outside of brackets, braces and quotes: `1,[2,3]` has two."""
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


def _check(varied: Collection[Dimension]) -> None:
    sizes = [len(dimension.values) for dimension in varied]
    if not sizes or max(sizes) < 2:
        given = ", ".join(f"{dimension.short} {dimension.values[0]}" for dimension in varied)
        raise UserError(
            "paceline sweep",
            "is told nothing to vary" + (f": {given} is one value each" if given else ""),
            allowed=f"lists for {', '.join(f'--{name}' for name in SHORT)} or --set",
            remedy="for example --tp 1,2 --mbs 1,2,4",
        )
    if prod(sizes) > MOST:
        raise UserError(
            "paceline sweep", f"asks for {prod(sizes):,} combinations", allowed=f"at most {MOST:,}"
        )


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
RAMP_UP = "training.ramp_up"


@dataclass(frozen=True)
class SweepOptions:
    """What the user asked for; the request holds the overrides that do not vary."""

    request: Request
    dimensions: tuple[Dimension, ...]
    repeats: int = 1
    name: str | None = None
    prune: bool = True
    nodes_per_trial: int | None = None
    """None and no max_parallel: everything that was asked for belongs to one run at a time."""
    max_parallel: int | None = None
    prune_above: float = MAX_P_OOM_TO_RUN
    """Probability of running out of memory above which a combination is not run."""
    stack: str | None = None
    """Software whose times and memory are expected; None is that of the recipe's engine."""


@dataclass(frozen=True)
class Choice:
    """One combination: its plan, or why it has none."""

    settings: dict[str, str]
    layout: Layout
    plan: Plan | None = None
    refused: str | None = None
    pruned: str | None = None
    prediction: Prediction | None = None

    @property
    def runs(self) -> bool:
        """Whether it is to be run."""
        return self.plan is not None and self.pruned is None


@dataclass(frozen=True)
class Sweep:
    """All combinations, those that run first and in their order."""

    name: str
    recipe: str
    variant: str | None
    dimensions: tuple[Dimension, ...]
    choices: tuple[Choice, ...]
    repeats: int = 1
    notices: tuple[str, ...] = field(default=())
    slots: tuple[JobSlot, ...] = (JobSlot(1),)
    """Where runs take place, one at a time on each."""
    queued: bool = False
    """Whether they go through Slurm's queue, as arrays."""
    at_once: int | None = None
    """How many of an array may run at the same time."""
    stack: str | None = None
    """Software whose times and memory are expected, where it was asked for."""

    def group(self, plan: Plan) -> str:
        """The group of repeats that the runs of one combination belong to."""
        return f"{self.name}-{plan.spec.key}"


def new_sweep(options: SweepOptions, given: GivenEvidence | None) -> Sweep:
    """The sweep that was asked for; nothing is run or written. `given` as in `predict`.

    Raises UserError when a value is none that its field takes; a combination that cannot run is a
    choice with its reason.
    """
    request, notices = steady_batch(options.request)
    recipe = load_recipe(request.recipe, request.variant, request.overrides)
    for dimension in options.dimensions:
        _check_values(request, dimension)
    place = divide(request, recipe, inventory(), options.nodes_per_trial, options.max_parallel)
    machine = place.inventory
    request = _on_equal_devices(place.request, options.dimensions, machine)
    choices = _without_twins(_choices(request, options.dimensions, machine))
    plans = [choice.plan for choice in choices if choice.plan]
    notices += [*place.notices, *(notice for plan in plans for notice in plan.notices)]
    choices, unpredicted = _predicted(choices, given, options)
    notices += unpredicted
    return Sweep(
        name=_name(options, recipe.name),
        recipe=recipe.name,
        variant=request.variant,
        dimensions=options.dimensions,
        choices=_ordered(choices),
        repeats=options.repeats,
        notices=tuple(dict.fromkeys(notices)),
        slots=place.slots,
        queued=place.queued or _queued([choice.plan for choice in choices if choice.plan]),
        at_once=options.max_parallel,
        stack=options.stack,
    )


def _check_values(request: Request, dimension: Dimension) -> None:
    """Raises UserError, which names the option that was typed, for a value that no field takes."""
    for value in dimension.values:
        changes = (*request.overrides, f"{dimension.field}={value}")
        try:
            load_recipe(request.recipe, request.variant, changes)
        except UserError as error:
            what = error.what.removeprefix(f"{dimension.field}: ")
            raise UserError(
                dimension.typed(value), what, allowed=error.allowed, remedy=error.remedy
            ) from error


def steady_batch(request: Request) -> tuple[Request, list[str]]:
    """The request without the recipe's ramp-up, unless that was asked for, and a notice of it.

    Layouts are compared at one batch; and early, small batches forbid many of them.
    """
    recipe = load_recipe(request.recipe, request.variant, request.overrides)
    keys = [full_key(text.partition("=")[0].strip()) for text in request.overrides]
    if recipe.training.ramp_up is None or any(key.startswith(RAMP_UP) for key in keys):
        return request, []
    changed = replace(request, overrides=(*request.overrides, f"{RAMP_UP}=null"))
    return changed, ["measured at the whole batch, without the recipe's ramp-up"]


def _on_equal_devices(
    request: Request, varied: Sequence[Dimension], machine: dict[str, Any]
) -> Request:
    """The request with one number of devices for all: what the largest that can run takes."""
    settled = request.devices is not None or request.cluster is not None
    if settled or any(dimension.field == "devices" for dimension in varied):
        return request
    plans = [_choice(request, settings, machine).plan for settings in combinations(varied)]
    counts = {plan.spec.cluster.devices_per_node for plan in plans if plan}
    return replace(request, devices=max(counts)) if len(counts) > 1 else request


def _choices(
    request: Request, varied: Sequence[Dimension], machine: dict[str, Any]
) -> list[Choice]:
    """Every combination, all with blocks compiled or none, unless it was said what is."""
    choices = [_choice(request, settings, machine) for settings in combinations(varied)]
    if any(dimension.field == COMPILE for dimension in varied):
        return choices
    specs = [choice.plan.spec for choice in choices if choice.plan]
    equal = equally_compiled(request, specs)
    return _choices(equal, varied, machine) if equal else choices


def _choice(request: Request, settings: dict[str, str], machine: dict[str, Any]) -> Choice:
    overrides = (*request.overrides, *(f"{key}={value}" for key, value in settings.items()))
    layout = load_recipe(request.recipe, request.variant, overrides).layout
    try:
        plan = make_plan(replace(request, overrides=overrides), machine)
        return Choice(settings, layout, plan)
    except UserError as error:
        return Choice(settings, layout, refused=error.what)


def _without_twins(choices: Sequence[Choice]) -> list[Choice]:
    """The choices, those that would run what another one runs refused."""
    seen: set[str] = set()
    kept: list[Choice] = []
    for choice in choices:
        key = choice.plan.spec.key if choice.plan else None
        if key in seen:
            choice = replace(choice, plan=None, refused="runs the same as another")
        kept.append(choice)
        seen |= {key} if key else set()
    return kept


def _predicted(
    choices: Sequence[Choice], given: GivenEvidence | None, options: SweepOptions
) -> tuple[list[Choice], list[str]]:
    """(the choices with their predictions, hopeless ones marked; why there are none)."""
    planned = [choice for choice in choices if choice.plan]
    specs = [choice.plan.spec for choice in planned if choice.plan]
    if not specs:
        return list(choices), []
    if given:  # A file that does not fit is refused, where rates that are missing are a notice.
        given.of(specs[0].cluster.device, specs[0].training.dtype)
    try:
        predictions = predict(specs, given, options.stack)
    except UserError as error:
        if options.stack:
            raise
        return list(choices), [f"no expected times: {error.where} {error.what}"]
    cluster, device = specs[0].cluster, find_device(specs[0].cluster.device)
    size = cluster.device_memory_bytes or (device and device.memory_bytes)
    limit = None if specs[0].memory_limit_bytes else size
    above = options.prune_above
    pruned = _not_worth(specs, predictions, limit, above) if options.prune else []
    reasons = pruned or [None] * len(specs)
    predicted = [
        replace(choice, prediction=prediction, pruned=reason)
        for choice, prediction, reason in zip(planned, predictions, reasons, strict=True)
    ]
    return [*predicted, *(choice for choice in choices if not choice.plan)], []


def _not_worth(
    specs: Sequence[RunSpec],
    predictions: Sequence[Prediction],
    limit_bytes: float | None,
    prune_above: float,
) -> list[str | None]:
    """Why each is not worth a run, among those that do the same on as many devices."""
    kinds = [(spec.model, spec.lora, spec.training.seq_len, spec.world_size) for spec in specs]
    reasons: dict[int, str | None] = {}
    for kind in dict.fromkeys(kinds):
        rows = [row for row, row_kind in enumerate(kinds) if row_kind == kind]
        tokens = [specs[row].training.global_batch * specs[row].training.seq_len for row in rows]
        why = hopeless([predictions[row] for row in rows], tokens, limit_bytes, prune_above)
        reasons.update(zip(rows, why, strict=True))
    return [reasons[row] for row in range(len(specs))]


def _ordered(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """By expected time, those that may run out of memory last; small first where none is known."""
    return tuple(sorted(choices, key=_place))


def _place(choice: Choice) -> tuple[float, ...]:
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


def _name(options: SweepOptions, recipe: str) -> str:
    """As asked for, else of what is fixed and what varies: longer lists find the same runs."""
    if options.name is None:
        request = options.request
        # The same sweep goes on in another allocation.
        where = replace(request.where, allocation=None)
        place = (request.devices, request.device, request.cluster, where)
        fields = sorted(dimension.field for dimension in options.dimensions)
        content = (request.overrides, fields, place)
        digest = hashlib.sha256(repr(content).encode()).hexdigest()[:4]
        parts = filter(None, (recipe, request.variant, "sweep", digest))
        return "-".join(re.sub(r"[^A-Za-z0-9._]+", "-", part).strip("-.") for part in parts)
    if not _NAME.fullmatch(options.name) or options.name == "last":
        raise UserError(
            f"--name {options.name}",
            "cannot name a sweep",
            allowed="letters, digits, . _ and -, but not `last`",
        )
    return options.name


def _queued(plans: Sequence[Plan]) -> bool:
    """Whether the runs are jobs of their own on nodes that Slurm chooses."""
    clusters = [plan.spec.cluster for plan in plans]
    return bool(clusters) and all(cluster.scheduler_picks_hosts for cluster in clusters)
