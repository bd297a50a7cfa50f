"""Logs in the form that programs print, and the values that a reader who knows the program finds.

Each test is about what is easily read wrongly: which steps a figure covers, and of which devices.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.logs.facts import UserSettings
from paceline.logs.parsed_log import ParsedLog
from paceline.logs.parser import parse_log


def parsed(folder: Path, text: str) -> ParsedLog:
    path = folder / "a.log"
    path.write_text(text, encoding="utf-8")
    return parse_log(path, UserSettings()).document


def total_steps(folder: Path) -> object:
    """Planned steps that the last log states."""
    return parse_log(folder / "a.log", UserSettings()).log.facts.get("total_steps")


def values(document: ParsedLog) -> tuple[str | None, str, float | None]:
    """Format, status and median step time."""
    times = document.step_time_s
    return document.engine, document.status, times.median if times else None


PADDLE_HEAD = """\
[2026-01-01 10:00:00,000] [    INFO] - ***** Running training *****
[2026-01-01 10:00:00,000] [    INFO] -   Instantaneous batch size per device = 4
[10:00:00,000] [    INFO] -   Total train batch size (w. parallel, distributed & accumulation) = 64
[2026-01-01 10:00:00,000] [    INFO] -   Gradient Accumulation steps = 2
[2026-01-01 10:00:00,000] [    INFO] -   Total optimization steps = 200
"""


def paddle_line(step: int, seconds: float, rates: str) -> str:
    return (
        f"[2026-01-01 10:00:09,000] [    INFO] - loss: {3 - step / 100:.4f}, learning_rate: 3e-05, "
        f"global_step: {step}, interval_runtime: {seconds:.4f}, {rates}, epoch: 0.1\n"
    )


def test_paddlenlp_prints_the_time_since_the_line_before(tmp_path: Path):
    """Ten steps take 20 s; the interval after each 50 steps includes an evaluation of 30 s."""
    text = PADDLE_HEAD
    for step in range(10, 210, 10):
        seconds = 50.0 if step % 50 == 10 and step > 10 else 20.0
        rate = f"interval_samples_per_second: {640 / seconds:.4f}, "
        rate += f"interval_tokens_per_second_per_device: {640 * 2048 / 8 / seconds:.4f}, "
        text += paddle_line(step, seconds, f"{rate}interval_steps_per_second: {10 / seconds:.4f}")
        if step % 50 == 0:
            text += "[2026-01-01 10:00:30,000] [    INFO] - eval_loss: 2.9, eval_runtime: 30.0\n"
    document = parsed(tmp_path, text + "[2026-01-01 10:09:00] [    INFO] - train_runtime: 520.0\n")
    assert values(document) == ("paddlenlp", "ok", pytest.approx(2.0))
    assert document.samples_per_s == pytest.approx(32.0)
    assert document.settings.global_batch == 64 and total_steps(tmp_path) == 200
    assert document.reported["tokens_per_s_per_device"] == pytest.approx(8192, rel=1e-3)


def test_evaluations_between_all_lines_are_subtracted(tmp_path: Path):
    """Ten steps take 20 s, and the evaluation after each line 30 s."""
    text = PADDLE_HEAD
    for step in range(10, 210, 10):
        seconds = 50.0 if step > 10 else 20.0
        rate = f"interval_samples_per_second: {640 / seconds:.4f}, "
        rate += f"interval_tokens_per_second_per_device: {640 * 2048 / 8 / seconds:.4f}, "
        text += paddle_line(step, seconds, f"{rate}interval_steps_per_second: {10 / seconds:.4f}")
        text += "[2026-01-01 10:00:30,000] [    INFO] - eval_loss: 2.9, eval_runtime: 30.0\n"
    document = parsed(tmp_path, text)
    assert values(document) == ("paddlenlp", "ok", pytest.approx(2.0))
    assert document.samples_per_s == pytest.approx(32.0)
    assert any("evaluations between step lines are subtracted" in w for w in document.warnings)


def test_a_fairseq_line_after_an_evaluation_has_no_time(tmp_path: Path):
    """The evaluation after every second line doubles the time of the next one."""
    wall_s = 0.0
    text = "2026-01-01 10:00:00 | INFO | fairseq_cli.train | training on 8 devices (GPUs/TPUs)\n"
    for step in range(100, 2100, 100):
        seconds = 7.4 if step % 200 == 100 and step > 100 else 3.7
        wall_s += 100 * seconds
        text += FAIRSEQ_TEXT.format(
            step=step, epoch=1, place=step, rate=262144 / seconds, ups=1 / seconds, wall=wall_s
        )
        if step % 200 == 0:
            text += "10:00:00 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 8.1\n"
    document = parsed(tmp_path, text)
    assert values(document) == ("fairseq", "ok", pytest.approx(3.7, rel=1e-3))
    assert document.step_time_s and document.step_time_s.p95 == pytest.approx(3.7, rel=1e-3)


def test_an_old_paddlenlp_divides_one_batch_by_the_time_of_ten_steps(tmp_path: Path):
    """The printed 3.2 samples/s are a tenth of the rate."""
    text = PADDLE_HEAD + "".join(
        paddle_line(n, 20.0, "interval_samples_per_second: 3.2, interval_steps_per_second: 0.5")
        for n in range(10, 210, 10)
    )
    document = parsed(tmp_path, text)
    assert values(document) == ("paddlenlp", "ok", pytest.approx(2.0))
    assert document.samples_per_s == pytest.approx(32.0) and not document.disagreements


FAIRSEQ_TEXT = (
    "2026-01-01 10:00:00 | INFO | train_inner | epoch {epoch:03}: {place:6} / 400 loss=9.1, "
    "nll_loss=8.2, wps={rate:g}, ups={ups:.2f}, wpb=262144, bsz=512, num_updates={step}, "
    "lr=0.0001, gnorm=1.2, clip=0, loss_scale=8, train_wall=50, gb_free=20, wall={wall:g}\n"
)
FAIRSEQ_JSON = (
    "2026-01-01 10:00:00 | INFO | train_inner | {{" + '"epoch": {epoch}, "update": 0.5, '
    '"loss": "9.1", "wps": "{rate:g}", "ups": "{ups:.2f}", "wpb": "262144", "bsz": "512", '
    '"num_updates": "{step}", "gnorm": "1.2", "wall": "{wall:g}"' + "}}\n"
)


@pytest.mark.parametrize("form", [FAIRSEQ_TEXT, FAIRSEQ_JSON], ids=["text", "json"])
def test_fairseq_counts_updates_over_epochs_and_words_of_all_devices(tmp_path: Path, form: str):
    """An update takes 3.7 s, for which two digits of `ups` (0.27) are too coarse."""
    text = "2026-01-01 10:00:00 | INFO | fairseq_cli.train | training on 32 devices (GPUs/TPUs)\n"
    for step in range(100, 2100, 100):
        epoch, place = divmod(step - 1, 400)
        text += form.format(
            step=step,
            epoch=epoch + 1,
            place=place + 1,
            rate=262144 / 3.7,
            ups=1 / 3.7,
            wall=round(3.7 * step),
        )
        if step % 400 == 0:
            text += (
                "10:00:00 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 8.1 "
                f"| ppl 200.1 | wps 400000 | wpb 8192 | bsz 16 | num_updates {step}\n"
                "2026-01-01 10:00:00 | INFO | train | epoch 001 | loss 9.3 | wps 60000 | ups 0.2 "
                f"| wpb 262144 | bsz 512 | num_updates {step} | train_wall 999 | wall 1111\n"
            )
    document = parsed(tmp_path, text)
    assert values(document) == ("fairseq", "ok", pytest.approx(3.7, rel=1e-3))
    assert document.tokens_per_s == pytest.approx(262144 / 3.7, rel=1e-3)
    assert document.samples_per_s == pytest.approx(512 / 3.7, rel=1e-3)
    assert document.settings.num_devices == 32 and document.n_steps == 20
    assert not any("start over" in warning for warning in document.warnings)


@pytest.mark.parametrize("form", [FAIRSEQ_TEXT, FAIRSEQ_JSON], ids=["text", "json"])
def test_fairseq_on_tpus_counts_the_words_of_one_of_the_updates_between_lines(
    tmp_path: Path, form: str
):
    """An update takes 3.7 s; the rate is that of 262,144 words per 100 updates."""
    text = "".join(
        form.format(
            step=step, epoch=1, place=step, rate=2621.44 / 3.7, ups=0, wall=round(3.7 * step)
        )
        for step in range(100, 2100, 100)
    )
    document = parsed(tmp_path, text)
    assert values(document) == ("fairseq", "ok", pytest.approx(3.7, rel=1e-3))
    assert document.tokens_per_s == pytest.approx(262144 / 3.7, rel=1e-3)
    assert any("the printed tokens/s imply steps 100 times" in w for w in document.warnings)


def test_the_clock_of_fairseq_gives_the_times_of_a_log_without_rates(tmp_path: Path):
    text = "".join(
        FAIRSEQ_TEXT.format(step=n, epoch=1, place=n, rate=1, ups=0, wall=round(3.7 * n))
        for n in range(100, 2100, 100)
    )
    document = parsed(tmp_path, text.replace(" wps=1,", ""))
    assert values(document) == ("fairseq", "ok", pytest.approx(3.7, rel=1e-3))
    assert document.tokens_per_s == pytest.approx(262144 / 3.7, rel=1e-3)


def composer_record(head: str, batch: int, lines: str) -> str:
    return (
        f"{head}\n\t Train time/epoch: 0\n\t Train time/batch: {batch}\n"
        f"\t Train time/sample: {batch * 512}\n\t Train time/batch_in_epoch: {batch % 50}\n"
        f"\t Train time/token: {batch * 512 * 2048}\n\t Train loss/train/total: 2.5000\n{lines}"
    )


def test_composer_counts_batches_over_epochs_and_excludes_evaluations(tmp_path: Path):
    """A batch takes 4.1 s; the rate of 0.2439 batches/s alone would be right to four digits."""
    rates = (
        "\t Train throughput/batches_per_sec: 0.2439\n"
        f"\t Train throughput/samples_per_sec: {512 / 4.1:.4f}\n"
        f"\t Train throughput/device/batches_per_sec: {1 / 4.1 / 16:.4f}\n"
        f"\t Train throughput/tokens_per_sec: {512 * 2048 / 4.1:.4f}\n"
        f"\t Train throughput/device/tokens_per_sec: {512 * 2048 / 4.1 / 16:.4f}\n"
        "\t Train time/train: 0.5000\n\t Train time/val: 0.1000\n"
    )
    text = "".join(
        composer_record(
            f"[epoch={1 + n // 50}][batch={n % 50 + 1}/50]:", n, rates if n > 10 else ""
        )
        + ("[Eval batch=3/3] Eval on eval data:\n\t Eval loss: 2.2\n" if n % 50 == 49 else "")
        for n in range(9, 200, 10)
    )
    document = parsed(tmp_path, text)
    assert values(document) == ("composer", "ok", pytest.approx(4.1, rel=1e-3))
    assert document.window and document.window.global_batch == 512
    assert document.tokens_per_s == pytest.approx(512 * 2048 / 4.1, rel=1e-3)
    assert document.settings.num_devices == 16 and document.n_steps == 20
    assert total_steps(tmp_path) is None


def test_a_new_composer_prints_the_time_of_the_last_batch_which_is_0_at_first(tmp_path: Path):
    text = "".join(
        composer_record(
            f"[batch={n + 1}/300]:", n, f"\t Train time/secs_per_step: {2.0 if n else 0:.4f}\n"
        )
        for n in range(30)
    )
    document = parsed(tmp_path, text)
    assert values(document) == ("composer", "ok", pytest.approx(2.0))
    assert document.window and document.window.global_batch == 512
    assert total_steps(tmp_path) == 300
    assert not any("invalid step times" in warning for warning in document.warnings)


@pytest.mark.parametrize("head", [True, False], ids=["whole log", "end of a log"])
def test_openclip_prints_mean_times_and_the_rate_of_the_last_batch(tmp_path: Path, head: bool):
    """Batches of 8 x 320 take 0.5 s in the mean; the rate is that of one batch between."""
    text = "".join(
        f"2026-01-01,10:00:00 | INFO |   {name}: {value}\n"
        for name, value in (
            *(("accum_freq", 2), ("batch_size", 160), ("log_every_n_steps", 100)),
            *(("val_batch_size", 7), ("world_size", 8)),
        )
    )
    text = text if head else ""
    for n in range(30):
        rate = 2560 / (0.45, 0.52, 0.53)[n % 3]
        text += (
            f"10:01:00 | INFO | Train Epoch: {n // 10} [{n % 10 * 256000:>8}/2560000 "
            f"(1%)] Data (t): 0.010 Batch (t): 0.500, {rate:#g}/s, {rate / 8:#g}/s/gpu LR: 0.00001 "
            "Logit Scale: 14.286 Contrastive_loss: 6.50 (6.60) Loss: 6.50 (6.60)\n"
        )
    document = parsed(tmp_path, text)
    assert values(document) == ("open_clip", "ok", pytest.approx(0.5))
    assert document.settings.num_devices == (8 if head else None)
    assert document.window and document.window.global_batch is None
    assert document.settings.global_batch == (2560 if head else None)
    assert document.samples_per_s == pytest.approx(5120, rel=0.05)


def prime_log(num_workers: int) -> str:
    """A step takes 3 s, one of ten with a save 9 s; midnight is at step 20."""
    text, ends = "12:00:00 [INFO] [Rank 0] starting training\n", [86_340]
    for n in range(1, 201):
        ends.append(ends[-1] + (9 if n % 10 == 0 else 3))
        second = ends[-1]
        hours, minutes = divmod(second // 60, 60)
        clock = f"{hours % 24:02}:{minutes:02}:{second - 60 * (second // 60):02}"
        last = ends[1:][-10:]
        rate = 1048576 * (len(last) - 1) / max(last[-1] - last[0], 1)
        rate_text = f", tokens_per_second: {rate:.2f}, mfu: 41.20" if n > 1 else ""
        peers = f", diloco_peers: {num_workers}" if num_workers > 1 else ""
        text += f"{clock} [INFO] [Rank 0] step: {n}, loss: 9.5000{rate_text}{peers}\n"
    return text


def test_prime_times_are_those_of_its_clock_past_midnight(tmp_path: Path):
    document = parsed(tmp_path, prime_log(1))
    assert values(document) == ("prime", "ok", pytest.approx(3.0))
    assert document.tokens_per_s == pytest.approx(1048576 / 3, rel=0.01)


def test_rates_of_one_of_several_diloco_workers_are_not_those_of_all(tmp_path: Path):
    document = parsed(tmp_path, prime_log(4))
    assert values(document) == ("prime", "ok", pytest.approx(3.0))
    assert document.tokens_per_s is None


def litgpt_line(micro_step: int, every: int, seconds: float) -> str:
    step, at_step = divmod(micro_step, every)
    return (
        f"Epoch 1 | iter {micro_step} step {step} | loss train: 1.900, val: n/a | iter time: "
        f"{1000 * seconds:.2f} ms{'' if at_step else ' (step)'}\n"
    )


@pytest.mark.parametrize("all_lines", [True, False], ids=["each micro-step", "each step"])
def test_a_step_of_litgpt_has_all_its_micro_steps(tmp_path: Path, all_lines: bool):
    """Four micro-steps of 0.25 s, of which the last has the optimizer's 0.1 s."""
    text = "".join(
        litgpt_line(n, 4, 0.25 + (0.1 if n % 4 == 0 else 0))
        for n in range(1, 161)
        if all_lines or n % 4 == 0
    )
    text += "iter 160: val loss 2.0000, val time: 9000.00 ms\nTraining time: 60.00s\n"
    document = parsed(tmp_path, text)
    assert values(document) == ("litgpt", "ok", pytest.approx(1.1 if all_lines else 1.4, rel=1e-3))
    assert document.n_steps == 40
    assert any("micro-step" in warning for warning in document.warnings)


