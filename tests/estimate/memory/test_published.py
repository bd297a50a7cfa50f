"""Published memories: reading them, and comparing like with like."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.estimate.fit.published import UnsupportedRowError
from paceline.estimate.memory.device_memory import memory, p_oom, rank_memory, verdict
from paceline.estimate.model.case import cases_of
from paceline.estimate.validation import (
    GIB,
    MORE_STAGES,
    NO_MEMORY,
    PublishedMemory,
    memory_as_reported,
    read_memory_row,
)

GPT = {
    "id": "one", "source": "a table (via a copy)", "model": "GPT", "layers": "24", "hidden": "2048",
    "heads": "16", "vocab": "50257", "seq_len": "2048", "gpu": "V100-SXM2-32GB", "num_gpus": "8",
    "dtype": "fp16", "gbs": "512", "mbs": "1", "tp": "1", "pp": "1", "zero": "1",
    "recompute": "full",
    "attention_impl": "fused-softmax", "mem_gb": "16", "notes": "", "step_time_s": "29",
}  # fmt: skip


def read(**changes: str) -> PublishedMemory:
    return read_memory_row({**GPT, **changes})


def test_a_row_is_read_with_its_tied_head_positions_and_device():
    row = read()
    assert row.source == "a table"
    assert row.reported_bytes == 16 * GIB
    assert row.device_bytes == 34089205760
    assert (row.case.tied, row.case.positions, row.case.moment_bytes) == (True, 2048, 4)


def test_notes_tell_of_running_out_and_of_other_optimizers():
    assert read(mem_gb="", notes="OOM; at once", step_time_s="").reported_bytes is None
    assert read(notes="--use-bnb-optimizer").case.moment_bytes == 1
    assert read(notes="baseline w/o bnb").case.moment_bytes == 4
    assert read(notes="bf16 optimizer w/ fp32 grad accum").case.summed_gradient_bytes == 4


def test_a_test_of_megatron_has_what_its_configuration_sets_and_the_table_leaves_out():
    large = read(table_or_path="gpt/gpt3_7b_tp4_pp1_memory_speed/golden.json").case
    assert (large.vocab, large.tied) == (131073, False)
    split = "gpt/gpt3_mcore_te_tp1_pp4_vp2_account_for_embedding_loss_in_pipeline_split/golden.json"
    assert (read(table_or_path=split).case.vp, read(table_or_path=split).case.tied) == (2, False)
    fused = read(table_or_path="gpt/gpt3_mcore_te_tp2_pp2_cross_entropy_loss_fusion/golden.json")
    assert fused.case.more_logit_bytes == 4
    assert read(table_or_path="gpt/gpt3_mcore_te_tp1_pp1/golden.json").case.tied


def test_a_loss_that_holds_more_of_a_logit_needs_so_much_more():
    row = read(heads="32", attention_impl="flash", recompute="full").case
    more = replace(row, more_logit_bytes=4.0)
    usual, grown = (rank_memory(cases_of([case]), -1).logits[0] for case in (row, more))
    assert grown - usual == pytest.approx(4 * 2048 * row.vocab)


def test_torchtitan_compiles_its_loss_from_2025_on():
    path = "benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"
    assert read(table_or_path=path).case.more_logit_bytes == -10
    assert read(table_or_path="benchmarks/llama3_h100_202412.md").case.more_logit_bytes == 0


def test_the_176b_runs_waited_for_each_kernel():
    assert read(source="bigscience train/tr11-176B-ml/chronicles-prequel.md").case.blocking_launches
    assert not read(source="bigscience experiments/tr3m-1B3.md").case.blocking_launches


def test_no_more_is_stated_than_a_device_has():
    row = read(pp="1", mbs="64")
    assert memory(cases_of([row.case])).device_used[0] > row.device_bytes
    assert memory_as_reported([row])[0] == row.device_bytes


def test_a_variant_with_more_memory_than_the_catalogs_keeps_its_own():
    assert read(gpu="H100-SXM-96GB-HBM2e-500W").device_bytes == 96e9


@pytest.mark.parametrize(
    ("changes", "reason"), [({"mem_gb": ""}, NO_MEMORY), ({"pp": "64"}, MORE_STAGES)]
)
def test_rows_that_say_nothing_are_left_out_with_the_reason(changes: dict[str, str], reason: str):
    with pytest.raises(UnsupportedRowError, match=reason):
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
        assert memory_as_reported([row]).tolist() == pytest.approx(wanted.tolist())
    assert memory_as_reported([study])[0] < memory_as_reported([megatron])[0]


def test_the_row_that_its_study_calls_borderline_is_called_so(rows: list[PublishedMemory]):
    (row,) = [row for row in rows if row.id == "seed4-017"]
    (chance,) = p_oom(memory(cases_of([row.case])), row.device_bytes)
    assert verdict(float(chance)) == "borderline"


def test_published_memories_are_met_within_five_percent_in_the_middle(rows: list[PublishedMemory]):
    own = [row for row in rows if row.reported_bytes]
    stated = np.array([row.reported_bytes for row in own])
    assert len(own) >= 100
    assert np.median(np.abs(memory_as_reported(own) / stated - 1)) <= 0.05


def test_the_1b3_study_runs_out_where_it_did_and_its_neighbours_do_not(rows: list[PublishedMemory]):
    study = [row for row in rows if "tr3m-1B3" in row.source]
    limits = np.array([row.device_bytes for row in study])
    chances = p_oom(memory(cases_of([row.case for row in study])), limits)
    out = {
        row.id: chance for row, chance in zip(study, chances, strict=True) if not row.reported_bytes
    }
    ran = {row.id: chance for row, chance in zip(study, chances, strict=True) if row.reported_bytes}
    assert len(out) == 4 and min(out.values()) > 0.5
    assert len(ran) == 23 and max(ran.values()) < 0.5
