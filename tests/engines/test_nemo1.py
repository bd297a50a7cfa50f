"""NeMo 1's progress bars: rounded numbers, bars drawn again, and what stands around them."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.engines.nemo1 import LOG_FORMAT
from paceline.logs.facts import UserSettings
from paceline.logs.parser import parse_log
from tests.engines.promises import check_read, read, reader_of

REAL = "logs/nemo1_progressbar_variants.log"
REAL_LINES = (
    # step, loss, seconds, global batch, steps of the run
    (99, 6.37, 11.2, 128, 100),
    (99, 6.19, 11.1, 128, 100),
    (49, 11.7, 12.8, 252, 50),
    (49, 0.186, 24.0, 1024, 50),
    (99, 0.0172, 3.13, 256, 100),
    (50, 6.13, 5.9, 1536, 50),
    (5, 11.5, 49.5, 2048, 15),
    (6023, 0.0252, 2.59, 16, 10_000),
    (1999, 0.139, 68.7, None, 2000),
    (1999, 2.6, 1.9, None, 603_000),
    (1, 0.674, 3.37, 64, None),
)
"""Read by eye; every line of the file is the end of another run."""


def shown(value: float) -> str:
    """A number as the bar shows it: three digits where that is shorter, padded to five places."""
    text = f"{value:.3g}".replace("e+0", "e+")
    text = text if len(text) < len(str(value)) else str(value)
    if "e" in text:
        return text
    return f"{text}{'' if '.' in text else '.'}00000"[: max(5, len(text))]


def bar(
    step: int, seconds: float = 2.5, batch: int = 128, of: int = 500_000, loss: float = 2.5
) -> str:
    """The bar after step `step`, counted from 0."""
    return (
        f"Epoch 0: :  10%|█         | {step + 1}/{of} [02:15<20:00, v_num=, "
        f"reduced_train_loss={shown(loss)}, global_step={shown(float(step))}, "
        f"consumed_samples={shown(float(batch * (step + 1)))}, "
        f"train_step_timing in s={shown(seconds)}]"
    )


def bare(step: int, rate: str = "41.36s/it") -> str:
    """The bar of older versions, which times no step."""
    return (
        f"Epoch 0:   1%|          | {step + 1}/77225 [9:07:58<878:01:48, {rate}, loss=3.1, v_num=, "
        f"reduced_train_loss=3.090, global_step={shown(float(step))}, "
        f"consumed_samples={shown(2048.0 * (step + 1))}]\n"
    )


@pytest.mark.parametrize(("rate", "seconds"), [("41.36s/it", 41.36), (" 2.50it/s", 0.4)])
def test_the_bar_alone_is_the_mean_of_the_run(tmp_path: Path, rate: str, seconds: float):
    path = tmp_path / "train.log"
    path.write_text("".join(bare(step, rate) for step in range(785, 795)))
    document = parse_log(path, UserSettings()).document

    assert (document.engine, document.status, document.n_steps) == ("nemo1", "ok", 10)
    assert document.window is not None and document.window.rule == "as printed"
    assert document.step_time_s is not None
    assert document.step_time_s.median == pytest.approx(seconds)
    assert [w for w in document.warnings if "the bar's mean over all steps" in w]


def test_a_bar_that_times_its_step_goes_before_its_rate():
    log = check(bare(3) + bar(4, 2.5))
    assert "steps_per_s" not in log.figures and log.steps()["step_time_s"][-1] == 2.5


check = reader_of("nemo1")


def test_every_real_line_is_read_as_a_person_reads_it(reference_data: Path):
    lines = (reference_data / REAL).read_bytes().splitlines(keepends=True)
    assert len(lines) == len(REAL_LINES)
    for line, (step, loss, seconds, batch, total) in zip(lines, REAL_LINES, strict=True):
        log = check_read(LOG_FORMAT, line)
        steps = log.steps()
        assert steps.index.tolist() == [step]
        assert steps["loss"][0] == pytest.approx(loss)
        assert steps["step_time_s"][0] == pytest.approx(seconds)
        assert log.facts.get("global_batch") == batch
        assert log.facts.get("total_steps") == total


def test_the_real_file_as_one_log_has_all_its_lines(reference_data: Path):
    log = read(LOG_FORMAT, (reference_data / REAL).read_bytes())
    assert len(log) == len(REAL_LINES)
    assert log.resolution_s == pytest.approx(0.01)
    steps = log.steps()
    assert steps.index[-1] == 1
    assert steps["samples_per_s"][-1] == pytest.approx(14.6)
    assert "samples/sec is based on batch_time" in " ".join(log.remarks), "64 / 4.4 = 14.5"


def test_bars_share_a_physical_line_by_carriage_returns():
    log = check("\r".join(bar(step, 2 + step / 100) for step in range(30)))
    steps = log.steps()
    assert steps.index.tolist() == list(range(30))
    assert steps["step_time_s"][7] == pytest.approx(2.07)
    assert log.facts["global_batch"] == 128


def test_a_printed_caret_m_separates_bars_too():
    log = check("^M".join(bar(step) for step in range(5)) + "\n")
    assert log.steps().index.tolist() == [0, 1, 2, 3, 4]


def test_bars_glued_to_each_other_and_to_other_text():
    text = (
        f"{bar(0)}{bar(1)}dation DataLoader 0: : 51it [00:20,  2.53it/s]{bar(2)}"
        "[NeMo I 2024-06-17 08:36:41 nlp_overrides:480] Removing checkpoint [1/2]\n"
    )
    assert check(text).steps().index.tolist() == [0, 1, 2]


def test_a_bar_drawn_again_counts_once_and_the_last_time():
    again = bar(1, loss=2.25).replace("]", ", val_loss=2.100]")
    log = check("\r".join([bar(0), bar(1), bar(1), again, bar(2)]))
    steps = log.steps()
    assert steps.index.tolist() == [0, 1, 2]
    assert steps["loss"].tolist() == [2.5, 2.25, 2.5]


def test_rounded_step_numbers_are_made_whole_by_the_bars_own_count():
    steps = check("\r".join(bar(step) for step in range(1990, 2010))).steps()
    assert "global_step=2e+3" in bar(1999) and "global_step=2e+3" in bar(2001)
    assert steps.index.tolist() == list(range(1990, 2010))


def test_beyond_a_hundred_thousand_every_number_is_rounded():
    text = "\r".join(bar(step) for step in range(123_450, 123_470))
    assert "global_step=1.23e+5, consumed_samples=1.58e+7" in text
    log = check(text)
    assert log.steps().index.tolist() == list(range(123_450, 123_470))


def test_samples_with_three_digits_tell_no_batch():
    log = check("\r".join(bar(step, batch=640) for step in range(1990, 2000)))
    assert "global_batch" not in log.facts


def test_a_batch_that_changes_is_none_of_the_run():
    grown = bar(1).replace("samples=256.0", "samples=384.0")
    assert "global_batch" not in check("\r".join([bar(0), grown, bar(2)])).facts


def test_a_resumed_run_tells_its_batch_by_differences():
    lines = []
    for step in range(50, 55):
        before = f"consumed_samples={shown(128.0 * (step + 1))}"
        lines.append(bar(step).replace(before, f"consumed_samples={300 + 256 * (step - 49)}.0"))
    assert check("\r".join(lines)).facts["global_batch"] == 256


def test_bars_without_a_step_number_are_counted_over_the_epochs():
    lines = [
        f"Epoch {epoch}: : 50%|██ | {n}/4 [00:04<00:00, reduced_train_loss=2.000, "
        f"train_step_timing in s={n}.500]"
        for epoch in range(2)
        for n in range(1, 5)
    ]
    log = check("\r".join(lines))
    assert log.steps().index.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert log.steps()["step_time_s"].tolist() == [1.5, 2.5, 3.5, 4.5] * 2


def test_bars_without_a_total_are_counted_as_well():
    lines = [f"Epoch 1: : {n}it [00:04,  4.36s/it, train_step_timing in s=3.370]" for n in (1, 2)]
    assert check("\r".join(lines)).steps().index.tolist() == [1, 2]


def test_older_bars_and_their_other_names():
    text = (
        "Epoch 0:   2%|▏ | 20/1000 [01:00<49:00,  3.00s/it, loss=7.25, v_num=3, "
        "global_step=19.0, consumed_samples=5120.0, peak_memory_usage=6.91e+10, "
        "grad_norm=1.500, train_step_timing=3.01]\n"
    )
    log = check(text)
    steps = log.steps()
    assert steps.index.tolist() == [19] and steps["loss"][0] == 7.25
    assert steps["grad_norm"][0] == 1.5 and steps["reserved_bytes"][0] == pytest.approx(6.91e10)
    assert log.facts["global_batch"] == 256


def test_three_digits_are_the_resolution_whatever_the_zeros_say():
    assert check(bar(0, 11.2) + "\n").resolution_s == pytest.approx(0.1)
    assert check(bar(0, 5.9) + "\n").resolution_s == pytest.approx(0.01)
    assert "s=5.900]" in bar(0, 5.9)


CONFIGURATION = """
NVIDIA Release 24.05 (build 94715567)
    trainer:
      devices: 8
      num_nodes: 4
      precision: bf16-mixed
      max_steps: 100
    model:
      micro_batch_size: 2
      global_batch_size: 256
      encoder_seq_length: 4096
      tensor_model_parallel_size: 4
      pipeline_model_parallel_size: 2
      virtual_pipeline_model_parallel_size: null
      num_layers: 32
      hidden_size: ${model.encoder.size}
      data:
        train_ds:
          micro_batch_size: 99
"""


def test_the_configuration_before_the_first_step_is_kept():
    log = check(CONFIGURATION + bar(0, batch=256) + "\n      num_layers: 77\n")
    assert log.facts == {
        "num_devices": 32,
        "dtype": "bf16",
        "total_steps": 100,
        "micro_batch": 2,
        "global_batch": 256,
        "seq_len": 4096,
        "tp": 4,
        "pp": 2,
        "num_layers": 32,
        "framework_version": "24.05",
    }


def test_the_ranks_that_register_go_before_the_configuration():
    text = "Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/64\n      fp8: true\n"
    log = check(text + CONFIGURATION + bar(0) + "\n")
    assert log.facts["num_devices"] == 64
    assert log.facts["dtype"] == "fp8"


def test_the_trainers_last_word_is_kept():
    log = check(bar(49, of=9) + "\n`Trainer.fit` stopped: `max_steps=50` reached.\n")
    assert log.end_line == "`Trainer.fit` stopped: `max_steps=50` reached."
    assert log.facts["total_steps"] == 50
