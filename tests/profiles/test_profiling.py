"""What surrounds the reading of traces: ranks, overhead, the marked run, text and page."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from paceline.cli.output import TableFormat, render
from paceline.cli.profile import ToolChoice, print_profile
from paceline.core.errors import UserError
from paceline.core.layout import Layout
from paceline.core.result import Status, WaterfallLevel
from paceline.core.run import RunSettings
from paceline.core.training import Profiling, ToolName
from paceline.engines.native import settings
from paceline.files.run_folder import folder_name
from paceline.profiles.breakdown import CATEGORIES
from paceline.profiles.profile import Overhead, Profile, waterfall
from paceline.profiles.timeline import intersect, intervals, length_s, subtract, union
from paceline.profiles.tools import TOOLS, tool
from paceline.profiles.torch_traces import read_file
from paceline.report.html import render_document
from paceline.runs.outcome import evaluate
from paceline.runs.profile_charts import COLOURS
from paceline.runs.profile_report import overhead_text, profile_document
from paceline.runs.profiling import default_ranks, overhead
from tests.example import make_spec, make_steps
from tests.profiles.traces import collective, kernel, step, write
from tests.runs.example import write_run


def profile(folder: Path) -> Profile:
    """Two ranks, a step of 1000 us each, in which a product takes 400."""
    for rank in range(2):
        events = [
            *step(20, 0, 1000),
            kernel("nvjet_<b>bold</b>", 0, 400),
            collective("AllReduce", "5", 300, 700),
        ]
        write(folder / f"rank-{rank}.json.gz", events, rank=rank)
    return read_file(folder)


def test_a_profile_run_is_a_run_of_its_own_kind() -> None:
    plain = make_spec()
    spec = plain.model_copy(update={"profile": Profiling(tool="torch", ranks=(0,))})
    assert (RunSettings.of(plain).profiled, RunSettings.of(spec).profiled) == (False, True)
    assert plain.key != spec.key
    assert plain.profile is None and settings(plain)["profile"] is None
    assert settings(spec)["profile"]["last_step"] == 30
    assert "-profile-torch-" in folder_name(spec, datetime.now(UTC), None)


def test_the_first_rank_of_every_stage_and_node_is_profiled() -> None:
    assert default_ranks(make_spec(4)) == (0,)
    assert default_ranks(make_spec(4, layout=Layout(micro_batch=4, pp=2))) == (0, 2)
    spec = make_spec(2)
    cluster = spec.cluster.model_copy(update={"nodes": 3})
    assert default_ranks(spec.model_copy(update={"cluster": cluster})) == (0, 2, 4)


def test_overhead_holds_profiled_steps_against_others_of_the_run() -> None:
    times = [9.0, 1, 1, 1, 1, 1, 1, 1, 8, 1.2, 1.2, 7, 1, 1, 1]
    asked = Profiling(tool="torch", ranks=(0,), first_step=10, last_step=11)
    cost = overhead(make_steps(times), asked)
    assert cost.fraction == pytest.approx(0.2)
    assert (cost.n_profiled, cost.n_plain) == (2, 6)
    early = Profiling(tool="torch", ranks=(0,), first_step=1, last_step=14)
    assert "no other steps" in str(overhead(make_steps(times[:14]), early).why)
    assert overhead_text(cost).startswith("Overhead of profiling: +20.0% (median of 2 profiled")


def test_a_profiler_that_seems_to_speed_a_run_up_is_no_overhead() -> None:
    faster = Overhead(fraction=-0.214, profiled_s=0.44, plain_s=0.56, n_profiled=11, n_plain=22)
    text = overhead_text(faster)
    assert "not measurable. The profiled steps were faster by 21.4%" in text
    assert "-" not in text and "0.4400 s, of 22 other steps: 0.5600 s" in text


@pytest.mark.parametrize(("status", "code"), [("failed", 2), ("cancelled", 4)])
def test_a_broken_run_without_a_profile_exits_as_the_run_does(
    tmp_path: Path, status: Status, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = make_spec(ranks=2, profile=Profiling(tool="memory", ranks=(0,)))
    report = evaluate(write_run(tmp_path, "it", spec=spec))
    broken = report.result.model_copy(update={"status": status, "reason": "for a reason"})
    assert print_profile(replace(report, result=broken), TableFormat.text) == code
    said = capsys.readouterr().err
    assert f"the run is {status}: for a reason" in said
    # Why there is none needs no guess where the user broke it off.
    assert ("holds no memory curve" in said) is (status == "failed")
    good = report.result.model_copy(update={"status": "ok"})
    with pytest.raises(UserError, match="holds no memory curve"):
        print_profile(replace(report, result=good), TableFormat.text)


def test_the_waterfall_ends_at_the_measured_rate(tmp_path: Path) -> None:
    levels = waterfall(profile(tmp_path), flops_per_step=1e8, peak_flops_per_s=1e12)
    assert [level.name for level in levels] == [
        "peak",
        "GEMMs and attention",
        "communication dp",
        "CPU launch overhead",
        "measured",
    ]
    assert levels[-1].share == pytest.approx(1e8 / 1e-3 / 1e12)
    assert sum(level.lost_s for level in levels) == pytest.approx(1e-3 - 1e8 / 1e12)


def test_text_and_page_say_where_the_time_goes(tmp_path: Path) -> None:
    read = profile(tmp_path)
    text = render(profile_document(read, "tiny"), TableFormat.text)
    assert "0.0010 s per step, mean of 2" in text and "ranks 0-1" in text and "step 20" in text
    assert "GEMMs" in text and "40.0%" in text and "Profiling slows a run" in text
    page = render_document(profile_document(read, "tiny <llama>"))
    assert "nvjet_&lt;b&gt;" in page and "<b>bold" not in page and "tiny <llama>" not in page
    assert list(COLOURS) == list(CATEGORIES)
    long = WaterfallLevel(name="other", flops_per_s=1e12, share=0.5, lost_s=123_456.7)
    slow = read.model_copy(update={"waterfall": (long,)})
    page = render_document(profile_document(slow, "long steps"))
    assert ">123,457<" in page and "e+05" not in page


def test_every_tool_has_a_module_and_is_offered() -> None:
    assert set(TOOLS) == {choice.value for choice in ToolChoice} <= set(get_args(ToolName))
    foreign = make_spec(engine="nemo", profile=Profiling(tool="torch", ranks=(0,)))
    for name in TOOLS:
        assert callable(tool(name).attach) and callable(tool(name).read)
    assert "nemo" in str(tool("torch").unsupported(foreign))


def test_intervals_agree_with_a_grid_of_moments() -> None:
    draw = np.random.default_rng(1)
    grid = np.arange(0, 100) + 0.5
    for _ in range(50):
        sides = [np.sort(draw.integers(0, 100, (8, 2)), axis=1).astype(float) for _ in range(2)]
        left, right = (np.any([(grid > a) & (grid < b) for a, b in side], axis=0) for side in sides)
        assert length_s(union(sides[0])) == left.sum()
        assert length_s(intersect(*sides)) == (left & right).sum()
        assert length_s(subtract(*sides)) == (left & ~right).sum()
    assert len(intervals([], [])) == 0
