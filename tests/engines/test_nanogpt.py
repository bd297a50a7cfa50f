"""nanoGPT's lines, and what only looks like them."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.engines import log_format
from tests.engines.promises import parsed, reader_of
from tests.engines.recent_samples import NANOGPT_HEAD


# After train.py of karpathy/nanoGPT, 2022-2025.
def line(step: int, ms: float = 250.12, share: str = "12.34%", loss: str = "4.1234") -> str:
    return f"iter {step}: loss {loss}, time {ms:.2f}ms, mfu {share}\n"


check = reader_of("nanogpt")


def test_a_line_is_read_to_its_figures():
    log = check(line(10))
    steps = log.steps()
    assert steps.index.tolist() == [10]
    assert steps["step_time_s"] == pytest.approx([0.25012])
    assert steps["loss"] == pytest.approx([4.1234]) and steps["mfu"] == pytest.approx([0.1234])
    assert log.resolution_s == pytest.approx(1e-5)
    (remark,) = log.remarks
    assert remark.startswith("the log's MFU is a moving average, by default relative to an A100's")


def test_an_mfu_that_is_not_known_yet_is_none():
    steps = check(line(0, share="-100.00%") + line(10)).steps()
    assert np.isnan(steps["mfu"]).tolist() == [True, False]


def test_the_first_version_had_no_mfu():
    text = "iter 10: loss 4.1234, time 250.12ms\n"
    assert log_format("nanogpt").step_line.search(text.encode())
    assert check(text).steps()["step_time_s"] == pytest.approx([0.25012])


def test_the_settings_are_kept_and_make_the_batch():
    log = check(NANOGPT_HEAD.decode() + line(0))
    assert log.facts == {
        "log_interval": 1,
        "seq_len": 1024,
        "micro_batch": 16,
        "num_parameters": 123_590_000,
        "global_batch": 512,
    }
    assert log.steps()["tokens"].tolist() == [524_288.0]


def test_a_setting_of_a_file_is_kept_and_an_expression_is_not():
    text = (
        "batch_size = 12\nblock_size = 1024 # tokens\nmax_iters = 600 * 1000\ndtype = 'float16'\n"
    )
    facts = check(text + line(0)).facts
    assert facts["micro_batch"] == 12 and facts["seq_len"] == 1024 and facts["dtype"] == "float16"
    assert "total_steps" not in facts


def test_the_parts_of_the_batch_are_kept():
    text = (
        "tokens per iteration will be: 262,144\n"
        "breaks down as: 4 grad accum steps * 8 processes * 8 batch size * 1024 max seq len\n"
    )
    facts = check(text + line(0)).facts
    assert facts["num_devices"] == 8 and facts["micro_batch"] == 8
    assert facts["gradient_accumulation"] == 4 and facts["global_batch"] == 256


def test_the_figures_of_a_whole_log(tmp_path):
    evaluated = line(500, 54_143.31)
    text = NANOGPT_HEAD.decode() + "".join(line(n) for n in range(0, 500, 10)) + evaluated
    document = parsed(tmp_path / "a.log", text)
    assert document["engine"] == "nanogpt" and document["status"] == "ok"
    assert document["step_time_s"]["median"] == pytest.approx(0.25012, rel=1e-4)
    assert document["tokens_per_s"] == pytest.approx(524_288 / 0.25012, rel=1e-4)
    assert document["window"]["n"] > 40, "a line of every tenth step is of that step alone"


def test_tokens_are_told_where_only_their_number_a_step_is_known(tmp_path):
    text = "tokens per iteration will be: 491,520\n" + "".join(line(n) for n in range(20))
    document = parsed(tmp_path / "a.log", text)
    assert document["tokens_per_s"] == pytest.approx(491_520 / 0.25012, rel=1e-4)


@pytest.mark.parametrize(
    "text",
    [
        "On an A100 you will see `iter 10: loss 4.1234, time 250.12ms, mfu 12.34%` and so on.\n",
        'print(f"iter {iter_num}: loss {lossf:.4f}, time {dt*1000:.2f}ms, mfu {m*100:.2f}%")\n',
        "At iter 10: loss 4.1234, time 250.12ms, mfu 12.34% of the peak is reached.\n",
        "iter 10: the loss is 4.1 after a time of 250.12ms\n",
    ],
    ids=["quoted", "program", "sentence", "words"],
)
def test_a_sentence_about_such_a_line_is_none(text: str, tmp_path):
    assert parsed(tmp_path / "a.log", 20 * text)["status"] == "not-a-training-log"
    assert len(check(text)) == 0
