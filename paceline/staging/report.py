"""Documents about staged assets: what is to be fetched, what was verified, copies on nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.units import pluralize, seconds, si
from paceline.files.staged import CONTENT_FOLDER
from paceline.report.document import Column, Document, Notes, Table, Verdict
from paceline.staging.node_copies import NodeOutcome
from paceline.staging.plan import (
    REMEDY,
    DiskSpace,
    PlannedAsset,
    StagingPlan,
    space_shortage,
)
from paceline.staging.verification import StageFault

MEGA = 1e6
REVISION_DIGITS = 12
"""Digits of a commit hash in the table; JSON has all."""


def plan_document(
    plan: StagingPlan, space: DiskSpace, rate: float | None, copies_to: str = ""
) -> Document:
    """Describe the assets of a recipe, their state, and what is left to fetch.

    `rate` is the bandwidth in MB/s for the download times. `copies_to` says where the assets would
    be copied afterwards.
    """
    is_staged = all(part.state == "staged" for part in plan.assets)
    shortage = space_shortage(plan, space)
    columns = [
        Column("name", "asset"),
        Column("kind", "kind"),
        Column("bytes", "size", _size, "right"),
        *([Column("seconds", "time", seconds, "right")] if rate else []),
        Column("state", "state"),
        Column("revision", "revision", lambda value: value[:REVISION_DIGITS]),
        Column("source", "source", wraps=True),
    ]
    rows = [_row(part, rate) for part in plan.assets]
    return Document(
        kind="staged assets",
        title=plan.recipe.name,
        verdict=Verdict("staged", "good") if is_staged else Verdict("not staged", "plain"),
        setup=(str(plan.root),),
        answer=(_answer(plan, space, rate),),
        sections=(
            Table(columns=columns, rows=rows),
            Notes(lines=[line for part in plan.assets for line in _asset_notes(part)]),
        ),
        notes=(
            *([f"{plan.root}: {shortage}; {REMEDY}"] if shortage else []),
            *([f"staging would then copy the assets to {copies_to}"] if copies_to else []),
        ),
        source=str(plan.root),
        data=_data(plan, space, rate),
    )


def verification_document(
    plan: StagingPlan, states: Mapping[str, str], faults: Sequence[StageFault]
) -> Document:
    """Describe the state of each asset after its files were read, and every fault."""
    rows = [{"asset": fault.asset, "fault": fault.fault, "path": fault.path} for fault in faults]
    num_verified = sum(state == "verified" for state in states.values())
    is_complete = num_verified == len(states)
    others = [f"{name} is {state}" for name, state in states.items() if state != "verified"]
    return Document(
        kind="verification of staged assets",
        title=plan.recipe.name,
        verdict=Verdict("verified", "good") if is_complete else Verdict("incomplete", "alert"),
        setup=(str(plan.root),),
        answer=(
            f"{num_verified:,} of {pluralize(len(states), 'asset')} verified"
            + "".join(f"; {other}" for other in others)
            + ".",
        ),
        sections=(
            Table(columns=[Column(name, name) for name in ("asset", "fault", "path")], rows=rows),
        ),
        notes=()
        if is_complete
        else (f"run `paceline recipes stage {plan.recipe.name}` to repair it",),
        source=str(plan.root),
        data={"recipe": plan.recipe.name, "states": states, "faults": rows},
    )


def nodes_document(
    plan: StagingPlan, space: DiskSpace, folder: str, outcomes: Sequence[NodeOutcome]
) -> Document:
    """Describe the copies of the assets in `folder` on the local disk of each node."""
    rows = _node_rows(plan, outcomes)
    num_staged = sum(row["state"] == "staged" for row in rows)
    columns = [
        Column("host", "host"),
        Column("state", "state"),
        Column("copied", "copied", lambda names: ", ".join(names) or "-"),
        Column("transfer", "transfer"),
        Column("bytes_copied", "size", _size, "right"),
        Column("seconds", "time", seconds, "right"),
        Column("fault", "fault"),
        Column("remedy", "remedy", wraps=True),
    ]
    faults = [
        f"{row['host']}: {fault['asset']}: {fault['path']} is {fault['fault']}"
        for row in rows
        for fault in row["faults"]
    ]
    is_complete = num_staged == len(rows)
    return Document(
        kind="staged assets on nodes",
        title=plan.recipe.name,
        verdict=Verdict("staged", "good") if is_complete else Verdict("incomplete", "alert"),
        setup=(folder,),
        answer=(f"All assets are staged on {num_staged:,} of {pluralize(len(rows), 'node')}.",),
        sections=(Table(columns=columns, rows=rows), Notes(lines=faults)),
        source=folder,
        data={**_data(plan, space, None), "local": folder, "nodes": rows},
    )


def _data(plan: StagingPlan, space: DiskSpace, rate: float | None) -> dict[str, Any]:
    return {
        "recipe": plan.recipe.name,
        "engine": plan.engine,
        "folder": str(plan.root),
        "assets": [_row(part, rate) for part in plan.assets],
        "bytes_needed": plan.bytes_needed,
        "bytes_unknown": list(plan.unknown),
        "bytes_free": space.bytes_free,
        "files_needed": plan.files_needed,
        "files_free": space.files_free,
        "space_shortage": space_shortage(plan, space),
        "seconds": plan.bytes_fetched / (rate * MEGA) if rate else None,
    }


def _row(part: PlannedAsset, rate: float | None) -> dict[str, Any]:
    asset, remaining_bytes = part.asset, part.missing_bytes
    fetched_bytes = None if asset.kind == "made" else remaining_bytes
    return {
        "name": asset.name,
        "kind": asset.kind,
        "source": asset.source,
        "revision": asset.revision,
        "bytes": part.total_bytes,
        "digest": asset.digest,
        "needs": list(asset.needs),
        "engines": list(asset.engines),
        "gate": asset.gate,
        "note": asset.note,
        "state": part.state,
        "bytes_left": remaining_bytes,
        "seconds": fetched_bytes / (rate * MEGA) if rate and fetched_bytes is not None else None,
        "path": str(part.folder / CONTENT_FOLDER),
    }


def _node_rows(plan: StagingPlan, outcomes: Sequence[NodeOutcome]) -> list[dict[str, Any]]:
    names = {part.folder.name: part.asset.name for part in plan.assets}
    return [
        {
            "host": outcome.host,
            "state": outcome.state,
            "assets": {names[folder]: state for folder, state in outcome.assets.items()},
            "copied": [names[folder] for folder in outcome.copied_assets],
            "transfer": outcome.transfer,
            "faults": [
                {"asset": names[folder], "fault": fault, "path": path}
                for folder, path, fault in outcome.faults
            ],
            "bytes_copied": outcome.bytes_copied,
            "seconds": outcome.seconds,
            "fault": outcome.fault,
            "remedy": outcome.remedy,
        }
        for outcome in outcomes
    ]


def _answer(plan: StagingPlan, space: DiskSpace, rate: float | None) -> str:
    if not plan.assets:
        of_engine = f" for engine {plan.engine}" if plan.engine and plan.recipe.assets else ""
        return f"{plan.recipe.name} declares no assets{of_engine}."
    if all(part.state == "staged" for part in plan.assets):
        return "All assets are staged."
    need, download_bytes, unknown = plan.bytes_needed, plan.bytes_fetched, len(plan.unknown)
    missing = sum(part.state != "staged" for part in plan.assets)
    parts = [f"{missing:,} of {pluralize(len(plan.assets), 'asset')} to stage"]
    if need:
        download = f"{si(download_bytes, 'B')} to fetch"
        parts.append(download if download_bytes == need else f"{si(need, 'B')} needed, {download}")
    if unknown:
        hint = "" if need else " (see --query-sizes)"
        parts.append(f"{unknown:,} without a stated size{hint}")
    if rate and download_bytes:
        least = "at least " if unknown else ""
        parts.append(f"{least}{seconds(download_bytes / (rate * MEGA))} at {rate:g} MB/s")
    return "; ".join([*parts, f"{si(space.bytes_free, 'B')} free"]) + "."


def _asset_notes(part: PlannedAsset) -> list[str]:
    """Return where to request access to an asset, and how to get one without a stated size."""
    asset = part.asset
    lines = []
    if asset.gate and part.state != "staged":
        lines.append(f"{asset.name}: request access at {asset.gate}")
    if asset.note and part.missing_bytes is None:
        lines.append(f"{asset.name}: {asset.note}")
    return lines


def _size(num_bytes: int) -> str:
    return si(num_bytes, "B")
