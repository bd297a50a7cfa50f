"""Only the devices that CUDA_VISIBLE_DEVICES leaves are there."""

from __future__ import annotations

import pytest

from paceline.probe.gpus import visible

FOUND = [{"uuid": uuid} for uuid in ("GPU-aa11", "GPU-aa22", "GPU-bb33", None)]


@pytest.mark.parametrize(
    ("wanted", "left"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2", [2]),
        ("3, 1", [3, 1]),  # its order is the programs' order
        ("GPU-bb", [2]),
        ("GPU-aa22,0", [1, 0]),
        ("GPU-aa", []),  # names two
        ("GPU-", []),
        ("0,9,1", [0]),  # what follows an entry that names nothing is hidden
        ("-1", []),
        ("NoDevFiles", []),
        ("1,MIG-GPU-aa11/0/0", [1]),
        ("1,1", []),
        ("1,GPU-aa22", []),
    ],
)
def test_the_visible_devices_are_those_that_cuda_would_show(wanted: str | None, left: list[int]):
    assert visible(FOUND, wanted) == [FOUND[i] for i in left]


def test_a_machine_without_devices_shows_none():
    assert visible([], "0") == [] and visible([], None) == []
