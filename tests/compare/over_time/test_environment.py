"""What changed on a machine between two runs is named, the likeliest cause first."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.compare.over_time.environment import ABSENT, environment_changes, environment_items
from paceline.machines.probe.inventory import inventory
from tests.runs.series_example import MACHINE

GPU: dict[str, Any] = {
    "name": "NVIDIA H100",
    "uuid": "GPU-1",
    "driver": "550.54",
    "power_limit_w": 700.0,
    "memory_bytes": 85e9,
    "ecc": "on",
    "vbios": None,
}


def items(torch: str = "2.13.0", **machine: Any) -> dict[str, str]:
    return environment_items({**MACHINE, **machine}, {"torch": torch, "paceline": "0.3"})


def named(before: dict[str, str], after: dict[str, str]) -> dict[str, tuple[str, str]]:
    """The changes by item, in their order."""
    return {c.item: (c.before, c.after) for c in environment_changes([before], [after])}


def test_equal_machines_have_no_changes():
    assert named(items(), items()) == {}


def test_the_machine_here_is_equal_to_itself_a_moment_later():
    first, second = (environment_items(json.loads(json.dumps(inventory())), {}) for _ in range(2))
    assert environment_changes([first], [second]) == ()


def test_a_driver_update_comes_before_what_else_is_new():
    before = items(gpus=[GPU, {**GPU, "uuid": "GPU-2"}])
    after = items(
        torch="2.14.0", host="node-7", gpus=[{**GPU, "uuid": "GPU-3", "driver": "560.35"}] * 2
    )
    changes = named(before, after)
    assert list(changes) == ["NVIDIA driver", "torch", "host", "GPU boards"]
    assert changes["NVIDIA driver"] == ("550.54", "560.35")
    assert changes["GPU boards"] == ("GPU-1, GPU-2", "GPU-3")


@pytest.mark.parametrize(
    ("machine", "item", "values"),
    [
        ({"kernel": "6.8.0-45"}, "kernel", ("6.8.0-40", "6.8.0-45")),
        ({"environment": {"NCCL_ALGO": "Ring"}}, "$NCCL_ALGO", (ABSENT, "Ring")),
        ({"packages": {}}, "numpy", ("2.4.0", ABSENT)),
        (
            {"packages": {"numpy": "2.4.0", "nvidia-nccl-cu13": "2.28"}},
            "nvidia-nccl-cu13",
            (ABSENT, "2.28"),
        ),
        ({"memory_bytes": 12.5e9}, "memory", ("23 GiB", "12 GiB")),
        (
            {"cpu": {"model": "Epyc 9654", "mitigations": {"tsa": "Mitigation: x"}}},
            "CPU mitigation tsa",
            (ABSENT, "Mitigation: x"),
        ),
    ],
)
def test_a_single_change_is_named(machine: dict[str, Any], item: str, values: tuple[str, str]):
    assert named(items(), items(**machine)) == {item: values}


@pytest.mark.parametrize(
    "machine",
    [
        {"load_average_1min": 9.0},
        {"memory_bytes": 25e9 - 5e6},
        {"environment": {"SLURM_JOB_ID": "7"}},
        {"os": "Linux-6.9"},
    ],
)
def test_what_differs_in_every_run_is_no_change(machine: dict[str, Any]):
    assert named(items(), items(**machine)) == {}


def test_what_only_one_side_looked_for_is_no_change():
    cpu = {"model": "Epyc 9654", "mitigations": {}}
    assert named(items(cpu=cpu), items(cpu={**cpu, "microcode": "0x7"})) == {}
    older = items(schema=1)
    assert named(older, items(environment={"TRITON_CACHE_DIR": "/x"})) == {}


def test_nothing_recorded_is_nothing_changed():
    assert named(environment_items({}, {}), items()) == {}


def test_an_item_that_changes_all_the_time_is_told_apart_and_comes_last():
    hosts = ["node-1", "node-2", "node-1"]
    before = [items(host=host) for host in hosts]
    after = [items(host="node-2", kernel="6.9", distribution="Debian 13") for _ in hosts]
    changes = environment_changes(before, after)
    assert [(c.item, c.only_here) for c in changes] == [("kernel", True), ("host", False)]


def test_a_run_that_recorded_nothing_differs_in_nothing():
    before = [items(), environment_items({}, {}), items()]
    after = [items(kernel="6.9", environment={"NCCL_ALGO": "Ring"})]
    changes = environment_changes(before, after)
    assert [(c.item, c.only_here) for c in changes] == [("kernel", True), ("$NCCL_ALGO", True)]
    sometimes = [items(environment={"NCCL_ALGO": "Tree"}), items()]
    assert [c.only_here for c in environment_changes(sometimes, after)] == [True, False]


def test_torch_is_told_once_although_it_is_recorded_twice():
    before = items(packages={"torch": "2.13.0"})
    after = items(torch="2.14.0", packages={"torch": "2.14.0"})
    assert named(before, after) == {"torch": ("2.13.0", "2.14.0")}
    assert len(environment_changes([before], [after])) == 1


def test_the_image_is_named_by_its_digest_first():
    image = {"kind": "podman", "image": "trainer:1", "digest": "sha256:aa"}
    newer = {"kind": "podman", "image": "trainer:2", "digest": "sha256:bb"}
    assert list(named(items(container=image), items(container=newer))) == [
        "container image digest",
        "container image",
    ]


def test_gpus_that_are_alike_are_told_once_and_others_in_full():
    mixed = items(gpus=[GPU, {**GPU, "driver": "560.35"}])
    assert mixed["gpus.driver"] == "550.54, 560.35" and mixed["gpus.name"] == "NVIDIA H100"
    assert mixed["gpus.count"] == "2" and "gpus.vbios" not in mixed


@pytest.mark.parametrize(
    "inventory",
    [
        {"gpus": [1, None, "x"]},
        {"gpus": {"a": 1}, "packages": None},
        {"cpu": "x", "environment": ["a"], "memory_bytes": "much"},
        {"gpus": [{"uuid": ["a"], "memory_bytes": float("nan")}]},
    ],
)
def test_an_inventory_that_somebody_spoiled_is_read_as_far_as_it_goes(inventory: dict[str, Any]):
    assert isinstance(named(items(), environment_items(inventory, {})), dict)
