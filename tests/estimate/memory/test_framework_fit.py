"""Published memories: reading them, comparing like with like, and fitting the constants."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.estimate.fit.published import UnmodelledError
from paceline.estimate.memory.device_memory import memory, p_oom, rank_memory
from paceline.estimate.memory.framework import FITTED, FRAMEWORKS, PRIORS, Framework
from paceline.estimate.memory.framework_fit import fit_memory, leave_one_source_out
from paceline.estimate.memory.published import (
    GIB,
    MORE_STAGES,
    NO_MEMORY,
    MemoryRow,
    as_stated,
    read_memory_row,
)
from paceline.estimate.model.case import cases_of
from tests.estimate.memory.test_device_memory import LLAMA_8B

GPT = {
    "id": "one", "source": "a table (via a copy)", "model": "GPT", "layers": "24", "hidden": "2048",
    "heads": "16", "vocab": "50257", "seq_len": "2048", "gpu": "V100-SXM2-32GB", "num_gpus": "8",
    "dtype": "fp16", "gbs": "512", "mbs": "1", "tp": "1", "pp": "1", "zero": "1", "recompute": "full",
    "attention_impl": "fused-softmax", "mem_gb": "16", "notes": "", "step_time_s": "29",
}  # fmt: skip


def read(**changes: str) -> MemoryRow:
    return read_memory_row({**GPT, **changes})


@pytest.fixture(scope="module")
def rows(reference_data: Path) -> list[MemoryRow]:
    """All open rows that state memory or ran out of it."""
    found: list[MemoryRow] = []
    table = reference_data / "references" / "measured_open.csv"
    with table.open(encoding="utf-8") as lines:
        for line in csv.DictReader(lines):
            try:
                found.append(read_memory_row(line))
            except UnmodelledError:
                continue
    return found


def test_a_row_is_read_with_its_tied_head_positions_and_device():
    row = read()
    assert row.source == "a table"
    assert row.stated_bytes == 16 * GIB
    assert row.device_bytes == 34089205760
    assert (row.case.tied, row.case.positions, row.case.moment_bytes) == (True, 2048, 4)


def test_notes_tell_of_running_out_and_of_other_optimizers():
    assert read(mem_gb="", notes="OOM; at once", step_time_s="").stated_bytes is None
    assert read(notes="--use-bnb-optimizer").case.moment_bytes == 1
    assert read(notes="baseline w/o bnb").case.moment_bytes == 4
    assert read(notes="bf16 optimizer w/ fp32 grad accum").case.summed_gradient_bytes == 4


def test_a_variant_with_more_memory_than_the_catalogs_keeps_its_own():
    assert read(gpu="H100-SXM-96GB-HBM2e-500W").device_bytes == 96e9


@pytest.mark.parametrize(
    ("changes", "reason"), [({"mem_gb": ""}, NO_MEMORY), ({"pp": "64"}, MORE_STAGES)]
)
def test_rows_that_say_nothing_are_left_out_with_the_reason(changes: dict[str, str], reason: str):
    with pytest.raises(UnmodelledError, match=reason):
        read(**changes)


def test_each_source_is_met_in_its_own_kind_and_rank():
    piped = {"pp": "4", "mbs": "8"}
    megatron, study = read(**piped), read(**piped, source="bigscience experiments/tr3m-1B3.md")
    golden = read(**piped, attention_impl="local", source="golden values")
    fsdp = read(zero="3", attention_impl="flash (SDPA)")
    for row, wanted in (
        (megatron, memory(cases_of([megatron.case])).device_used),
        (study, rank_memory(cases_of([study.case]), 0).device_used),
        (golden, rank_memory(cases_of([golden.case]), -1).allocated),
        (fsdp, memory(cases_of([fsdp.case])).reserved),
    ):
        assert as_stated([row]).tolist() == pytest.approx(wanted.tolist())
    assert as_stated([study])[0] < as_stated([megatron])[0]


def synthetic(truth: Framework) -> list[MemoryRow]:
    """Rows of two sources as a framework with these constants would state them."""
    cases = [
        replace(LLAMA_8B, micro_batch=float(b), zero_stage=float(z), tp=float(t), stack="fused")
        for b in (1, 2, 4) for z in (0, 1) for t in (1, 4)
    ]  # fmt: skip
    blank = [MemoryRow(str(i), f"source {i % 2}", case, 1e15, 1.0) for i, case in enumerate(cases)]
    stated = as_stated(blank, truth)
    return [replace(row, stated_bytes=float(stated[i])) for i, row in enumerate(blank)]


def test_constants_that_made_the_rows_are_found_again():
    truth = replace(PRIORS["fused"], activation_scale=1.12, logits=10.0)
    found = fit_memory(synthetic(truth))["fused"]
    assert found.activation_scale == pytest.approx(1.12, rel=0.02)
    assert found.logits == pytest.approx(10.0, rel=0.1)
    assert found.per_shard == pytest.approx(PRIORS["fused"].per_shard, rel=0.2)


def test_stacks_without_rows_keep_their_priors_and_a_source_alone_never_sees_itself():
    rows = synthetic(replace(PRIORS["fused"], logits=10.0))
    assert fit_memory(rows)["softmax"] == PRIORS["softmax"]
    alone = [replace(row, source="alone") for row in rows]
    assert leave_one_source_out(alone)[0]["fused"] == PRIORS["fused"]
    assert leave_one_source_out(rows)[0]["fused"] != PRIORS["fused"]


def test_a_row_that_ran_pulls_the_fullest_rank_below_its_device():
    row = read(pp="2", mbs="8", source="bigscience experiments/tr3m-1B3.md", mem_gb="15.3")
    roomy, tight = (
        fit_memory([replace(row, device_bytes=size * GIB)])["softmax"] for size in (80.0, 16.0)
    )
    used = [memory(cases_of([row.case]), found).device_used[0] for found in (roomy, tight)]
    assert used[1] < used[0]


def test_shipped_constants_are_the_fit_to_the_open_rows(rows: list[MemoryRow]):
    for stack, found in fit_memory(rows).items():
        wanted = [getattr(found, name) for name in (*FITTED, "log_sd")]
        shipped = [getattr(FRAMEWORKS[stack], name) for name in (*FITTED, "log_sd")]
        assert shipped == pytest.approx(wanted, rel=0.03), stack


def test_published_memories_are_met_within_ten_percent_in_the_middle(rows: list[MemoryRow]):
    own = [row for row in rows if row.stated_bytes]
    stated = np.array([row.stated_bytes for row in own])
    assert len(own) >= 100
    assert np.median(np.abs(as_stated(own) / stated - 1)) <= 0.05
    others = leave_one_source_out(rows)
    held = [
        as_stated([row], others[i])[0] / row.stated_bytes - 1
        for i, row in enumerate(rows) if row.stated_bytes
    ]  # fmt: skip
    assert np.median(np.abs(held)) <= 0.10


def test_the_1b3_study_runs_out_where_it_did_and_its_neighbours_do_not(rows: list[MemoryRow]):
    study = [row for row in rows if "tr3m-1B3" in row.source]
    limits = np.array([row.device_bytes for row in study])
    chances = p_oom(memory(cases_of([row.case for row in study])), limits)
    out = {
        row.id: chance for row, chance in zip(study, chances, strict=True) if not row.stated_bytes
    }
    ran = {row.id: chance for row, chance in zip(study, chances, strict=True) if row.stated_bytes}
    assert len(out) == 4 and min(out.values()) > 0.5
    assert len(ran) == 23 and max(ran.values()) < 0.5
