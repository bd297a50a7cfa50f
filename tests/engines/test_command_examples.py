"""The examples of docs/reference/steplog.md run as written."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from paceline import steplog
from paceline.core.run_report import RunReport
from paceline.machines.placement import Request
from paceline.runs import flow
from paceline.runs.plan import make_plan
from tests.logs.example import megatron_log

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "steplog.md"


def run_example(folder: Path, name: str, **request: object) -> RunReport:
    """Report of a program with a copy of steplog in its folder, run on this machine."""
    shutil.copy(steplog.__file__, folder / "steplog.py")
    if not (folder / name).exists():
        blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        (folder / name).write_text(next(b for b in blocks if b.startswith(f"# {name}\n")))
    asked = Request("", device="cpu", command=(sys.executable, name), **request)  # type: ignore[arg-type]
    return flow.run(make_plan(asked), folder / "runs", ["x"], print, probe=False)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_plain_loop_has_times_of_every_rank(tmp_path: Path) -> None:
    result = run_example(tmp_path, "loop.py", per="device", devices=2).result

    assert (result.status, result.steps_done, len(result.ranks)) == ("ok", 20, 2), result.reason
    for rank in result.ranks:
        assert rank.busy_time_s and rank.comm_wait_s and rank.data_wait_s
        assert rank.memory_bytes["resident"] > 0
    assert result.versions["torch"] and result.metrics["loss_last"].value


def test_a_callback_tells_the_trainers_steps(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    result = run_example(tmp_path, "finetune.py").result

    assert (result.status, result.steps_done) == ("ok", 12), (result.reason, result.log_tail)
    step_time_s = result.metrics["step_time_s"].value
    assert step_time_s and result.metrics["tokens_per_s"].value == pytest.approx(128 / step_time_s)


def test_a_megatron_log_is_read_by_its_log_format(tmp_path: Path) -> None:
    (tmp_path / "pretrain_gpt.py").write_text(f"print({megatron_log([0.25] * 20, tflops=50)!r})")
    report = run_example(tmp_path, "pretrain_gpt.py", devices=1)

    assert report.result.status == "ok" and report.facts.engine == "megatron"
    assert report.result.metrics["samples_per_s"].value == pytest.approx(128 / 0.25)
