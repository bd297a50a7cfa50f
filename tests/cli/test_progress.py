"""What a run tells of itself while it goes on."""

from __future__ import annotations

import pytest

from paceline.cli.progress import progress_display
from paceline.core.steps import Step
from paceline.runs.flow import Progress
from tests.example import make_spec


@pytest.mark.parametrize(
    ("step", "line"),
    [
        (Step(4, 0.5, 3.0), "  4/20 · 0.5 s · 512 tokens/s · loss 3.000 · 8 s left"),
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
