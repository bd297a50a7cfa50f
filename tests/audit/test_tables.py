"""What the audit says of the tables that come with Paceline."""

from __future__ import annotations

import pytest

from paceline.audit.tables import Audit, AuditFinding, audit, audit_rows, missing_ranks, read_ranks
from paceline.core.errors import UserError
from paceline.files import references


def audited(name: str) -> Audit:
    return audit(name).audit


def cells(findings: tuple[AuditFinding, ...]) -> set[tuple[str, str]]:
    return {(finding.row, finding.column) for finding in findings}


def test_the_known_slips_of_the_llama_recipe_are_found_and_nothing_else():
    assert cells(audited("nvidia-llama31").findings) == {
        ("llama31-70b-bf16-128", "mfu"),
        ("llama31-70b-bf16-512", "mfu"),
        ("llama31-70b-bf16-2048", "tokens_per_s"),
        ("llama31-70b-bf16-2048", "mfu"),
        ("llama31-70b-bf16-2048", "days"),
        ("llama31-70b-fp8-64-example", "seq_len"),
        ("llama31-70b-fp8-64-example", "step_time_s"),
        ("llama31-70b-profile-ranks", "ranks"),
    }


def test_the_rest_of_the_bf16_mfu_column_is_shown_with_all():
    audit_ = audited("nvidia-llama31")
    others = {
        ("llama31-70b-bf16-64", "mfu"),
        ("llama31-70b-bf16-256", "mfu"),
        ("llama31-70b-bf16-1024", "mfu"),
    }
    assert cells(audit_.minor) == others
    bf16 = [f for f in (*audit_.findings, *audit_.minor) if f.column == "mfu"]
    assert len(bf16) == 6
    assert all("989.5 TFLOP/s" in f.cause and "half of the sparse 1979" in f.cause for f in bf16)


@pytest.mark.parametrize(
    ("row", "column", "cause"),
    [
        (
            "llama31-70b-bf16-2048",
            "tokens_per_s",
            "follows from 14.92 s, the step time of llama31-70b-bf16-1024",
        ),
        (
            "llama31-70b-bf16-2048",
            "days",
            "follows from 14.92 s, the step time of llama31-70b-bf16-1024",
        ),
        ("llama31-70b-fp8-64-example", "seq_len", "two digits swapped: 8192 would be consistent"),
        (
            "llama31-70b-profile-ranks",
            "ranks",
            "rank 6 is missing from 0-15, the ranks of 2 whole nodes",
        ),
        (
            "opt-350m-512-claim",
            "scaling_efficiency",
            "is true against opt-350m-8, 8 devices, not against 1",
        ),
        (
            "opt-13b-512-claim",
            "scaling_efficiency",
            "is true against opt-13b-8, 8 devices, not against 1",
        ),
        ("bsx-002", "flops_per_s_per_device", "one digit misprinted: 45.0 would be consistent"),
        (
            "bsx-012",
            "flops_per_s_per_device",
            "follows with a global batch of 512, not the declared 2048",
        ),
        ("nvx-045", "tokens_per_s", "is 99296 of nvx-043 times 4"),
        ("nvx-054", "tokens_per_s", "follows from 0.68 s, the step time of nvx-053"),
        ("mbridge-146", "flops_per_s_per_device", "no change of a single input explains it"),
    ],
)
def test_causes_are_derived_and_specific(row: str, column: str, cause: str):
    (finding,) = [f for f in audited(row).findings if f.column == column]
    assert finding.cause == cause


def test_the_example_contradicts_its_table_and_not_itself():
    (finding,) = [
        f for f in audited("llama31-70b-fp8-64-example").findings if f.column == "step_time_s"
    ]
    assert (finding.printed, finding.recomputed) == ("11.31", 11.01)
    assert finding.difference == pytest.approx(11.31 / 11.01 - 1)
    assert "llama31-70b-fp8-64 prints 11.01" in finding.cause
    assert "the other figures of this row follow" in finding.cause


def test_the_study_of_1b3_has_four_cut_cells_and_no_finding():
    audit_ = audited("bigscience-1b3")
    assert audit_.findings == ()
    assert [(f.row, f.printed, f.recomputed_text) for f in audit_.minor] == [
        ("1b3-32gb-plain-tp1-pp1-mbs1", "44.4", "44.5"),
        ("1b3-32gb-plain-tp1-pp2-mbs1", "44.4", "44.5"),
        ("1b3-32gb-plain-tp1-pp4-mbs1", "40.8", "40.9"),
        ("1b3-32gb-plain-tp1-pp4-mbs2", "42.5", "42.6"),
    ]
    assert all("truncated" in f.cause for f in audit_.minor)


