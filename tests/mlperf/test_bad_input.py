"""Whatever is wrong with a folder of runs has its own message and status; nothing changes."""

from __future__ import annotations

import pytest

from tests.mlperf.test_cli import paceline


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ("nemoo", "engine 'nemoo': is unknown; did you mean 'nemo'? `paceline rec"),
        ("nemo", "allowed: native, mlperf\n"),
    ],
)
def test_an_engine_that_makes_no_trials_is_named_before_any_layout(engine: str, told: str):
    cluster = ("--cluster", "lambda-gb300-nvl72")
    done = paceline("run", "llama31-8b", "--engine", engine, *cluster, "--dry-run")
    assert done.returncode == 1 and told in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--tiny", "--name", "../series"],
            "--name ../series: is not a valid name of a series; allowed: ",
        ),
        (["--tiny", "--validation", "x"], "--validation: is for the official benchmark"),
        (["--tiny", "--synthetic", "--data", "x"], "--data: has no effect with --synthetic"),
    ],
)
def test_what_a_series_has_no_use_for_is_refused_by_its_name(words: list[str], told: str):
    done = paceline("run", "llama31-8b", *words, "--dry-run")
    assert (done.returncode, done.stdout) == (1, "") and told in done.stderr
