"""Profilers leave traces in a log; what only speaks of them is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.compare.judgement import Comparison
from paceline.engines.log_reading.log_content import LogContent
from paceline.engines.log_reading.profilers import watch_profilers
from paceline.logs.facts import UserSettings
from paceline.logs.parser import parse_log
from paceline.runs.comparison import ComparisonOptions, compare_runs, compare_with_reference
from tests.logs.example import megatron_log


def tool(text: str) -> object:
    log = LogContent()
    assert b"".join(watch_profilers([text.encode()], log)) == text.encode()
    return log.facts.get("profiled")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("+ srun nsys profile --output x -t cuda,nvtx python pretrain.py\n", "Nsight Systems"),
        ("Generated:\n    /results/nsys/llama3.1-70b-fp8_64g_1_0_0.nsys-rep\n", "Nsight Systems"),
        ("model.nsys_profile.enabled=True\n", "Nsight Systems"),
        ("0:  nsys_profile:\n0:    enabled: true\n", "Nsight Systems"),
        ("declare -x ENABLE_PROFILE=true\n", "a profiler"),
        ('export ENABLE_NCCL_TRACE="true"\n', "the NCCL trace"),
        ("NCCL_DEBUG_SUBSYS=COLL,P2P,NET\n", "the NCCL trace"),
        ("n1:7:9 [0] NCCL INFO AllReduce: opCount 1a sendbuff 0x7f\n", "the NCCL trace"),
        (
            "STAGE:2026-01-02 03:04:05 7:7 ActivityProfilerController.cpp:311] "
            "Completed Stage: Collection\n",
            "the PyTorch profiler",
        ),
        ("INFO - Profiling active. Traces will be saved at out/trace\n", "the PyTorch profiler"),
        ("  profile ......................................... True\n", "a profiler"),
        ("Config param profiler: xplane\n", "a profiler"),
        ('{"event": "start", "profiled": true}\n', "a profiler"),
    ],
)
def test_a_profilers_line_is_known(line: str, name: str):
    assert tool(f"first line\n{line}") == name


@pytest.mark.parametrize(
    "line",
    [
        "nsys is not installed, profile nothing",
        "  profile ......................................... False",
        "  use_pytorch_profiler ............................ False",
        "model.nsys_profile.enabled=False",
        "0:  nsys_profile:\n0:    enabled: False",
        "ENABLE_PROFILE=false",
        "NCCL_DEBUG_SUBSYS=INIT,ENV",
        "n1:7:9 [0] NCCL INFO Connected all rings",
        '"profile": false, "start_profile_step": 3',
        "Config param profiler: ",
        '{"event": "start", "profiled": false}',
    ],
)
def test_what_only_speaks_of_one_is_none(line: str):
    assert tool(f"{line}\n") is None


def judged(root: Path, line: str, reference: str | None = None) -> Comparison:
    results: list[str] = []
    for name, text in (("plain", ""), ("profiled", line)):
        log = root / f"{name}.log"
        log.write_text(text + megatron_log([11.0] * 20))
        user = UserSettings(recipe="llama31-70b", device="H100", num_devices=64, dtype="fp8")
        (root / f"{name}.json").write_text(parse_log(log, user).document.model_dump_json())
        results.append(str(root / f"{name}.json"))
    if reference:
        return compare_with_reference(root, results[1], reference, ComparisonOptions())
    return compare_runs(root, results[0], results[1], ComparisonOptions())


@pytest.mark.parametrize("reference", [None, "llama31-70b-fp8-64"])
def test_a_profiled_run_is_refused_and_why(tmp_path: Path, reference: str | None):
    refused = judged(tmp_path, "+ nsys profile -o x python a.py\n", reference)
    assert (refused.verdict, refused.differing_keys) == ("not comparable", ("profiled",))
    assert "A profiler slows a run: its figures are not valid." in refused.sentence
