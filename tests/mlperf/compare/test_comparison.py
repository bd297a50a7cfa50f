"""Scores compared with published results: only like with like, and never a tiny variant."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.mlperf.compare.comparison import (
    StrongScalingPoint,
    compare,
    point_of_published,
    scaling_steps,
)
from paceline.mlperf.compare.published_scores import published_scores, read_score, scores_of_round
from paceline.mlperf.score.run_set import score
from paceline.mlperf.submission.package import RuleViolationError
from tests.mlperf.samples import TEN, line, submission
from tests.mlperf.submissions import description, ten_runs


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return ten_runs(tmp_path / "runs")


def test_a_score_stands_beside_results_on_as_many_of_the_same_kind(runs: Path):
    comparison = compare([runs], num_devices=[8], accelerator="NVIDIA H200")
    (compared,) = comparison.scores

    assert (compared.score_minutes, compared.num_devices, compared.accelerator) == (
        pytest.approx(10.1875),
        8,
        "H200-SXM",
    )
    assert compared.peers and all(peer.round == "v5.1" for peer in compared.peers)
    for peer in compared.peers:
        assert peer.time_ratio == pytest.approx(10.1875 / peer.score_minutes)
        assert (peer.official, peer.is_same_result) == (True, False)
    assert (compared.official, comparison.official, comparison.notes) == (False, False, ())
    assert "unofficial" in compared.label and comparison.published_scaling == ()


def test_a_score_that_was_printed_as_json_compares_alike(runs: Path, tmp_path: Path):
    path = tmp_path / "score.json"
    path.write_text(score(runs, num_devices=8).model_dump_json())
    printed, read = (
        compare([path], accelerator="H200"),
        compare([runs], num_devices=[8], accelerator="H200"),
    )

    assert printed.scores[0].peers == read.scores[0].peers
    path.write_text("{}")
    with pytest.raises(UserError, match=r"is not a score: \w+: is required but missing; allowed"):
        compare([path])
    with pytest.raises(UserError, match="cannot be read"):
        compare([tmp_path / "no.json"])


def test_a_printed_score_has_the_flops_of_the_devices_that_are_given(runs: Path, tmp_path: Path):
    path = tmp_path / "score.json"
    rates = {"overall_samples_per_s": 2.0, "flops_per_sample": 4e15}
    path.write_text(score(runs).model_copy(update=rates).model_dump_json())
    for count in (4, 8):
        scored = read_score(path, None, count)
        assert scored.model_flops_per_s_per_device == pytest.approx(8e15 / count)
        assert scored.model_flops_reason is None
    (compared,) = compare([path], num_devices=[4]).scores
    assert compared.model_flops_per_s_per_device == pytest.approx(2e15)


def test_two_sizes_give_the_efficiency_and_its_parts(runs: Path, tmp_path: Path):
    more = ten_runs(tmp_path / "more", global_batch_size=16, samples=4224)
    comparison = compare([more, runs], num_devices=[32, 8], accelerator="H200")
    base, step = comparison.scaling

    assert (base.num_devices, step.num_devices, step.global_batch) == (8, 32, 16)
    assert step.efficiency == pytest.approx(8 / 32)  # as fast with four times the devices
    assert step.samples_factor == pytest.approx(3456 / 4224)
    assert step.samples_factor * step.throughput_factor == pytest.approx(step.efficiency)


def test_what_is_missing_for_a_comparison_is_said(runs: Path, tmp_path: Path):
    assert "set --gpus" in compare([runs]).notes[0]
    assert "set --accelerator" in compare([runs], num_devices=[8]).notes[0]
    alone = compare([runs], num_devices=[7], accelerator="GB300").notes[0]
    assert "no published result on 7 x GB300 (available sizes: 8, 72, 512)" in alone
    other = compare([runs], num_devices=[8], accelerator="H100")
    assert other.scores[0].accelerator == "H100-SXM"
    assert "8 x H100-SXM (available types: B200, B300" in other.notes[0]
    two = compare([runs, runs], num_devices=[8, 8], accelerator="H200")
    assert two.scaling == () and "scaling needs two sets" in two.notes[0]

    few = submission(tmp_path / "few", TEN[:3])
    assert "no score, incomplete: 3 of the 10 runs" in compare([few]).notes[0]


def test_an_accelerator_that_nobody_knows_is_refused(runs: Path):
    words = r"Wafer 9: is in neither the published results nor the catalog; allowed: .*GB200, "
    with pytest.raises(UserError, match=words):
        compare([runs], num_devices=[8], accelerator="Wafer 9")


def test_the_description_of_a_submission_names_the_accelerators(tmp_path: Path):
    place = ten_runs(tmp_path / "Example/results/box/llama2_70b_lora")
    description(
        tmp_path / "Example/systems/box.json",
        number_of_nodes="1",
        accelerator_model_name="AMD Instinct MI325X",
    )

    compared = compare([place]).scores[0]
    assert (compared.num_devices, compared.accelerator, len(compared.peers)) == (8, "MI325X", 1)


@pytest.mark.parametrize(
    "changed", [{"submission_platform": "tiny box"}, {"note": "not an MLPerf result"}]
)
def test_a_small_sibling_is_refused_with_the_reason(runs: Path, changed: dict[str, str]):
    ten_runs(runs, **changed)

    with pytest.raises(
        RuleViolationError, match=r"result_0\.txt: cannot be compared with published results"
    ):
        compare([runs])


def test_runs_on_made_up_data_and_their_scores_are_refused(runs: Path, tmp_path: Path):
    path = tmp_path / "score.json"
    tiny = score(runs).model_copy(update={"system": "tiny box"})
    path.write_text(tiny.model_dump_json())
    with pytest.raises(RuleViolationError, match="is not an MLPerf result"):
        compare([path])

    log = runs / "result_5.txt"
    log.write_text(log.read_text() + line("data_source", "synthetic") + "\n")
    with pytest.raises(RuleViolationError, match="it trained on synthetic data"):
        compare([runs])


def test_scores_of_two_benchmarks_or_too_few_counts_are_refused(runs: Path, tmp_path: Path):
    other = submission(tmp_path / "other", TEN, benchmark="flux1", batch=1024, samples=8650752)

    with pytest.raises(UserError, match="cannot compare different benchmarks: llama2_70b"):
        compare([runs, other])
    with pytest.raises(UserError, match="--gpus: has 1 value for 2 folders"):
        compare([runs, runs], num_devices=[8])


def test_published_logs_are_told_from_other_results(reference_data: Path):
    logs = reference_data / "mlperf/logs/v5.1"
    small = logs / "NVIDIA/theia_ngpu8_ngc25.09_nemo/llama31_8b"
    large = logs / "Lambda/gb300_n18_ngc25.04_nemo/llama31_8b"
    comparison = compare([small, large])

    assert [(compared.num_devices, compared.accelerator) for compared in comparison.scores] == [
        (8, "GB300"),
        (72, "GB300"),
    ]
    for compared in comparison.scores:
        (same,) = [peer for peer in compared.peers if peer.is_same_result]
        assert compared.score_minutes == pytest.approx(same.score_minutes, abs=1e-4)
        assert compared.samples_per_s == pytest.approx(same.samples_per_s, rel=1e-5)
    # Samples 98%, throughput 54% of what nine times the devices could do.
    assert comparison.scaling[1].efficiency == pytest.approx(0.530, abs=0.001)
    assert comparison.scaling[1].samples_factor == pytest.approx(0.978, abs=0.002)
    (theirs,) = comparison.published_scaling
    assert theirs.submitter == "NVIDIA" and [s.num_devices for s in theirs.steps] == [8, 72, 512]


SMALL = StrongScalingPoint("small", True, 8, 80.0, 160_000.0, 36.0, 16)
LARGE = StrongScalingPoint("large", False, 64, 16.0, 200_000.0, 230.4, 64)


def test_the_loss_is_split_into_samples_and_throughput():
    base, step = scaling_steps([LARGE, SMALL])

    assert (base.name, base.efficiency, base.samples_factor) == ("small", 1.0, 1.0)
    assert step.speedup == pytest.approx(5.0)
    assert step.efficiency == pytest.approx(5 * 8 / 64)
    assert step.samples_factor == pytest.approx(160 / 200)
    assert step.throughput_factor == pytest.approx((200_000 / 16 / 64) / (160_000 / 80 / 8))
    assert step.training_factor == pytest.approx((230.4 / 64) / (36.0 / 8))
    assert step.official is False and base.official is True


def test_the_parts_multiply_to_the_whole():
    for step in scaling_steps([SMALL, LARGE]):
        assert step.training_factor and step.other_factor
        parts = step.samples_factor * step.training_factor * step.other_factor
        assert parts == pytest.approx(step.efficiency, rel=1e-12)


def test_without_training_rates_the_throughput_stays_whole():
    bare = StrongScalingPoint("bare", True, 64, 16.0, 200_000.0)
    _, step = scaling_steps([SMALL, bare])

    assert (step.training_factor, step.other_factor) == (None, None)
    assert step.samples_factor * step.throughput_factor == pytest.approx(step.efficiency)


@pytest.mark.parametrize("points", [[], [SMALL], [SMALL, SMALL]])
def test_one_size_scales_nothing(points: list[StrongScalingPoint]):
    assert scaling_steps(points) == []


def test_published_results_show_that_larger_batches_need_more_samples():
    published = scores_of_round(published_scores(), "llama31_8b", "5.1.0", "closed")
    points = [point_of_published(result) for result in published if "theia" in result.system]
    steps = scaling_steps([point for point in points if point])

    assert [step.num_devices for step in steps] == [8, 72, 512]
    assert [step.global_batch for step in steps] == [16, 36, 64]
    efficiencies = [step.efficiency for step in steps]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert steps[2].samples_factor == pytest.approx(0.793, abs=0.001)
    assert steps[2].efficiency == pytest.approx(67.3733 * 8 / (5.1637 * 512), rel=1e-3)
