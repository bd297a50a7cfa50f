"""Lambda's published sub-cluster values as groups, and made-up ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.core.node_groups import GroupThroughput, Purpose
from paceline.scaling.tables import MeasuredTable, measured_table, read_rows

FILE = "references/lambda_1cc_subcluster_results.csv"


def published(reference_data: Path, model: str) -> MeasuredTable:
    """All values of `opt-13b` or `opt-350m`."""
    path = reference_data / FILE
    rows = [row for row in read_rows(path) if row["benchmark"].startswith(f"{model}_")]
    return measured_table(rows, str(path))


def alone(values: Sequence[float], prefix: str = "n") -> list[GroupThroughput]:
    """Each value as that of a node alone: n1, n2, ..."""
    return [GroupThroughput((f"{prefix}{at}",), value) for at, value in enumerate(values, start=1)]


def group(hosts: str, samples_per_s: float | None, purpose: Purpose = "plan") -> GroupThroughput:
    """A group of the hosts in a text such as `n1 n2`."""
    return GroupThroughput(tuple(hosts.split()), samples_per_s, purpose=purpose)
