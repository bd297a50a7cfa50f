"""Ten natural mistypings, each answered with one line that says what to type instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command import paceline

MISTYPINGS = {
    "estimate llama31-8b --gpu H1000 --gpus 8": "did you mean 'H100'?",
    "estimate llama31-8b --gpu H100 --gpus 8 --dp 8 --tp 3": "leave out --dp or --gpus",
    "estimate llama31-8b --gpu H100 --gpus 8x": "allowed: 64, or a list: 64,128,256",
    "estimate llama31-8b --gpu H100 --gpuss 8": "did you mean --gpus",
    "parse nofile.log": "nofile.log: does not exist",
    "compare a.log": "B",
    "run llama3-8b": "did you mean 'llama31-8b'",
    "run tiny-llama --set layout.tp2=2": "did you mean 'layout.tp'?",
    "run tiny-llama --devices two": "--devices: 'two' is not a whole number",
    "check --hosts n[1-": "a range (node[001-004])",
    "list": "did you mean `paceline runs list`?",
    "runs lst": "did you mean `paceline runs list`?",
    "audit table.csv": "did you mean `paceline table audit`?",
    "watch last": "did you mean `paceline runs watch`?",
    "delete last": "did you mean `paceline runs rm`?",
    "benchmark tiny-llama": "did you mean `paceline run`?",
    "estimat llama31-8b": "did you mean `paceline estimate`?",
    "version": "did you mean `paceline --version`?",
    "foo": "`paceline --help` lists them",
}


@pytest.mark.parametrize("typed", MISTYPINGS)
def test_a_mistyping_gets_a_remedy_of_one_line(typed: str, tmp_path: Path):
    (tmp_path / "a.log").write_text("iteration 1\n")
    done = paceline(*typed.split(), cwd=tmp_path, runs=tmp_path / "runs")
    assert (done.returncode, done.stdout) == (1, "")
    errors = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
    assert len(errors) == 1 and errors[0].startswith("error: "), done.stderr
    assert MISTYPINGS[typed] in errors[0]
