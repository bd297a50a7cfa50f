"""Primus: Megatron's records behind its prefix, and torchtitan's, which stay torchtitan's."""

from __future__ import annotations

import pytest

from paceline.core.units import TERA
from paceline.engines.primus import LOG_FORMAT
from tests.engines.promises import parsed, reader_of

# After modules/trainer/megatron/trainer.py and core/utils/logger.py of AMD-AGI/Primus, 2025-2026.
HEAD = "[20260506 13:47:27][rank-7/8][INFO ] [--------trainer.py:2560] : "
COLOURED = (
    "[\x1b[32m20260506 13:47:27\x1b[0m][\x1b[36mrank-7/8\x1b[0m][\x1b[1mINFO \x1b[0m] "
    "\x1b[1m[--------trainer.py:2560] : "
)


def line(step: int, head: str = HEAD, loss: str = "2.352391E+00") -> str:
    return (
        f"{head} iteration {step:8d}/   36000 | consumed samples: {128 * step:12d} | "
        "elapsed time per iteration (ms): 2701.3/2712.7 | "
        "hip mem usage/free/total/usage_ratio: 227.35GB/28.63GB/255.98GB/88.81% | "
        "throughput per GPU (TFLOP/s/GPU): 210.5/217.3 | "
        "tokens per GPU (tokens/s/GPU): 12130.4/12525.5 | learning rate: 1.587349E-04 | "
        f"global batch size:   128 | lm loss: {loss} | loss scale: 1.0 | grad norm: 0.132 | "
        "number of skipped iterations:   0 | number of nan iterations:   0 |\n"
    )


check = reader_of("primus")


@pytest.mark.parametrize("head", [HEAD, COLOURED], ids=["plain", "coloured"])
def test_the_step_counts_and_not_the_running_mean_behind_it(head: str):
    text = "".join(line(n, head) for n in (1, 2, 3))
    assert LOG_FORMAT.step_line.search(text.encode())
    log = check(text)
    steps = log.steps()
    assert steps.index.tolist() == [1, 2, 3]
    assert steps["step_time_s"] == pytest.approx([2.7013] * 3)
    assert steps["flops_per_s_per_device"] == pytest.approx([210.5 * TERA] * 3)
    assert steps["tokens_per_s_per_device"] == pytest.approx([12_130.4] * 3)
    assert steps["global_batch"].tolist() == [128.0] * 3
    assert log.facts["num_devices"] == 8 and log.facts["total_steps"] == 36_000


def test_the_harmonic_mean_of_2026_is_left_out_too():
    text = line(1).replace(
        "tokens per GPU (tokens/s/GPU): 12130.4/12525.5",
        "tokens/s/GPU inst/harmonic mean: 12130.4/12525.5",
    )
    assert check(text).steps()["tokens_per_s_per_device"] == pytest.approx([12_130.4])


def test_the_figures_of_a_whole_log(tmp_path):
    document = parsed(tmp_path / "a.log", "".join(line(n, COLOURED) for n in range(1, 31)))
    assert document["engine"] == "primus" and document["status"] == "ok"
    assert document["step_time_s"]["median"] == pytest.approx(2.7013, rel=1e-4)
    assert document["samples_per_s"] == pytest.approx(128 / 2.7013, rel=1e-4)
    assert document["reported"]["tflops_per_device"] == pytest.approx(210.5, rel=1e-4)
    assert "printed_flops" not in document["conventions"]


def test_torchtitan_under_primus_stays_torchtitan(tmp_path):
    step = "step: 10  loss:  7.9000  memory: 60.00GiB(75.00%)  tps: 1,444  mfu: 23.10%\n"
    text = (HEAD + step) * 3
    assert parsed(tmp_path / "a.log", text)["engine"] == "torchtitan"


def test_megatron_without_the_prefix_stays_megatron(tmp_path):
    text = "".join(line(n, "[2026-05-06 13:47:27]") for n in range(1, 9))
    assert parsed(tmp_path / "a.log", text)["engine"] == "megatron"
