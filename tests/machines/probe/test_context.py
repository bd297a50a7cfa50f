"""What a process holds before any model is measured in fresh processes, stage by stage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.errors import SystemFaultError
from paceline.machines.probe import context
from paceline.machines.probe.context import ContextProbe, probe_context

MIB = 2**20


@pytest.fixture(scope="module")
def pair() -> ContextProbe:
    return probe_context(sys.executable, "cpu", ranks=2, repeats=2)


def test_every_stage_adds_to_the_one_before(pair: ContextProbe):
    assert [row.stage for row in pair.rows] == ["python", "torch", "product", "group"]
    assert all(row.kind == "resident" and row.n == 2 and row.spread < 0.2 for row in pair.rows)
    assert pair.rows[0].bytes > 4 * MIB and pair.rows[1].added_bytes > 50 * MIB
    assert pair.rows[-1].bytes == pytest.approx(sum(row.added_bytes for row in pair.rows))
    assert pair.ranks == 2 and pair.torch and pair.device_name


def test_the_probe_answers_in_the_form_that_probes_have():
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "paceline",
            "probe",
            "context",
            "--device",
            "cpu",
            "--repeat",
            "1",
            "--json",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    document = json.loads(done.stdout)

    assert done.returncode == 0 and document["probe"] == "context" and document["ranks"] == 1
    assert [row["stage"] for row in document["rows"]] == ["python", "torch", "product"]
    assert {"bytes", "n", "spread"} <= document["best"].keys()
    assert document["best"] == document["rows"][-1] and document["catalog"] is None


def fake_python(folder: Path, body: str) -> str:
    """An interpreter that only prints."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    return str(program)


def test_a_gpus_stages_are_read_from_the_program(tmp_path: Path):
    common = {"event": "context", "device_name": "V100-SXM2-32GB", "torch": "t"}
    stages = {"context": (1115 * MIB, 2 * MIB), "product": (1400 * MIB, 60 * MIB)}
    lines = [
        json.dumps(
            {**common, "stage": stage, "rank": rank, "bytes": used - rank, "pool_bytes": pool}
        )
        for stage, (used, pool) in stages.items()
        for rank in (0, 1)
    ]
    commands = "\n".join(f"echo '{line}'" for line in lines)
    probe = probe_context(fake_python(tmp_path, commands), "cuda", ranks=2, repeats=3)

    assert [(row.stage, row.kind, row.bytes, row.n) for row in probe.rows] == [
        ("context", "device_used", 1115 * MIB, 3),
        ("product", "device_used", 1400 * MIB, 3),
    ]
    assert probe.rows[1].added_bytes == 285 * MIB and probe.rows[1].pool_bytes == 60 * MIB


def test_the_catalogs_context_is_held_against_the_measured_one():
    from paceline.cli.probe import _context_document

    row = {
        "what": "w",
        "kind": "device_used",
        "added_bytes": 1.0,
        "pool_bytes": 0.0,
        "n": 3,
        "spread": 0.0,
    }
    rows = [{**row, "stage": "context", "bytes": 2 * 1113 * MIB}]

    def document(name: str) -> dict[str, object]:
        values = {"device_name": name, "torch": "t", "ranks": 1, "rows": rows}
        return _context_document(ContextProbe.model_validate(values), "cuda")

    catalog = document("Tesla V100-SXM2-32GB")["catalog"]
    assert isinstance(catalog, dict) and catalog["ratio"] == 2.0 and "2.00 x" in catalog["sentence"]
    assert document("H100")["catalog"] is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo 'RuntimeError: no driver' >&2; exit 1", "RuntimeError: no driver"),
        ("echo noise", "printed no result"),
    ],
)
def test_a_program_that_fails_is_one_clear_fault(tmp_path: Path, body: str, words: str):
    with pytest.raises(SystemFaultError, match=words):
        probe_context(fake_python(tmp_path, body), "cpu", repeats=1)


def test_an_interpreter_that_is_not_there_and_one_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(SystemFaultError, match="No such file"):
        probe_context(str(tmp_path / "none"), "cpu", repeats=1)
    monkeypatch.setattr(context, "TIME_LIMIT_S", 0.3)
    with pytest.raises(SystemFaultError, match="did not end"):
        probe_context(fake_python(tmp_path, "exec sleep 5"), "cpu", repeats=1)
