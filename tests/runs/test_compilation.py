"""Compiled blocks with and without a compiler, and equal compilation of compared runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.machines.placement import Request
from paceline.runs.compilation import with_equal_compilation
from paceline.runs.plan import Plan, make_plan

LONG = "training.steps=100000"
CACHE = "TORCHINDUCTOR_CACHE_DIR"


def planned(*overrides: str) -> Plan:
    return make_plan(Request("tiny-llama", None, overrides, 2, "cpu"))


def test_the_start_says_why_blocks_are_compiled():
    said = [notice for notice in planned(LONG).notices if notice.startswith("blocks are compiled")]
    assert len(said) == 1 and "100,000 steps save about" in said[0]
    for short in ((), (LONG, "training.compile=blocks")):
        assert not any("compiled" in notice for notice in planned(*short).notices)


def test_without_a_compiler_auto_compiles_nothing_and_what_is_asked_for_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    plan = planned(LONG)
    assert plan.spec.training.compile == "none"
    assert "blocks are not compiled: this machine has no g++" in plan.notices
    with pytest.raises(UserError, match=r"needs a compiler, and this machine has no g\+\+"):
        planned("training.compile=blocks")


def test_a_compiler_named_by_cxx_is_the_one_that_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    compiler = tmp_path / "c++-of-mine"
    monkeypatch.setenv("CXX", str(compiler))
    assert planned(LONG).spec.training.compile == "none"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    assert planned(LONG).spec.training.compile == "blocks"


def test_compiled_code_is_kept_in_the_users_cache_and_elsewhere_where_the_user_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(CACHE, raising=False)
    assert planned(LONG).job.env[CACHE] == str(tmp_path / "paceline/inductor")
    assert CACHE not in planned().job.env
    monkeypatch.setenv(CACHE, "/scratch/mine")
    assert planned(LONG).job.env[CACHE] == "/scratch/mine"


def test_runs_of_one_study_are_all_compiled_or_none():
    request = Request("tiny-llama")
    short, long = planned().spec, planned(LONG).spec
    assert with_equal_compilation(request, [long, long]) is None
    changed = with_equal_compilation(request, [short, long])
    assert changed and changed.overrides == ("training.compile=none",)