def test_the_claim_of_linear_scaling_is_held_against_one_gpu():
    audit_ = audited("lambda-1cc")
    assert cells(audit_.findings) == {
        ("opt-350m-512-claim", "scaling_efficiency"),
        ("opt-13b-512-claim", "scaling_efficiency"),
    }
    shown = {f.row: f.recomputed_text for f in audit_.findings}
    assert shown == {"opt-350m-512-claim": "96.98%", "opt-13b-512-claim": "96.62%"}


FINDINGS = {
    "bigscience-1b3": 0,
    "bigscience-large": 5,
    "lambda-1cc": 2,
    "lambda-1cc-subclusters": 0,
    "llm-foundry": 1,
    "megatron-bridge": 1,
    "megatron-golden": 0,
    "megatron-papers": 0,
    "mlperf-rcp": 0,
    "mlperf-results": 0,
    "mlperf-tiny": 0,
    "nvidia-dgxc": 9,
    "nvidia-llama31": 8,
    "nvidia-nemo": 0,
    "torchtitan": 0,
    "vtrain": 0,
}


@pytest.mark.parametrize("name", references.source_names())
def test_every_source_has_as_many_findings_as_were_examined_by_hand(name: str):
    assert len(audited(name).findings) == FINDINGS[name]


def test_impossible_axes_are_found_once_a_table():
    layouts = [f for f in audited("nvidia-dgxc").findings if f.column == "layout"]
    assert [(f.row, f.printed) for f in layouts] == [("nvx-043", "tp 1 pp 41 cp 1")]
    assert "does not fit 8, 16 or 32 devices" in layouts[0].cause


def test_the_layers_of_impossible_stages_are_counted_in_words():
    row = next(row for row in references.source("nvidia-dgxc").rows if row.id == "nvx-043")
    assert row.shape is not None
    single = row.model_copy(update={"shape": row.shape.model_copy(update={"num_layers": 1})})
    layouts = [f for f in audit_rows([single]).findings if f.column == "layout"]
    assert layouts[0].cause.endswith("and 1 layer has no 41 stages")


def test_all_tables_together_count_what_was_checked_and_what_not():
    everything = audit().audit
    rows = sum(len(source.rows) for source in references.sources().values())
    printed = sum(len(row.printed) for row in references.rows())
    assert everything.num_rows == rows
    assert sum(everything.states.values()) == printed
    assert sum(everything.unchecked_reasons.values()) == everything.states["unchecked"]
    assert everything.num_checked > 1000
    assert everything.num_following == everything.num_checked - everything.states["fails"]
    assert len(everything.findings) == sum(FINDINGS.values())


def test_a_table_or_a_row_is_judged_beside_the_rest_of_its_source():
    table = audited("nvidia-llama31-70b-text")
    assert {f.table for f in table.findings} == {"nvidia-llama31-70b-text"}
    assert audited("llama31-70b-bf16-2048").num_rows == 1
    assert len(audited("llama31-70b-bf16-2048").findings) == 3


def test_a_name_that_no_file_can_have_is_unknown():
    with pytest.raises(UserError, match="is unknown"):
        audit("x" * 5000)


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(UserError, match="did you mean 'nvidia-llama31'"):
        audit("nvidia-lama31")


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("0,1,2", [0, 1, 2]), ("0", [0]), ("0-3, 6", [0, 1, 2, 3, 6]), (" 1 , 0 ", [1, 0])],
)
def test_lists_and_spans_are_read(text: str, ranks: list[int]):
    assert read_ranks(text) == ranks


@pytest.mark.parametrize("text", ["", "a", "0,,1", "0;1", "-1", "0-99999999999"])
def test_anything_else_is_none(text: str):
    assert read_ranks(text) is None


def test_a_hole_is_found_and_only_holes():
    assert missing_ranks([0, 1, 2, 3, 4, 5, 7, 8]) == [6]
    assert missing_ranks([4, 2, 3]) == missing_ranks([5]) == missing_ranks([]) == []
