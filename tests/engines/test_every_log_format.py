"""Every log format keeps the same promises; a new file is tested by being there."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import UserError
from paceline.engines import log_format, log_formats, table_formats
from paceline.engines.log_reading.log_content import LogFormat
from paceline.logs.facts import UserSettings
from paceline.logs.parser import detect
from tests.engines.promises import InPieces, answer, check_parse, check_read, read
from tests.engines.recent_samples import RECENT_SAMPLES, TOKENS
from tests.engines.samples import NOISE, PREFIXES, SAMPLES, log_text, times_of

LOG_FORMATS = pytest.mark.parametrize("name", log_formats())
TIMES = times_of(40)
NEVER_TORN = {
    *("olmo_core", "torchtitan", "deepspeed_profile", "nemo_rl", "tf_estimator"),
    *("dllogger", "megatron_progress", "prime", "composer", "fairseq"),
}
"""Their samples have a record over several lines, colours within it, the date of the line as their
only time, or the step number at the end."""


@LOG_FORMATS
def test_it_says_what_it_is(name: str):
    kind = log_formats()[name]

    assert kind.title and kind.title.isprintable()
    assert kind.marks and all(len(mark) >= 4 for mark in kind.marks)
    assert isinstance(kind.step_line, re.Pattern) and not kind.step_line.groups
    assert kind.begins is None or len(kind.begins) >= 4


def test_every_log_format_has_a_sample_and_no_sample_is_left_over():
    assert log_formats().keys() == SAMPLES.keys()


@LOG_FORMATS
def test_a_log_format_is_found_by_its_name(name: str):
    assert log_format(name) is log_format(name.upper().replace("_", "-")) is log_formats()[name]


def test_an_unknown_log_format_is_answered_with_the_nearest():
    with pytest.raises(UserError, match="did you mean 'maxtext'"):
        log_format("maxtxt")


def assert_has_the_sample(kind: LogFormat, name: str, content: bytes) -> None:
    sample = SAMPLES[name]
    steps = check_read(kind, content).steps()

    assert steps.index.tolist() == list(sample.numbers(len(TIMES)))
    first = int(sample.first_is_unknown)
    assert np.isnan(sample.seconds(steps)[:first]).all()
    np.testing.assert_allclose(
        sample.seconds(steps)[first:], TIMES[first:], rtol=sample.digits, atol=0.006
    )


@LOG_FORMATS
@pytest.mark.parametrize("noise", [NOISE, ()], ids=["noise", "bare"])
def test_a_log_is_read_to_its_steps_and_times(name: str, noise: tuple[bytes, ...]):
    assert_has_the_sample(log_formats()[name], name, log_text(name, TIMES, noise=noise))


@LOG_FORMATS
@pytest.mark.parametrize("prefix", PREFIXES[1:], ids=lambda p: p.decode().strip("\x1b[36m0]: "))
def test_what_stands_before_each_line_changes_nothing(name: str, prefix: bytes):
    if not SAMPLES[name].prefixed:
        pytest.skip("its file has no prefixes")
    assert_has_the_sample(log_formats()[name], name, log_text(name, TIMES, prefix))


@LOG_FORMATS
def test_line_ends_of_other_systems_change_nothing(name: str):
    text = re.sub(rb"(?<!\r)\n", b"\r\n", log_text(name, TIMES))
    assert_has_the_sample(log_formats()[name], name, text)


@LOG_FORMATS
def test_its_log_is_recognised_as_its_own_and_as_no_other(name: str):
    content = log_text(name, TIMES)

    assert detect(InPieces(content, 1 << 20)) == name
    assert detect(InPieces(b"".join(NOISE) * 50, 1 << 20)) is None


@LOG_FORMATS
def test_it_is_found_after_much_of_another_log(name: str):
    """Lines that differ by digits only, then lines that all differ, then those of the format."""
    same = b"".join(b"worker %d: waiting since %d s\n" % (n, n * n) for n in range(300))
    different = b"".join(
        b"%s finished\n" % bytes(97 + (n >> k & 15) for k in (0, 4, 8)) for n in range(4096)
    )
    content = same + different + same + log_text(name, TIMES, noise=())

    assert detect(InPieces(content, 1 << 12, log_formats()[name].begins)) == name


@LOG_FORMATS
def test_every_step_line_shows_a_mark(name: str):
    kind = log_formats()[name]
    line = SAMPLES[name].line(20, 1.25)

    assert any(mark in line for mark in kind.marks)
    assert kind.step_line.search(line)


@LOG_FORMATS
def test_a_log_of_two_ranks_that_print_each_step_gives_each_once(name: str):
    numbers = SAMPLES[name].numbers(len(TIMES))
    line = SAMPLES[name].line
    lines = [line(n, t) * 2 for n, t in zip(numbers, TIMES, strict=True)]
    text = SAMPLES[name].head + b"".join(lines)

    assert_has_the_sample(log_formats()[name], name, text)


@LOG_FORMATS
def test_a_log_cut_off_anywhere_gives_the_steps_before_and_no_wrong_time(name: str):
    kind, sample, times = log_formats()[name], SAMPLES[name], TIMES[:4]
    content = log_text(name, times, noise=()).rstrip() + b"\n"
    by_number = dict(zip(sample.numbers(len(times)), times, strict=True))
    says_so = False
    for end in range(1, len(content), 7):
        log = check_read(kind, content[:end], (1 << 20, 97))
        says_so |= log.incomplete_reason is not None
        if not len(log):
            continue
        steps = log.steps()
        for number, seconds in zip(steps.index.tolist(), sample.seconds(steps), strict=True):
            assert np.isnan(seconds) or seconds == pytest.approx(
                by_number[number], rel=sample.digits, abs=0.006
            )
    assert says_so or name in NEVER_TORN
    assert read(kind, content).incomplete_reason is None


@LOG_FORMATS
def test_damaged_bytes_between_lines_change_nothing(name: str):
    text = log_text(name, TIMES, noise=())
    damaged = b"\x00\xff\xfe[\n" + text.replace(b"\n", b"\n\xc3\x28\x00\n")
    if not SAMPLES[name].prefixed:
        pytest.skip("its file has nothing between its lines")
    assert_has_the_sample(log_formats()[name], name, damaged)


@LOG_FORMATS
def test_logs_of_others_make_nothing_fail(name: str):
    for other in SAMPLES:
        log = check_read(log_formats()[name], log_text(other, TIMES[:5]))
        log.steps()


@LOG_FORMATS
def test_the_same_log_twice_gives_the_same_answer(name: str):
    kind, content = log_formats()[name], log_text(name, TIMES)

    assert answer(read(kind, content)) == answer(read(kind, content))


@LOG_FORMATS
def test_the_parsed_log_has_the_status_ok_and_its_steps(name: str, tmp_path: Path):
    path = tmp_path / "a.log"
    path.write_bytes(log_text(name, TIMES))
    document = check_parse(path)

    assert document["engine"] == name
    assert document["status"] == "ok", document["reason"]
    assert document["n_steps"] == len(TIMES)


LOSS = re.compile(rb"((?i:loss)['\"]?[:= ]{1,9}(?:np\.float64\()?)[0-9.]+(?:[eE][-+]\d+)?")
WITH_LOSS = [name for name in SAMPLES if LOSS.search(SAMPLES[name].line(20, 1.25))]


@pytest.mark.parametrize("name", WITH_LOSS)
def test_a_loss_that_is_not_a_number_is_reported(name: str, tmp_path: Path):
    sample, path = SAMPLES[name], tmp_path / "a.log"
    last = sample.numbers(len(TIMES) + 1)[-1]
    nan = rb"\1NaN" if sample.line(last, 1.0).startswith(b"{") else rb"\1nan"
    lines = log_text(name, TIMES, noise=()).removesuffix(sample.tail)
    path.write_bytes(lines + LOSS.sub(nan, sample.line(last, 1.0)) + sample.tail)

    assert check_parse(path)["status"] == "nan"


FAILURES = {
    "oom": (
        b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        b"RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 79.15 GiB total)",
    ),
    "nan": (
        b"AssertionError: Rank 0: found NaN in local forward loss calculation. Device: 0",
        b"RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.",
    ),
}


@pytest.mark.parametrize("num_steps", [0, 40], ids=["before the first step", "after steps"])
@pytest.mark.parametrize("status", FAILURES)
@pytest.mark.parametrize("name", [*log_formats(), "generic"])
def test_a_failure_is_reported_before_the_first_step_and_after_steps(
    name: str, status: str, num_steps: int, tmp_path: Path
):
    if name == "generic":
        lines = b"".join(b"step: %d | sec_per_step: 1.5\n" % n for n in range(1, num_steps + 1))
    else:
        lines = log_text(name, TIMES[:num_steps]).removesuffix(SAMPLES[name].tail)
    path = tmp_path / "a.log"
    for message in FAILURES[status]:
        path.write_bytes(lines + b"Traceback (most recent call last):\n" + message + b"\n")
        for engine in (None, name):
            document = check_parse(path, UserSettings(engine=engine))
            assert (document["status"], document["reason"]) == (status, message.decode()), engine


@pytest.mark.parametrize("message", FAILURES["nan"])
@pytest.mark.parametrize("name", log_formats())
def test_a_nan_before_a_restart_is_not_how_the_log_ends(name: str, message: bytes, tmp_path: Path):
    path = tmp_path / "a.log"
    first, rest = (log_text(name, TIMES[:n]) for n in (10, 40))
    path.write_bytes(first.removesuffix(SAMPLES[name].tail) + message + b"\n" + rest)
    assert check_parse(path, UserSettings(engine=name))["status"] != "nan"
    path.write_bytes(path.read_bytes() + message + b"\n")
    assert check_parse(path, UserSettings(engine=name))["status"] == "nan"


@pytest.mark.parametrize("name", sorted(RECENT_SAMPLES.keys() - {"modded_nanogpt", "primus"}))
def test_tokens_per_second_are_those_of_all_devices(name: str, tmp_path: Path):
    path = tmp_path / "a.log"
    path.write_bytes(log_text(name, [2.5] * 40))

    rate = check_parse(path)["tokens_per_s"]
    assert rate == pytest.approx(TOKENS / 2.5, rel=SAMPLES[name].digits)


NOT_LOGS = {
    "automodel": "step {} | epoch {} | loss {:.4f} | grad_norm {:.4f} | lr {:.2e} | tps {:.2f}",
    "llama_factory": '{"current_steps": 10, "total_steps": 1000, "percentage": 1.0}',
    "llm_c": "| step | loss | norm | ms | tok/s |\n| 1/3 | 11.0 | 22.1 | 2517 ms | 208262 tok/s |",
    "nanochat": "| step 100 | loss: 5.1 | dt: 480ms | tok/sec: 1,092,000 |",
    "nanotron": "Look for iteration: 3 / 100 and elapsed_time_per_iteration_ms: in the output.",
    "olmo_core": "The figures are called throughput/device/TPS and train/CE loss, a step "
    "[step=1/10].",
    "primus": "[20260506 13:47:27][rank-7/8][INFO ] [-trainer.py:2560] :  iteration 3 of 36000 "
    "begins; [rank-7/8][INFO ] says so",
    "verl": "- perf/time_per_step: mean=28.3 min=25.3\n- timing_s/step: mean=28.3\nstep:3 - x:1",
}
"""Text that only resembles the lines of a format: sentences, tables and patterns."""


@pytest.mark.parametrize("name", NOT_LOGS)
def test_text_about_its_lines_is_not_a_log(name: str, tmp_path: Path):
    path = tmp_path / "a.log"
    path.write_text(f"{NOT_LOGS[name]}\n" * 9)
    assert check_parse(path)["status"] == "not-a-training-log"


def kept_bytes(name: str, n: int) -> int:
    """Memory that a log of n steps takes once it is read."""
    kind, sample = log_formats()[name], SAMPLES[name]
    content = sample.head + b"".join(sample.line(k, 1 + k % 7 / 10) for k in sample.numbers(n))
    tracemalloc.start()
    try:
        log = read(kind, content)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(log.steps()) == n
    return kept


READ_BY_DAY = log_formats().keys() - table_formats().keys() | {"fairseq", "olmo_core", "prime"}
"""Formats with a reader of their own, and three kinds of tables, which share one reader."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in READ_BY_DAY else pytest.mark.nightly)
        for name in log_formats()
    ],
)
def test_millions_of_steps_take_little_memory(name: str):
    """3 million steps, at most 40 bytes each: two thirds of 200 MiB, the rest is the program."""
    assert (kept_bytes(name, 30_000) - kept_bytes(name, 10_000)) / 20_000 < 40
