"""PyTorch's profiler in a program that knows nothing of it: real torch, real traces."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.job import Job
from paceline.core.run import RunSpec
from paceline.core.training import Profiling
from paceline.profiles import nccl_logs, torch_traces
from tests.example import make_spec

pytest.importorskip("torch")
STEPS = 8
PROGRAM = f"""
import os
import torch
import of_theirs

first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
grouped = torch.optim.SGD([{{"params": [each]}} for each in first.parameters()], lr=0.1)
alone = torch.optim.SGD(second.parameters(), lr=0.1)
groups = grouped.param_groups
for _ in range({STEPS}):
    for _ in range(2):
        second(first(torch.randn(4, 8))).square().mean().backward()
    for group in groups:
        grouped.param_groups = [group]
        grouped.step()
    grouped.param_groups = groups
    alone.step()
    for optimizer in (grouped, alone):
        optimizer.zero_grad()
print(os.environ["SITE"], os.environ["PYTHONPATH"].split(os.pathsep)[-1])
"""
"""Two optimizers and two micro-batches a step; one steps a group at a time, as DeepSpeed's do."""
UPDATES_A_STEP = 3
THEIRS = """
import os, sys
os.environ["SITE"] = "theirs"
sys.path.append(os.path.join(os.path.dirname(__file__), "more"))
"""


def spec_of(engine: str, first: int = 4, last: int = 5) -> RunSpec:
    profile = Profiling(tool="torch", ranks=(1,), first_step=first, last_step=last)
    return make_spec(ranks=2, engine=engine, profile=profile)


def test_the_chosen_rank_writes_a_trace_with_its_programs_step_numbers(tmp_path: Path):
    job = Job("x", sys.executable, ("train.py",))
    job = torch_traces.attach(job, spec_of("command"))
    theirs = tmp_path / "theirs"
    files = {
        **job.files,
        "train.py": PROGRAM,
        "theirs/sitecustomize.py": THEIRS,
        "theirs/more/of_theirs.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    for rank in ("0", "1"):
        done = subprocess.run(
            [sys.executable, *job.program], cwd=tmp_path, capture_output=True, text=True,
            env=os.environ | {"RANK": rank, "PYTHONPATH": str(theirs), "SITE": "nobody's"},
            timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        # What the program had of its own is still there.
        assert done.stdout.split() == ["theirs", str(theirs)]

    assert [path.name for path in (tmp_path / "profiles").glob("*.gz")] == [
        "rank-00001.trace.json.gz"
    ]
    profile = torch_traces.read(tmp_path)
    assert profile.steps == (4, 5) and profile.step_time_s
    parts = profile.parts
    whole = sum(parts.values()) - parts["communication_overlapped"]
    assert whole == pytest.approx(profile.step_time_s, rel=0.02)
    assert parts["gemm"] > 0 and parts["optimizer"] > 0
    updates = sum(hot.n for hot in profile.kernels if hot.name == "Optimizer.step#SGD.step")
    # The bounds of a step lie within an update. Counted by groups it would be half as many.
    assert abs(updates - 2 * UPDATES_A_STEP) <= 1


def test_a_program_goes_on_without_its_profile(tmp_path: Path):
    job = torch_traces.attach(Job("x", sys.executable, ("train.py",)), spec_of("command", 2, 3))
    program = PROGRAM.replace("import of_theirs", "")
    for name, text in {**job.files, "train.py": program}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "profiles" / "rank-00001.trace.json.gz").mkdir()
    done = subprocess.run(
        [sys.executable, *job.program], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"RANK": "1", "PYTHONPATH": "theirs", "SITE": "here"},
        timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["here", "theirs"], done.stderr
    assert "paceline: no profile: " in done.stderr


def test_engines_that_take_no_hook_and_the_first_step_are_refused():
    assert torch_traces.unsupported(spec_of("hf_trainer")) is None
    assert "enable its own profiler" in str(torch_traces.unsupported(spec_of("nemo")))
    assert "--steps 2-4" in str(torch_traces.unsupported(spec_of("torchtitan", 1, 3)))
    on_gpus = spec_of("nemo").cluster.model_copy(update={"device": "H100-SXM"})
    submitted = spec_of("nemo").model_copy(update={"cluster": on_gpus})
    assert "nccl_trace=true" in str(nccl_logs.unsupported(submitted))
    native = Job("x", "python", ("trainer",))
    assert torch_traces.attach(native, spec_of("native")) == native
