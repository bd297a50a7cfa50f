"""A cluster's file with its fabric: what is read, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.core.hardware import Cluster
from paceline.files import catalog

EXAMPLE = Path(__file__).parents[2] / "docs/examples/h100-pods.yaml"
PLAIN = "name: mine\ndevice: H100\nnodes: 64\ndevices_per_node: 8\n"


def test_one_file_serves_runs_and_plans():
    site, cluster = catalog.site(EXAMPLE), catalog.cluster(EXAMPLE)
    assert type(cluster) is Cluster and cluster.world_size == site.world_size == 8192
    assert [level.name for level in site.fabric][-1] == "core"
    assert catalog.site("lambda-1cc-h100").as_cluster == catalog.cluster("lambda-1cc-h100")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("fabric: [{name: a}, {name: b}]", "only the last level may omit devices"),
        (
            "fabric: [{name: a, devices: 8}, {name: b, devices: 12}]",
            "not a multiple of the level",
        ),
        (
            "fabric: [{name: a, devices: 8}, {name: b, devices: 8}]",
            "not a multiple of the level",
        ),
        (
            "fabric: [{name: a, devices: 3}]",
            "not whole nodes; allowed: a multiple of 8, or a divisor of it",
        ),
        ("fabric: [{name: a, devices: 4}, {name: b, devices: 4}]", "not a multiple of the level"),
        ("fabric: [{name: a, devices: 8}]", "connects 8 of 512 devices"),
        ("fabric: [{name: a, oversubscription: 2}]", "no level is below it"),
        ("fabric: [{name: a, oversubscription: 0}]", "0 is too small; allowed: 1 or more"),
        ("fabric: [{name: a, devices: 1e300}]", "fabric.0.devices"),
        ("fabric: [{name: a, latency_s: .nan}]", "finite number"),
        ("fabric: [{name: ''}]", "'' is too short; allowed: 1 character or more"),
        ("fabric: [{name: a, color: red}]", "is not a known field"),
        (
            f"fabric: [{', '.join(f'{{name: l{n}, devices: {8 << n}}}' for n in range(6))}]",
            "a list is too long; allowed: 4 values or fewer",
        ),
        ("inter_link: NVLink4\nfabric: [{name: a}]", "instead of intra_link and inter_link"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(tmp_path: Path, more: str, message: str):
    path = tmp_path / "cluster.yaml"
    path.write_text(PLAIN + more + "\n", encoding="utf-8")
    with pytest.raises(UserError) as refused:
        catalog.site(path)
    assert message in str(refused.value) and "\n" not in str(refused.value)
