"""Differences between two runs: work, settings, inputs, programs, environment."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from paceline.compare.comparability import COMPARED_SETTINGS
from paceline.compare.over_time.environment import environment_changes, item_name
from paceline.compare.over_time.repeats import IGNORED_SETTINGS, flat_settings
from paceline.core.assets import RunInput, RunInputs
from paceline.core.run import RunSpec
from paceline.core.run_report import RunReport
from paceline.core.value import Value
from paceline.files.documents import read_value
from paceline.files.inputs import INPUTS_FILE
from paceline.runs.run_environment import recorded_environment

DifferenceKind = Literal["work", "setting", "input", "program", "environment"]
"""Kinds of differences, the one that usually matters most first."""

NOT_STATED = "not stated"
_OF_FACTS = ("model", "lora", "layout")
"""Sections of a spec that have the same names in RunSettings."""
_FACT_OF = {
    "training.seq_len": "seq_len",
    "training.global_batch": "global_batch",
    "training.dtype": "dtype",
    "training.matmul_precision": "matmul_precision",
    "training.total_tokens": "total_tokens",
    "data.source": "data",
    "data.packing": "packing",
    "data.loss_on": "loss_on",
    "data.document_mask": "document_mask",
    "training.routing": "routing",
    "data.real_tokens_per_sample": "real_tokens_per_sample",
    "cluster.device": "device",
    "cluster.device_label": "device_label",
}
"""Settings of a spec that have other names in RunSettings."""
_NO_WORK = frozenset({"recipe", "variant", "origin", "flops_convention", "nominal_parameters"})
"""Settings that only name a run or say how its FLOPs are counted."""
_LABELS = ("recipe", "variant", "time_limit_s", "hang_limit_s", "mlperf", *IGNORED_SETTINGS)
_PROGRAM = "trainer"
"""Item of the environment that is the run's program."""


class RunDifference(Value):
    """One difference between two runs, as text."""

    kind: DifferenceKind
    item: str
    a: str
    b: str


class RunDiff(Value):
    """All recorded differences between two runs, the most important kind first."""

    a: str
    b: str
    differences: tuple[RunDifference, ...]
    recorded_once: tuple[str, ...]
    """Items that only one run recorded: whether they differ is unknown."""


def run_diff(a: RunReport, b: RunReport) -> RunDiff:
    """Return the differences between two runs."""
    inputs = read_inputs(Path(a.folder)), read_inputs(Path(b.folder))
    both = inputs[0].keys() & inputs[1].keys()
    alike = {field for field in both if inputs[0][field].is_alike(inputs[1][field])}
    surroundings, once = _surroundings(a, b)
    differences = (
        *_work(a, b),
        *_settings(a.spec, b.spec, alike),
        *_inputs(*inputs, alike),
        *(part for part in surroundings if part.kind == "program"),
        *_script(a.job_script, b.job_script),
        *(part for part in surroundings if part.kind != "program"),
        *_hosts(a, b),
    )
    once = (*(f"input {field}" for field in sorted(inputs[0].keys() ^ inputs[1].keys())), *once)
    return RunDiff(a=a.result.run, b=b.result.run, differences=differences, recorded_once=once)


def read_inputs(folder: Path) -> dict[str, RunInput]:
    """Return a run's inputs by recipe field; empty if none were recorded."""
    file = folder / INPUTS_FILE
    if not os.path.lexists(file):
        return {}
    return {part.field: part for part in read_value(file, RunInputs).inputs}


def _work(a: RunReport, b: RunReport) -> Iterator[RunDifference]:
    """Return differing settings that define the work, in the order of a comparison's keys."""
    ours, theirs = flat_settings(a.facts), flat_settings(b.facts)
    order = list(COMPARED_SETTINGS)
    names = [name for name in {**ours, **theirs} if name not in _NO_WORK]
    names.sort(key=lambda name: order.index(key) if (key := _key(name)) in order else len(order))
    yield from _differing("work", names, ours, theirs)


def _key(fact: str) -> str:
    return "recompute" if fact == "layout.recompute" else fact.partition(".")[0]


def _settings(
    a: RunSpec | None, b: RunSpec | None, alike: Iterable[str]
) -> Iterator[RunDifference]:
    """Return other differing settings; a path does not differ if its content is the same."""
    if a is None or b is None:
        return
    ours, theirs = flat_settings(a), flat_settings(b)
    left_out = {*_FACT_OF, *alike, "engine", "flops_convention", "nominal_parameters"}
    names = [
        name
        for name in {**ours, **theirs}
        if name not in left_out
        and name.partition(".")[0] not in _OF_FACTS
        and not name.startswith(_LABELS)
    ]
    yield from _differing("setting", names, ours, theirs)


def _differing(
    kind: DifferenceKind, names: Iterable[str], ours: Mapping[str, str], theirs: Mapping[str, str]
) -> Iterator[RunDifference]:
    for name in names:
        a, b = ours.get(name, NOT_STATED), theirs.get(name, NOT_STATED)
        if a != b:
            yield RunDifference(kind=kind, item=name, a=a, b=b)


def _inputs(
    ours: Mapping[str, RunInput], theirs: Mapping[str, RunInput], alike: Iterable[str]
) -> Iterator[RunDifference]:
    """Return inputs of both runs that differ, or that may differ."""
    for field in ours:
        other = theirs.get(field)
        if other is not None and field not in alike:
            a, b = ours[field].identity, other.identity
            yield RunDifference(kind="input", item=field, a=a, b=b)


def _surroundings(a: RunReport, b: RunReport) -> tuple[list[RunDifference], tuple[str, ...]]:
    items = [recorded_environment(Path(r.folder), r.result) for r in (a, b)]
    changes = environment_changes(items[:1], items[1:])
    differing = [
        RunDifference(
            kind="program" if change.item == item_name(_PROGRAM) else "environment",
            item=change.item,
            a=change.before,
            b=change.after,
        )
        for change in changes
    ]
    differing_items = {part.item for part in differing}
    once = [item_name(name) for name in items[0].keys() ^ items[1].keys()]
    return differing, tuple(sorted({name for name in once if name not in differing_items}))


def _script(a: str, b: str) -> Iterator[RunDifference]:
    """Return the first differing line of the two scripts and the number of further ones."""
    pairs = zip_longest(a.splitlines(), b.splitlines(), fillvalue="")
    lines = [pair for pair in pairs if pair[0] != pair[1]] if a and b else []
    if lines:
        more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
        item = f"line of job.sh{more}"
        yield RunDifference(kind="program", item=item, a=lines[0][0], b=lines[0][1])


def _hosts(a: RunReport, b: RunReport) -> Iterator[RunDifference]:
    """Return differing hosts of runs on several hosts; the inventory covers only the first."""
    ours, theirs = (sorted({rank.host for rank in r.result.ranks}) for r in (a, b))
    if ours != theirs and ours and theirs and max(len(ours), len(theirs)) > 1:
        texts = ", ".join(ours), ", ".join(theirs)
        yield RunDifference(kind="environment", item="hosts of the ranks", a=texts[0], b=texts[1])