def test_an_old_litgpt_without_accumulation(tmp_path: Path):
    text = "".join(
        f"iter {n} step {n}: loss 1.9000, iter time: 250.00ms (optimizer.step) remaining time: 1h\n"
        for n in range(1, 41)
    )
    document = parsed(tmp_path, text)
    assert values(document) == ("litgpt", "ok", pytest.approx(0.25))
    assert not any("micro-step" in warning for warning in document.warnings)


@pytest.mark.parametrize("speed", ["iter/s", "s/it"])
@pytest.mark.parametrize("quote", ["'", '"'], ids=["terminal", "logging.jsonl"])
def test_ms_swift_prints_the_mean_speed_since_the_start(tmp_path: Path, speed: str, quote: str):
    """The first ten steps take 4 s each, later ones 2 s; the run is still going."""
    text = ""
    for step in range(10, 410, 10):
        seconds = 20 + 2 * step
        mean = step / seconds if speed == "iter/s" else seconds / step
        text += (
            f"{{'loss': 1.5, 'grad_norm': 0.5, 'learning_rate': 1e-05, 'memory(GiB)': 60.1, "
            f"'train_speed({speed})': {mean:.6f}, 'epoch': 0.1, 'global_step/max_steps': "
            f"'{step}/1000', 'percentage': '1.00%', 'elapsed_time': '{seconds // 60}m', "
            "'remaining_time': '15m 30s'}\n"
        ).replace("'", quote)
    document = parsed(tmp_path, text)
    assert values(document) == ("hf_trainer", "ok", pytest.approx(2.0, rel=1e-3))
    assert document.n_steps == 40


