"""Progress lines of a running run."""

from __future__ import annotations

import pytest

from paceline.cli.progress import progress_display, run_headline
from paceline.core.layout import Layout
from paceline.core.steps import Step
from paceline.core.training import Training
from paceline.runs.flow import Progress
from tests.example import make_spec


@pytest.mark.parametrize(
    ("step", "line"),
    [
        (Step(4, 0.5, 3.0), "  4/20 · 0.5 s · 512 tokens/s · loss 3.000 · 8 s left"),
        (Step(4, 12345.6, 3.0), "  4/20 · 12,346 s · 0 tokens/s · loss 3.000 · 54 h 52 min left"),
        (Step(4, None, 3.0), "  4/20 · loss 3.000"),
        (Step(4), "  4/20"),
    ],
)
def test_no_time_is_said_that_nobody_knows(
    step: Step, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_display(make_spec()) as watch:
        watch(Progress("training", step, 20, 256))
    assert capsys.readouterr().err.splitlines()[-1] == line


def test_the_headline_names_layout_and_batch() -> None:
    training = Training(seq_len=4096, global_batch=1, steps=2, dtype="fp32")
    alone = make_spec(ranks=1, training=training, layout=Layout(recompute="full"))
    assert run_headline(alone).endswith(
        "dp 1 micro-batch 1 recompute full · seq 4,096 · global batch 1 sequence"
    )


def test_a_larger_batch_starts_the_times_anew(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_display(make_spec()) as watch:
        for number, batch, tokens in ((1, 4, 128), (2, 4, 128), (20, 8, 256)):
            watch(Progress("training", Step(number, batch / 8, global_batch=batch), 20, tokens))
    assert capsys.readouterr().err.splitlines()[-1].startswith("  20/20 · 1 s · 256 tokens/s")
