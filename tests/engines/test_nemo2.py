"""NeMo 2's step lines in all the forms that its releases print."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.engines.nemo2 import LOG_FORMAT
from tests.engines.promises import read, reader_of

REAL = "logs/nemo2_llama3_8b_bf16_b200_8gpu.log"


def line(
    step: int, seconds: float = 6.0, extra: str = "", start: str = "Training epoch 0, "
) -> str:
    return (
        f"{start}iteration {step}/99 | lr: 6.897e-06 | global_batch_size: 128 | "
        f"global_step: {step} | reduced_train_loss: {12 - step / 100:.4} | "
        f"train_step_timing in s: {seconds:.4}{extra} | consumed_samples: {128 * (step + 1)}\n"
    )


check = reader_of("nemo2")


def test_the_real_log_is_read_as_a_person_reads_it(reference_data: Path):
    log = read(LOG_FORMAT, (reference_data / REAL).read_bytes())
    steps = log.steps()
    assert steps.index.tolist() == [45, 46, 47, 48, 49]
    assert steps["step_time_s"].tolist() == [6.08, 6.061, 6.082, 6.071, 6.06]
    assert steps["loss"] == pytest.approx([11.96] * 5)
    assert steps["flops_per_s_per_device"] == pytest.approx(
        [1.249e15, 1.252e15, 1.248e15, 1.250e15, 1.253e15]
    )
    assert steps["global_batch"].tolist() == [128.0] * 5
    assert steps["reserved_bytes"] == pytest.approx([127_785_762_816] * 5)
    assert steps["allocated_bytes"] == pytest.approx([115_792_977_920] * 5)
    assert log.facts == {"total_steps": 100}
    assert log.resolution_s == pytest.approx(0.001)
    assert log.incomplete_reason is None


@pytest.mark.parametrize("width", [80, 100, 133])
@pytest.mark.parametrize("other", ["", "Saving checkpoint: done\n"])
def test_records_that_a_terminal_has_wrapped(width: int, other: str):
    texts = [line(step, 6 + step / 100) for step in range(40)]
    wrapped = "".join(
        "\n".join(text[k : k + width] for k in range(0, len(text), width)) + other for text in texts
    )
    whole, log = check("".join(texts)).steps(), check(wrapped).steps()

    assert LOG_FORMAT.step_line.search(wrapped.encode())
    assert log.index.tolist() == whole.index.tolist()
    for name in ("step_time_s", "loss", "global_batch"):
        assert log[name].tolist() == whole[name].tolist()


def test_lines_wrapped_between_words():
    record = line(3).replace(" | train", "\n| train").replace(" | global_step", " |\nglobal_step")
    assert check(record + line(4)).steps()["step_time_s"].tolist() == [6.0, 6.0]


def test_the_flops_may_be_missing():
    steps = check("".join(line(step) for step in range(5))).steps()
    assert steps.index.tolist() == [0, 1, 2, 3, 4]
    assert not steps.known("flops_per_s_per_device")


def test_tokens_per_second_are_of_one_device():
    steps = check(line(0, extra=" | tokens_per_sec_per_gpu: 6.859e+03")).steps()
    assert steps["tokens_per_s_per_device"].tolist() == [6859.0]


def test_the_older_names_of_memory():
    text = line(49, 12.39).replace(
        " | reduced", " | peak_memory_usage: 70833405952 | memory_allocated: 44271689728 | reduced"
    )
    steps = check(text).steps()
    assert steps["reserved_bytes"] == pytest.approx([70_833_405_952])
    assert not steps.known("allocated_bytes")


def test_both_names_of_memory_in_one_log():
    old = line(0).replace(" | reduced", " | peak_memory_usage: 1000 | reduced")
    new = line(1).replace(" | reduced", " | max_memory_reserved: 3000 | reduced")
    assert check(old + new).steps()["reserved_bytes"].tolist() == [1000.0, 3000.0]


def test_fine_tuning_lines_may_lack_the_epoch():
    assert check(line(7, start="")).steps().index.tolist() == [7]


def test_a_first_line_without_samples_or_time():
    first = (
        line(0)
        .replace(" | train_step_timing in s: 6.0", "")
        .replace(" | consumed_samples: 128", "")
    )
    steps = check(first + line(1)).steps()
    assert steps.index.tolist() == [0, 1]
    assert np.isnan(steps["step_time_s"]).tolist() == [True, False]


def test_iterations_that_begin_again_with_each_epoch_go_on_as_global_steps():
    lines = [
        f"Training epoch {epoch}, iteration {n}/2 | lr: 1e-05 | global_step: {3 * epoch + n} | "
        f"reduced_train_loss: 1.5 | train_step_timing in s: {epoch}.{n}5\n"
        for epoch in range(2)
        for n in range(3)
    ]
    steps = check("".join(lines)).steps()
    assert steps.index.tolist() == [0, 1, 2, 3, 4, 5]
    assert steps["step_time_s"].tolist() == [0.05, 0.15, 0.25, 1.05, 1.15, 1.25]


def test_iterations_counted_from_one_end_with_the_total():
    text = line(49).replace("iteration 49/99", "iteration 50/100")
    log = check(text)
    assert log.steps().index.tolist() == [49]
    assert log.facts["total_steps"] == 100


def test_lines_without_a_global_step_are_numbered_by_their_iteration():
    assert check(line(7).replace("global_step: 7 | ", "")).steps().index.tolist() == [7]


def test_a_printer_that_averages_leaves_gaps():
    assert check("".join(line(n) for n in range(9, 60, 10))).steps().index.tolist() == [
        9,
        19,
        29,
        39,
        49,
        59,
    ]


def test_two_records_on_one_physical_line():
    assert check(line(1).rstrip("\n") + line(2)).steps().index.tolist() == [1, 2]


def test_validation_figures_stand_behind_without_harm():
    text = line(28).rstrip("\n") + " | val_loss: 2.861 | val_ppl: 17.57\n"
    steps = check(text + "Validation: iteration 1/50\n").steps()
    assert steps.index.tolist() == [28]
    assert steps["loss"] == pytest.approx([11.72])


def test_megatrons_lines_are_not_taken_for_its_own():
    text = (
        " iteration 10000001/50000000 | consumed samples: 1 | elapsed time per iteration (ms): 5\n"
    )
    assert len(check(text)) == 0
    assert LOG_FORMAT.step_line.search(text.encode()) is None


def test_four_digits_are_the_resolution():
    assert check(line(0, 12.39)).resolution_s == pytest.approx(0.01)
    assert check(line(0, 6.08)).resolution_s == pytest.approx(0.001)
    assert check(line(0, 0.1893)).resolution_s == pytest.approx(0.0001)


def test_the_release_the_ranks_and_the_end():
    text = (
        "NVIDIA Release 25.07 (build 1)\n"
        "[default0]:Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/16\n"
        f"{line(99)}`Trainer.fit` stopped: `max_steps=100` reached.\n"
    )
    log = check(text)
    assert log.facts == {"framework_version": "25.07", "num_devices": 16, "total_steps": 100}
    assert log.end_line and log.end_line.endswith("reached.")
