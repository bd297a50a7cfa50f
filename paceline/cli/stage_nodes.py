"""`paceline stage --local`: what is staged here, on the disks of other nodes too."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from paceline.cli.output import OutputColumn, TableFormat, emit_table
from paceline.cli.stage_progress import stage_display
from paceline.cli.terminal import echo
from paceline.core.errors import EXIT_GATE_FAILED, EXIT_SYSTEM_FAULT, UserError
from paceline.core.hardware import Cluster
from paceline.core.units import counted, seconds, si
from paceline.files import catalog
from paceline.files.staged import unstaged
from paceline.machines.placement import Where, placed
from paceline.staging.node_copies import (
    NodeOrder,
    NodeOutcome,
    NodeShell,
    node_shells,
    on_nodes,
)
from paceline.staging.plan import StagingPlan

Local = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER",
        help="Stage here, then copy it to this folder on the own disk of every node that --hosts, "
        "--allocation or --cluster names; with --verify read it again there.",
    ),
]


@dataclass(frozen=True)
class NodeTarget:
    """Nodes, and the folder on each of them."""

    shells: tuple[NodeShell, ...]
    local: str

    def __str__(self) -> str:
        return f"{self.local} on {counted(len(self.shells), 'node')}"


def node_target(local: str | None, cluster: str | None, where: Where) -> NodeTarget | None:
    """Where copies are asked for; None where nodes are not spoken of.

    Raises UserError for a folder or nodes that are not named, as `node_shells` does for the latter.
    """
    if local is None and cluster is None and not (where.hosts or where.allocation):
        return None
    if cluster is None and not where.hosts and where.launcher is None:
        where = replace(where, allocation=where.allocation or os.environ.get("SLURM_JOB_ID"))
    plain = Cluster(name="nodes", device="cpu", devices_per_node=1)
    nodes = placed(catalog.cluster(cluster) if cluster else plain, where)
    folder = local or nodes.stage
    if folder is None:
        raise UserError(
            "nodes",
            "are named, and no folder on them",
            remedy="--local FOLDER, or `stage:` in the file of the cluster",
        )
    if not folder.startswith("/"):
        raise UserError(f"--local {folder}", "must be an absolute path, the same on all nodes")
    return NodeTarget(node_shells(nodes, where.nodes), folder)


def copy_to_nodes(plan: StagingPlan, target: NodeTarget, verify: bool) -> tuple[NodeOutcome, ...]:
    """What became of the plan's assets on each node; raises UserError if one is not staged."""
    names = [part.asset.name for part in plan.assets]
    if problem := unstaged(plan.recipe, names, plan.root):
        raise problem
    folders = tuple(part.folder for part in plan.assets)
    order = NodeOrder(plan.root, target.local, folders, verify)
    with stage_display() as (watch, _):
        return on_nodes(target.shells, order, watch)


def node_rows(plan: StagingPlan, outcomes: Sequence[NodeOutcome]) -> list[dict[str, Any]]:
    """A row a node, assets by their names."""
    names = {part.folder.name: part.asset.name for part in plan.assets}
    return [
        {
            "host": outcome.host,
            "state": outcome.state,
            "assets": {names[folder]: state for folder, state in outcome.assets.items()},
            "copied": [names[folder] for folder in outcome.copied],
            "way": outcome.way,
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


def print_nodes(rows: Sequence[dict[str, Any]], target: NodeTarget, form: TableFormat) -> None:
    """The table of nodes, and in a text what is wrong on which."""
    shown = [{**row, "assets": None, "copied": ", ".join(row["copied"]) or None} for row in rows]
    columns = [
        OutputColumn("host", "host"),
        OutputColumn("state", "state"),
        OutputColumn("copied", "copied"),
        OutputColumn("way", "way"),
        OutputColumn("bytes_copied", "size", lambda value: si(value, "B"), "right"),
        OutputColumn("seconds", "time", seconds, "right"),
        OutputColumn("fault", "fault"),
        OutputColumn("remedy", "remedy", wraps=True),
    ]
    emit_table(shown, columns, form)
    if form is not TableFormat.text:
        return
    for row in rows:
        for fault in row["faults"]:
            echo(f"{row['host']}: {fault['asset']}: {fault['path']} is {fault['fault']}")
    whole = sum(row["state"] == "staged" for row in rows)
    echo(f"in {target.local}: everything is staged on {whole:,} of {counted(len(rows), 'node')}")


def nodes_exit(outcomes: Sequence[NodeOutcome]) -> int:
    """2 where a node failed, 3 where one has not all of it, else 0."""
    states = {outcome.state for outcome in outcomes}
    if "failed" in states:
        return EXIT_SYSTEM_FAULT
    return 0 if states <= {"staged"} else EXIT_GATE_FAILED