def test_the_clock_of_deepspeed_sums_the_micro_steps_of_a_step(tmp_path: Path):
    """Four micro-steps of 0.9 s, then an update of 0.1 s."""
    head = "[2026-01-01 10:00:01,000] [INFO] [logging.py:96:log_dist] [Rank 0] time (ms)"
    micro = f"{head} | fwd_microstep: 300.00 | bwd_microstep: 600.00 | step_microstep: 0.05\n"
    text = (4 * micro + f"{head} | fwd: 1200.00 | bwd: 2400.00 | step: 100.00\n") * 20
    document = parsed(tmp_path, text)
    assert values(document) == ("deepspeed_chat", "ok", pytest.approx(3.7))
    assert document.n_steps == 20


def test_a_rounded_time_gives_no_batch_that_is_almost_right(tmp_path: Path):
    """4096 samples in 0.1234 s, printed as 0.123: the product would be 4083."""
    text = "".join(
        f"steps: {n} loss: 6.7 iter time (s): 0.123 samples/sec: {4096 / 0.1234:.3f}\n"
        for n in range(10, 410, 10)
    )
    document = parsed(tmp_path, text)
    assert values(document) == ("deepspeed_pipe", "ok", pytest.approx(0.123))
    assert document.window and document.window.global_batch is None
    assert document.samples_per_s == pytest.approx(4096 / 0.1234, rel=1e-5)
