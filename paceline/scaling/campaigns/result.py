"""Result of a scaling test: the analysis, every sub-cluster, and what could not be measured."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from paceline.core.hosts import compress
from paceline.core.units import pluralize
from paceline.core.value import NonNegativeInt, PositiveInt, Value
from paceline.scaling.analysis.analysis import Analysis, AnalysisContext, analyse
from paceline.scaling.analysis.result import ScaleResult, scale_result
from paceline.scaling.campaigns.record import Campaign, Group, PlannedRound, TrialResult, measured

LAMBDA_HEAD = ("Hostnames", "Throughput (samples/sec)", "Status")
FAILED = -1
COLUMNS = (
    "round",
    "purpose",
    "nodes",
    "gpus_per_node",
    "hosts",
    "samples_per_s",
    "spread",
    "n",
    "step_time_s",
    "global_batch",
    "scaling",
    "status",
    "reason",
    "started_unix",
    "ended_unix",
    "run",
)


class PartResult(Value):
    """A part of a node's devices, relative to the median node with all devices."""

    devices: PositiveInt
    n: PositiveInt
    """Number of runs with a value."""
    value: float
    """Samples/s: the geometric mean of the runs."""
    spread: float | None
    """Relative standard deviation between the runs."""
    efficiency: float | None
    """value / (devices x base per device)."""


class CampaignResult(ScaleResult):
    """Output of `paceline scale RECIPE --json`, also stored as scale.json."""

    schema_version: int = 1
    campaign: str
    recipe: str
    variant: str | None
    devices_per_node: PositiveInt
    below_one_node: tuple[PartResult, ...] = ()
    runs: tuple[TrialResult, ...]
    """Every sub-cluster that was run, in order."""
    excluded_hosts: dict[str, str] = {}
    """Hosts that were excluded from later rounds, with the reason."""
    sizes_without_value: tuple[PositiveInt, ...] = ()
    """Planned sizes for which no sub-cluster has a value."""
    missing: NonNegativeInt
    """Number of planned sub-clusters that were not run."""
    interrupted: bool = False
    resume: str | None = None
    """The command that measures the missing sub-clusters."""


def campaign_analysis(
    campaign: Campaign, trials: Iterable[TrialResult], context: AnalysisContext
) -> Analysis:
    """Analyse all trials on whole nodes.

    Raises UserError when none has a value.
    """
    groups = measured(trials, campaign.whole_node)
    return analyse(groups, replace(context, scaling=campaign.scaling, split=campaign.split))


def campaign_result(
    campaign: Campaign,
    trials: Sequence[TrialResult],
    analysis: Analysis,
    *,
    excluded_hosts: Mapping[str, str],
    unplaced_hosts: Mapping[int, Group],
    missing: int,
    interrupted: bool,
    resume: str | None,
) -> CampaignResult:
    """Return the result that is printed and stored."""
    notes = [
        *left_over_notes(campaign.plan),
        *_failures(trials),
        *_exclusion_notes(excluded_hosts, unplaced_hosts),
    ]
    result = scale_result(analysis, notes)
    return CampaignResult(
        **{name: getattr(result, name) for name in ScaleResult.model_fields},
        campaign=campaign.name,
        recipe=campaign.recipe,
        variant=campaign.variant,
        devices_per_node=campaign.whole_node,
        below_one_node=tuple(_parts(campaign, trials, analysis)),
        runs=tuple(sorted(trials, key=lambda trial: (trial.round, trial.hosts))),
        excluded_hosts=dict(excluded_hosts),
        sizes_without_value=tuple(
            size for size in campaign.sizes if size not in {row.nodes for row in result.sizes}
        ),
        missing=missing,
        interrupted=interrupted,
        resume=resume,
    )


def lambda_csv(
    trials: Iterable[TrialResult], whole_node: int, min_per_node: float | None = None
) -> str:
    """Return host names, samples/s and Success or Fail, in the format of Lambda's eval_batch.py.

    `min_per_node` is the samples/s per node below which a value is a Fail; None accepts every
    value. Only planned sub-clusters of whole nodes are included, because the format has no column
    to distinguish others.
    """
    rows = [
        (
            ", ".join(trial.hosts),
            f"{trial.samples_per_s:.4f}" if trial.samples_per_s else FAILED,
            "Success" if _is_enough(trial, min_per_node) else "Fail",
        )
        for trial in trials
        if trial.purpose == "plan" and trial.devices_per_node == whole_node
    ]
    return _csv(LAMBDA_HEAD, rows)


def _is_enough(trial: TrialResult, min_per_node: float | None) -> bool:
    value = trial.samples_per_s
    return value is not None and value >= (min_per_node or 0.0) * trial.nodes


def trials_csv(trials: Iterable[TrialResult], scaling: str) -> str:
    """Return all data of every sub-cluster as CSV; `paceline scale --from` reads it."""
    rows: list[list[object]] = []
    for trial in trials:
        cells = {
            **trial.model_dump(),
            "gpus_per_node": trial.devices_per_node,
            "scaling": scaling,
            "hosts": ", ".join(trial.hosts),
        }
        rows.append([cells[name] for name in COLUMNS])
    return _csv(COLUMNS, rows)


def _csv(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return buffer.getvalue()


def _parts(
    campaign: Campaign, trials: Sequence[TrialResult], analysis: Analysis
) -> Iterator[PartResult]:
    for devices in campaign.devices_per_node[:-1]:
        values = [t.samples_per_s for t in trials if t.devices_per_node == devices]
        logs = np.log([value for value in values if value])
        if not len(logs):
            continue
        value = float(np.exp(logs.mean()))
        yield PartResult(
            devices=devices,
            n=len(logs),
            value=value,
            spread=float(logs.std(ddof=1)) if len(logs) > 1 else None,
            efficiency=value / (devices * analysis.base / campaign.whole_node),
        )


def left_over_notes(rounds: Sequence[PlannedRound]) -> Iterator[str]:
    """Yield a note for each size whose hosts did not all fit into one planned round."""
    first_rounds = [round_ for round_ in rounds if round_.purpose == "plan" and not round_.made_up]
    for size in sorted({round_.nodes for round_ in first_rounds}):
        hosts = sorted(
            {h for round_ in first_rounds if round_.nodes == size for h in round_.left_over}
        )
        if hosts:
            names = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
            yield (
                f"Groups of {size} do not cover all hosts; left over in one round and measured in "
                f"another: {names}."
            )


def _failures(trials: Sequence[TrialResult]) -> Iterator[str]:
    """Yield every cause of a missing value once, with its sub-clusters."""
    causes: dict[str, list[TrialResult]] = {}
    for trial in trials:
        if not trial.ok:
            causes.setdefault(trial.reason or trial.status, []).append(trial)
    for why, failed in causes.items():
        names = "; ".join(dict.fromkeys(compress(trial.hosts) for trial in failed[:4]))
        more = f" and {len(failed) - 4} more" if len(failed) > 4 else ""
        yield f"No value for {names}{more}: {why.rstrip('.')}."


def _exclusion_notes(
    excluded_hosts: Mapping[str, str], unplaced_hosts: Mapping[int, Group]
) -> Iterator[str]:
    if excluded_hosts:
        yield f"Excluded from later rounds: {compress(sorted(excluded_hosts))}."
    rounds = [number for number, hosts in sorted(unplaced_hosts.items()) if hosts]
    if rounds:
        hosts = sorted({host for number in rounds for host in unplaced_hosts[number]})
        where = pluralize(len(rounds), "round")
        yield f"Left without partners in {where} as a result: {compress(hosts)}."
