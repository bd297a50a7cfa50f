"""The generic reader finds step numbers and times by name, unit and behaviour, or says why not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import UserError
from paceline.engines import log_format
from paceline.engines.log_reading.generic import ColumnChoice, chosen_format
from paceline.logs.facts import UserSettings
from paceline.logs.parser import Parsing, parse_log
from tests.engines.promises import check_read
from tests.engines.samples import NOISE

STEPS = range(1, 41)


def parse(folder: Path, text: str, **user: str) -> Parsing:
    path = folder / "a.log"
    path.write_text(text, encoding="utf-8")
    return parse_log(path, UserSettings(**user))


def lines(form: str) -> str:
    return "".join(form.format(n=n, total=n * 0.5) + "\n" for n in STEPS)


KEY_VALUES = {
    "pairs": "step: {n} | loss 2.3 | iter_time 0.5s | iter_time: 0.5",
    "milliseconds": "iter={n} loss=2.3 dt=500.00ms",
    "unit in the name": "[train] Step {n}/1000, loss: 2.3, step_time (ms): 500.0, lr: 1e-4",
    "steps per second": "epoch 1 | global_step {n} | global_step: {n} | loss: 2.3 | it/s: 2.0",
    "rate with its unit": "Iteration {n}: loss=2.3000 (2.00 it/s)",
    "running clock": "step: {n}, elapsed: {total} s, loss: 2.3",
    "other times": "step: {n} data_time: 0.01 fwd_time: 0.2 step_time: 0.5 eta: 12.0 avg_time: 0.6",
    "json": '{{"step": {n}, "train": {{"loss": 2.3, "step_time_s": 0.5}}, "name": "x"}}',
    "json clock": '{{"_step": {n}, "_runtime": {total}, "train/loss": 2.3}}',
}


@pytest.mark.parametrize("form", KEY_VALUES.values(), ids=KEY_VALUES)
def test_step_times_are_found_in_lines(tmp_path: Path, form: str):
    document = parse(tmp_path, "Loading, please wait\n" + lines(form)).document
    assert (document.engine, document.status) == ("generic", "ok"), document.reason
    assert document.n_steps == len(STEPS)
    assert document.step_time_s and document.step_time_s.median == pytest.approx(0.5, rel=1e-3)
    assert any("generic reader: steps are column" in text for text in document.warnings)


def test_rounded_step_numbers_are_not_read(tmp_path: Path):
    """LeRobot prints step 1,200 as 1K: times by such numbers would be off."""
    text = "".join(
        f"2026-01-01 10:00:{n:02} step:{200 * n if n < 5 else f'{n // 5}K'} loss:2.8 epoch:1.0\n"
        for n in range(1, 40)
    )
    assert parse(tmp_path, text).steps.index.tolist() == [200, 400, 600, 800]


METERS = {
    "ImageNet": "Epoch: [{e}][{n:4}/ 20]\tTime  0.500 ( 0.900)\tData  0.010 ( 0.20)\t"
    "Loss 6.9000e+00 (6.9500e+00)\tAcc@1   0.00 (  0.10)",
    "torchvision": "Epoch: [{e}]  [{n:3}/20]  eta: 0:00:30  lr: 0.1  img/s: 128.0  "
    "loss: 6.9000 (6.9500)  time: 0.5000  data: 0.0003  max mem: 3000",
    "MMCV": "Epoch [{e}][{n}/20]\tlr: 2.0e-02, eta: 1 day, 2:03:04, time: 0.500, data_time: 0.01, "
    "memory: 4000, loss: 6.9000",
    "Swin": "Train: [{e}/300][{n}/20]\teta 1:02:03 lr 0.000100\ttime 0.5000 (0.9000)\t"
    "loss 6.9000 (6.9500)\tgrad_norm 1.2 (1.3)\tmem 8000MB",
}


@pytest.mark.parametrize("form", METERS.values(), ids=METERS)
def test_values_of_meters_are_read_without_their_means(tmp_path: Path, form: str):
    evaluation = "Test: [ 0/10]\tTime  3.000 ( 3.000)\tLoss 1.0000e+00 (1.0000e+00)\n"
    text = "".join(
        "".join(form.format(e=epoch, n=n) + "\n" for n in range(0, 20, 2)) + evaluation
        for epoch in range(3)
    )
    parsing = parse(tmp_path, text)
    assert parsing.document.status == "ok", parsing.document.reason
    assert parsing.steps.index.tolist() == list(range(0, 60, 2))
    times = parsing.document.step_time_s
    assert times and times.median == pytest.approx(0.5)
    assert parsing.steps["loss"][0] == pytest.approx(6.9)


UNITS = {
    "ms/step": "Step {n} | loss 2.0 | 500 ms/step | 1234 tok/s",
    "milliseconds": "step: {n} step time: 500 milliseconds",
    "microseconds": "step: {n}, time: 500000µs",
    "nanoseconds": "step: {n} step_time: 500000000ns",
    "minutes": "step: {n} | step time: 0.0083333 minutes",
    "clock in minutes": "step: {n} elapsed: {minutes:.6f}m",
    "clock in hours": "step: {n} time: {hours:.8f}h",
    "date since 1970": '{{"step": {n}, "time": {date}}}',
    "elapsed of a resumed run": "step: {n}, elapsed_time: {late}",
    "clock in whole seconds": "step: {n} time: {whole}",
    "a clock with it": "step: {n} time: 12:30:05 step_time: 0.5",
    "a date with it": "step: {n} time: 2026-01-01 12:30:05 dt: 0.5s",
    "other times": "step: {n} epoch_time: 300.5 generation_time: 3.0 step_time: 0.5",
    "validation before it": "[eval] step: {n} step_time: 9.0\n[train] step: {n} step_time: 0.5",
}


@pytest.mark.parametrize("form", UNITS.values(), ids=UNITS)
def test_units_and_clocks_are_told_apart(tmp_path: Path, form: str):
    text = "".join(
        form.format(
            n=n,
            minutes=n * 0.5 / 60,
            hours=n * 0.5 / 3600,
            date=1.7e9 + n * 0.5,
            late=5000 + n * 0.5,
            whole=n // 2,
        )
        + "\n"
        for n in STEPS
    )
    document = parse(tmp_path, text).document
    assert document.status == "ok" and document.n_steps == len(STEPS), document.reason
    # The mean over the file is coarse where the clock shows whole seconds.
    assert document.step_time_s and document.step_time_s.median == pytest.approx(0.5, rel=0.03)


def test_suffixes_counts_and_averages_of_token_rates(tmp_path: Path):
    rate = parse(tmp_path, lines("step: {n} dt: 0.5 tok/s: 12.5k tokens: 9 total_tokens: 99"))
    assert rate.document.tokens_per_s == pytest.approx(12_500)
    average = parse(tmp_path, lines("step: {n} dt: 0.5 tokens_per_s: 2000 avg_tokens_per_s: 777"))
    assert average.document.tokens_per_s == pytest.approx(2000)
    one = parse(tmp_path, lines("step: {n} dt: 0.5 gpu_tokens_per_s: 1000"))
    assert one.document.tokens_per_s is None
    two = parse(tmp_path, lines("step: {n} dt: 0.5 a/tokens_per_s: 1000 b/tokens_per_s: 5000"))
    assert two.document.tokens_per_s is None
    assert any("not taken, because several columns differ" in w for w in two.document.warnings)


def test_bars_of_each_epoch_and_of_evaluations(tmp_path: Path):
    bars = [f"Train: 3%|# | {n}/100 [00:{n // 10:02}<00:09, 10.0it/s]\r" for n in range(0, 101, 5)]
    other = [f"Evaluating: 3%|# | {n}/900 [00:0{n // 100}<00:09, 9it/s]\r" for n in range(0, 900)]
    document = parse(tmp_path, "".join(3 * [*bars, *other])).document
    assert document.step_time_s and document.step_time_s.median == pytest.approx(0.1, rel=0.01)
    only = parse(tmp_path, "".join(other)).document
    assert only.status == "not-a-training-log"


def test_a_column_may_have_any_name(tmp_path: Path):
    text = 'step,"wait, s",loss\n' + lines("{n},0.5,2.3")
    name = chosen_format(ColumnChoice(time="wait, s"))
    document = parse(tmp_path, text, engine=name).document
    assert document.step_time_s and document.step_time_s.median == pytest.approx(0.5)


def test_decimal_commas(tmp_path: Path):
    text = "step;loss;time\n" + "".join(f"{n};2,1;0,5\n" for n in STEPS)
    document = parse(tmp_path, text).document
    assert document.step_time_s and document.step_time_s.median == pytest.approx(0.5)


def test_source_code_about_memory_is_no_run_out_of_memory(tmp_path: Path):
    text = "import re\noom_kills_before = count('oom_kill')\n"
    assert parse(tmp_path, text).document.status == "not-a-training-log"


TABLES = {
    "W&B export": ("Step,_runtime,train/loss", "{n},{total},2.3"),
    "Lightning CSVLogger": ("epoch,step,step_time,train_loss", "0,{n},0.5,2.3"),
    "semicolons": ("step;loss;time per step (ms)", "{n};2.3;500"),
    "validation in every row": ("step,train_loss,val_loss,step_time", "{n},2.3,2.4,0.5"),
    "tabs": ("iteration\tit/s", "{n}\t2.0"),
}


@pytest.mark.parametrize(("header", "row"), TABLES.values(), ids=TABLES)
def test_step_times_are_found_in_csv(tmp_path: Path, header: str, row: str):
    document = parse(tmp_path, f"{header}\n{lines(row)}").document
    assert (document.engine, document.status) == ("generic", "ok"), document.reason
    assert document.step_time_s and document.step_time_s.median == pytest.approx(0.5, rel=1e-3)


def test_a_progress_bar_gives_the_mean_between_its_whole_seconds(tmp_path: Path):
    bars = "".join(
        f"Steps: 3%|# | {n}/300 [00:{n // 2:02}<02:00, 2.00it/s]\r" for n in range(0, 100, 2)
    )
    document = parse(tmp_path, "Downloading: 4/9 [00:01<00:02, 2.0it/s]\r" * 3 + bars).document
    assert document.status == "ok" and document.n_steps == 50
    assert document.step_time_s and document.step_time_s.median == pytest.approx(0.5)


def bars(form: str, counts: range, seconds: float = 0.5) -> str:
    """Progress bars with a count and the time since their start."""
    clocks = ((n, divmod(int(n * seconds), 60)) for n in counts)
    return "".join(form.format(n=n, t=f"{m:02}:{s:02}") for n, (m, s) in clocks)


LIGHTNING = "Epoch {e}:  5%|#  | {n}/100 [{t}<00:45,  2.00it/s, v_num=0, train_loss_step=2.3]\r"
EVALUATION = " 10%|#  | {n}/900 [{t}<00:45, 90.00it/s]\r"
BARS = {
    "Lightning": "".join(
        bars(LIGHTNING.replace("{e}", str(e)), range(0, 101, 5)) for e in range(6)
    ),
    "rich": bars(
        "Epoch 0/9 ━━━━ {n}/600 0:{t} • 0:00:45 2.00it/s v_num: 0 loss: 2.3\n", range(0, 601, 5)
    ),
    "tqdm without a total": bars("{n}it [{t},  2.00it/s]\r", range(0, 601, 5)),
    "an unknown total": bars("Epoch 0: |   | {n}/? [{t}<?,  2.00it/s]\r", range(0, 601, 5)),
    "each redrawn": bars("Steps: 1%|# | {n}/600 [{t}<01:00, 2.00it/s]\r" * 2, range(0, 601, 5)),
    "evaluations without a description": "".join(
        bars(" 10%|#  | {n}/600 [{t}<00:45,  2.00it/s]\r", range(k, k + 100, 10))
        + bars(EVALUATION, range(0, 901, 30), 0.011)
        for k in range(0, 600, 100)
    ),
    "epochs around them": "".join(
        f"Epochs: 10%|# | {e}/6 [0{e}:00<05:00, 60.0s/it]\r"
        + bars("Steps: 5%|# | {n}/600 [{t}<05:00, 2.00it/s]\r", range(0, 601, 5))
        for e in range(2)
    ),
}


@pytest.mark.parametrize("text", BARS.values(), ids=BARS)
def test_progress_bars_of_all_kinds_give_the_time_of_a_step(tmp_path: Path, text: str):
    document = parse(tmp_path, text).document
    assert document.status == "ok" and document.engine == "generic", document.reason
    assert document.step_time_s and document.step_time_s.median == pytest.approx(0.5, rel=0.01)
    assert any("of a progress bar" in warning for warning in document.warnings)


def test_bars_of_all_epochs_are_one_run(tmp_path: Path):
    document = parse(tmp_path, BARS["Lightning"]).document
    assert document.n_steps == 121 and document.window and document.window.last_step == 600
    assert not any("start over" in warning for warning in document.warnings)


def test_a_bar_of_epochs_alone_has_no_steps(tmp_path: Path):
    text = bars("Epochs: 10%|# | {n}/60 [{t}<05:00, 60.0s/it]\r", range(30), 60)
    assert parse(tmp_path, text).document.status == "not-a-training-log"


def test_a_loss_in_a_bar_that_is_not_a_number_is_reported(tmp_path: Path):
    good = bars("Steps: 1%| | {n}/600 [{t}<01:00, 2.00it/s, step_loss=2.3]\r", range(0, 300, 5))
    bad = bars("Steps: 1%| | {n}/600 [{t}<01:00, 2.00it/s, step_loss=nan]\r", range(300, 600, 5))
    assert parse(tmp_path, good).document.status == "ok"
    document = parse(tmp_path, good + bad).document
    assert (document.status, "at step 300" in str(document.reason)) == ("nan", True)


EPOCHS = "".join(
    f"epoch: {e} step: {n} loss: 2.3 dt: 0.5\n" for e in range(8) for n in range(0, 50, 10)
)
CLOCKED = [
    f"2026-01-01 10:{n * 5 // 60:02}:{n * 5 - n * 5 // 60 * 60:02} step: {n * 10} loss: 2.3"
    for n in STEPS
]
SHAPES = {
    "steps of each epoch": (EPOCHS, 40, 390),
    "two runs, with a value only sometimes": (
        2
        * "".join(
            f"step: {n} loss: 2 dt: 0.5{' acc: 1' * (n in range(5, 99, 5))}\n" for n in STEPS
        ),
        *(80, 40),
    ),
    "two ranks": (
        "".join(f"[rank{r}]: step: {n} step_time: 0.5\n" for n in STEPS for r in (0, 1)),
        40,
        40,
    ),
    "a rate that becomes a time": (
        "".join(f"Iteration {n} ({'2.00 it/s' if n < 20 else '0.50 s/it'})\n" for n in STEPS),
        *(40, 40),
    ),
    "time stamps": ("\n".join([*CLOCKED, "end"]), 40, 400),
    "the time of ten steps": (" time: 5.0s\n".join(CLOCKED), 39, 390),
    "the time of one step": (" time: 0.5s\n".join(CLOCKED), 39, 390),
    "W&B history": (
        "_runtime,_step,_timestamp,train/global_step,train/loss\n"
        + "".join(f"{n * 5.0},{n},{1.7e9 + n * 5},{n * 10},2.3\n" for n in STEPS),
        *(40, 400),
    ),
    "W&B chart": (
        '"Step","calm-fire-1 - train/step_time","calm-fire-1 - train/step_time__MAX"\n'
        + "".join(f'"{n * 10}","0.5","0.7"\n' for n in STEPS),
        *(40, 400),
    ),
    "TensorBoard": (
        "Wall time,Step,Value\n" + "".join(f"{1.7e9 + n * 5},{n * 10},2.3\n" for n in STEPS),
        *(40, 400),
    ),
    "Lightning's throughput": (
        "epoch,step,train_loss,val_loss,train|device/batches_per_sec\n"
        + "".join(f"0,{n * 50 - 1},2.3,,2.0\n0,{n * 50 - 1},,2.2,\n" for n in STEPS),
        *(40, 1999),
    ),
    "micro-steps of LitGPT": (
        "epoch,iter,iter_time,loss,step,time\n"
        + "".join(f"0,{n * 4},0.125,2.3,{n},{n * 0.5}\n" for n in STEPS),
        *(40, 40),
    ),
}


@pytest.mark.parametrize(("text", "num_lines", "last"), SHAPES.values(), ids=SHAPES)
def test_each_shape_of_a_log_has_steps_of_half_a_second(
    tmp_path: Path, text: str, num_lines: int, last: int
):
    document = parse(tmp_path, text).document
    assert document.status == "ok" and document.engine == "generic", document.reason
    assert document.step_time_s and document.step_time_s.median == pytest.approx(0.5, rel=0.01)
    assert document.window and (document.n_steps, document.window.last_step) == (num_lines, last)


def test_time_stamps_alone_do_not_make_a_training_log(tmp_path: Path):
    text = "\n".join(CLOCKED).replace(" loss: 2.3", " of the installation")
    assert parse(tmp_path, text).document.status == "not-a-training-log"


ERROR = "RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.\n"
NAN_LOSS = "step: 41 | loss: nan | dt: 0.5\n"


@pytest.mark.parametrize("failure", [ERROR, NAN_LOSS], ids=["error", "loss"])
def test_a_nan_is_reported_unless_a_restart_follows(tmp_path: Path, failure: str):
    text = lines("step: {n} | loss: 2.3 | dt: 0.5") + failure
    assert parse(tmp_path, text).document.status == "nan"
    again = "".join(f"step: {n} | loss: 2.3 | dt: 0.5\n" for n in range(30, 90))
    assert parse(tmp_path, text + again).document.status == "ok"
    assert parse(tmp_path, text + again + failure.replace("41", "90")).document.status == "nan"


def test_two_columns_that_differ_are_not_guessed_between(tmp_path: Path):
    form = "step: {n} time: 0.5 duration: 0.9"
    refused = parse(tmp_path, lines(form)).document
    assert refused.status == "not-a-training-log"
    assert "'time' (0.5 s), 'duration' (0.9 s); name one by --time-column" in str(refused.reason)
    chosen = parse(tmp_path, lines(form), engine="generic:time=duration").document
    assert chosen.step_time_s and chosen.step_time_s.median == pytest.approx(0.9)


def test_a_rate_per_device_is_not_a_rate_of_all(tmp_path: Path):
    text = lines("step: {n} | time: 0.5s | tokens/s/gpu: 1,000 | loss: 2.3")
    one = parse(tmp_path, text).document
    assert one.tokens_per_s is None and one.reported["tokens_per_s_per_device"] == 1000
    total = parse(tmp_path, lines("step: {n} | time: 0.5s | tokens/s: 8,000")).document
    assert total.tokens_per_s == pytest.approx(8000)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("An essay.\nIt has: 3 parts, and a step 1 of 2.\n", "only 1 line with"),
        (b"".join(NOISE * 20).decode("latin-1"), "generic reader"),
        ("step: 5 time: 0.5\n" * 30, "does not grow like a step number"),
        (lines("step: {n} loss: 2.3"), "no column is a time or a rate: step, loss"),
        ("step: 1 time: 0.5\nstep: 2 time: 0.5\n", "only 2 lines with the columns"),
        (lines("epoch: {n} time: 0.5"), "no line has a step number"),
    ],
)
def test_other_text_is_refused_with_the_reason(tmp_path: Path, text: str, reason: str):
    document = parse(tmp_path, text).document
    assert document.status == "not-a-training-log" and reason in str(document.reason)


def test_an_unknown_column_is_named_with_those_that_exist(tmp_path: Path):
    document = parse(tmp_path, lines("step: {n} time: 0.5"), engine="generic:time=dt").document
    assert "there is no column 'dt'; the columns are step, time" in str(document.reason)
    with pytest.raises(UserError, match="step=NAME, time=NAME, rate=NAME"):
        log_format("generic:speed=x")


def test_out_of_memory_before_the_first_step_is_reported(tmp_path: Path):
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    document = parse(tmp_path, f"using world size: 8\n[rank3]: {error}\n").document
    assert document.status == "oom" and error in str(document.reason)


NAMES = ("step", "iter", "time", "step_time", "loss", "it/s", "elapsed", "tokens/s", "data_time")
VALUES = st.one_of(st.integers(-5, 10**12), st.floats(), st.text(max_size=8))
RECORDS = st.lists(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5), max_size=12)


@settings(max_examples=300, deadline=None)
@given(RECORDS, st.sampled_from(["json", "pairs", "csv", "bar"]), st.binary(max_size=40))
def test_any_text_gives_figures_with_their_columns_or_none(
    records: list[dict[str, object]], form: str, noise: bytes
):
    if form == "csv":
        rows = [",".join(NAMES), *(",".join(str(r.get(n, "")) for n in NAMES) for r in records)]
        text = "\n".join(rows)
    elif form == "json":
        text = "\n".join(json.dumps(record) for record in records)
    elif form == "pairs":
        text = "\n".join(" ".join(f"{k}: {v}" for k, v in r.items()) for r in records)
    else:
        text = "\r".join(f"{r.get('step')}/9 [00:0{n}<00:09, 1s/it]" for n, r in enumerate(records))
    log = check_read(log_format("generic"), text.encode("utf-8", "replace") + b"\n" + noise)
    has_figures = any(np.isfinite(log.column(name)).any() for name in ("step_time_s", "tokens"))
    assert (log.refusal is None) or not len(log)
    if has_figures:
        assert any("generic reader: steps are column" in remark for remark in log.remarks)
