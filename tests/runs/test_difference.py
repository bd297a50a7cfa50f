"""What differs between two runs is named, what usually matters most first, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.core.assets import RunInput, RunInputs
from paceline.core.training import Data
from paceline.files.documents import write_value
from paceline.files.inputs import INPUTS_FILE
from paceline.runs.difference import RunDiff, run_diff
from paceline.runs.outcome import evaluate
from tests.command import paceline
from tests.example import make_spec
from tests.runs.example import write_run

MACHINE: dict[str, Any] = {
    "schema": 2,
    "kernel": "6.1",
    "host": "node-1",
    "gpus": [{"name": "H100", "power_limit_w": 700.0, "driver": "550"}],
    "packages": {"torch": "2.13.0"},
    "environment": {"NCCL_ALGO": "Ring"},
}


def difference(tmp_path: Path, a: dict[str, Any], b: dict[str, Any]) -> RunDiff:
    return run_diff(*(evaluate(write_run(tmp_path, n, **f)) for n, f in (("a", a), ("b", b))))


def read(folder: Path, path: str, sha256: str | None, size: int = 5) -> None:
    part = RunInput(field="data.path", path=path, files=1, bytes=size, sha256=sha256)
    write_value(folder / INPUTS_FILE, RunInputs(inputs=(part,)))


def test_work_comes_first_and_the_machine_last(tmp_path: Path):
    spec = make_spec()
    other = spec.model_copy(
        update={
            "training": spec.training.model_copy(update={"lr": 1e-5, "dtype": "bf16"}),
            "layout": spec.layout.model_copy(update={"micro_batch": 1}),
        }
    )
    changed = {
        **MACHINE,
        "gpus": [{**MACHINE["gpus"][0], "power_limit_w": 500.0}],
        "environment": {"NCCL_ALGO": "Ring", "NCCL_DEBUG": "INFO"},
    }

    told = difference(
        tmp_path,
        {"spec": spec, "inventory": json.dumps(MACHINE)},
        {"spec": other, "inventory": json.dumps(changed)},
    )

    named = {part.item: (part.kind, part.a, part.b) for part in told.differences}
    assert named["dtype"] == ("work", spec.training.dtype, "bf16")
    assert named["layout.micro_batch"][0] == "work"
    assert named["training.lr"] == ("setting", f"{spec.training.lr}", "1e-05")
    assert named["GPU power limit, W"] == ("environment", "700", "500")
    assert named["$NCCL_DEBUG"] == ("environment", "absent", "INFO")
    order = ["work", "setting", "input", "program", "environment"]
    places = [order.index(part.kind) for part in told.differences]
    assert places == sorted(places) and len(named) == 5


def test_another_place_of_the_same_data_is_no_difference(tmp_path: Path):
    specs = [make_spec(data=Data(source="text", path=f"/{at}/a.txt")) for at in ("here", "there")]
    runs = [write_run(tmp_path, name, spec=s) for name, s in zip("ab", specs, strict=True)]
    for folder in runs:
        read(folder, f"/{folder.name}/a.txt", "0" * 64)

    assert not run_diff(*map(evaluate, runs)).differences

    read(runs[1], "/b/a.txt", "1" * 64)
    kinds = [(part.kind, part.item) for part in run_diff(*map(evaluate, runs)).differences]
    assert kinds == [("setting", "data.path"), ("input", "data.path")]


def test_inputs_too_large_for_a_digest_are_alike_by_their_size(tmp_path: Path):
    runs = [write_run(tmp_path, name) for name in "ab"]
    for folder in runs:
        read(folder, f"/{folder.name}/a.txt", None)

    assert not run_diff(*map(evaluate, runs)).differences
    for sha256, size in ((None, 6), ("0" * 64, 5)):
        read(runs[1], "/b/a.txt", sha256, size)
        differing = run_diff(*map(evaluate, runs)).differences
        assert [(part.kind, part.item) for part in differing] == [("input", "data.path")]


def test_an_input_that_one_run_alone_recorded_is_told(tmp_path: Path):
    runs = [write_run(tmp_path, name) for name in "ab"]
    read(runs[1], "/b/a.txt", "0" * 64)

    told = run_diff(*map(evaluate, runs))

    assert not told.differences and "input data.path" in told.recorded_once


def test_what_one_run_alone_recorded_is_no_difference_but_told(tmp_path: Path):
    told = difference(tmp_path, {"inventory": json.dumps(MACHINE)}, {})

    assert not told.differences
    assert {"kernel", "NVIDIA driver", "host"} <= set(told.recorded_once)


def test_the_verb_tells_a_table_and_can_be_a_gate(tmp_path: Path):
    write_run(tmp_path, "a")
    write_run(tmp_path, "b", torch="2.12.0")

    done = paceline("runs", "diff", "a", "b", "--json", runs=tmp_path)
    gate = paceline("runs", "diff", "a", "b", "--fail-on-findings", runs=tmp_path)
    alike = paceline("runs", "diff", "a", "a", "--fail-on-findings", runs=tmp_path)

    document = json.loads(done.stdout)
    assert document["differences"] == [
        {"kind": "environment", "item": "torch", "a": "2.13.0", "b": "2.12.0"}
    ]
    assert gate.returncode == 3 and "torch" in gate.stdout
    assert (alike.returncode, alike.stdout) == (0, "no differences in what both runs recorded\n")
