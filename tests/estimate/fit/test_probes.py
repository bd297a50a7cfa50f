"""Probes tell the coefficients that their times were made with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.estimate.fit.evidence import Evidence
from paceline.estimate.fit.refit import ON_CPU, Probes, cpu_prior, probe_errors, refit
from paceline.estimate.model.block import block_time, gemm_rate, gemm_seconds
from paceline.estimate.model.case import cases_of, cases_with
from paceline.estimate.model.coefficients import CENTRE, coefficient_values
from paceline.estimate.model.collectives import all_reduce_s
from paceline.estimate.model.step import step_time
from tests.estimate.machines import CPU, layouts

SHAPES = [(256, 768, 256), (2048, 768, 256), (2048, 512, 256), (256, 256, 256)]
PAYLOADS = [4096.0, 65536.0, 2.0**20, 2.0**23]


def probes_of(c: dict[str, float]) -> Probes:
    """What a machine with these coefficients would measure."""
    x = cases_with(CPU, {"devices": np.full(4, 2.0)})
    m, n, k = np.array(SHAPES, dtype=float).T
    products = 3 * gemm_seconds(x, c, gemm_rate(x, c, narrow=False), m, n, k)
    exchanges = all_reduce_s(x, c, np.array(PAYLOADS), np.full(4, 2.0), np.ones(4))
    attended = cases_of([replace(CPU, micro_batch=8)])
    attention = float(block_time(attended, c).attention[0])
    return Probes(
        CPU,
        gemms=[(*shape, seconds, 0.01) for shape, seconds in zip(SHAPES, products, strict=True)],
        attention=[(8, 256, 8, 4, 32, attention, 0.01)],
        copies=[(c["memory"] * CPU.memory_bytes_per_s, 0.01)],
        exchanges=[
            (size, seconds, 0.01) for size, seconds in zip(PAYLOADS, exchanges, strict=True)
        ],
    )


def moved(prior: Evidence, truth: dict[str, float]) -> Evidence:
    """The prior after those probes and eight steps."""
    measured = step_time(layouts(CPU), truth).total
    return refit(
        prior, layouts(CPU), measured, "known", extra_residuals=probe_errors([probes_of(truth)])
    )


def test_there_is_no_error_where_the_formulas_say_what_was_measured():
    probes = probes_of(dict(coefficient_values(CENTRE)))
    assert probes.size == 10
    assert np.abs(probe_errors([probes])(CENTRE[None])).max() < 1e-6


def test_many_vectors_of_coefficients_are_judged_as_each_alone():
    probes = replace(probes_of(dict(coefficient_values(CENTRE))), latency_s=2e-6, exposed=0.4)
    vectors = np.array([CENTRE - 0.2, CENTRE, CENTRE + 0.3])
    together = probe_errors([probes])(vectors)
    assert together.shape == (3, probes.size)
    for vector, row in zip(vectors, together, strict=True):
        assert probe_errors([probes])(vector[None])[0] == pytest.approx(row, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "factor"), [("gemm_cpu", 0.7), ("flash", 1.8), ("intra_start_s", 3.0), ("intra", 0.6)]
)
def test_a_coefficient_is_found_from_probes_and_steps(name: str, factor: float):
    prior = cpu_prior("fp32")
    truth = dict(prior.medians) | {name: factor * prior.medians[name]}
    after = moved(prior, truth)
    assert abs(np.log(after.medians[name] / truth[name])) < 0.5 * abs(np.log(factor))


def test_steps_of_a_processor_are_met_after_probes_and_steps():
    prior = cpu_prior("fp32")
    truth = {name: value * 1.4 for name, value in prior.medians.items()}
    after = moved(prior, truth)
    measured = step_time(layouts(CPU), truth).total
    assert np.median(np.abs(step_time(layouts(CPU), after.medians).total / measured - 1)) < 0.05


def test_latency_and_overlap_are_observations_too():
    probes = Probes(CPU, latency_s=2e-6, exposed=0.5)
    (seen,) = probe_errors([probes])(CENTRE[None])
    (slower,) = probe_errors([replace(probes, latency_s=4e-6)])(CENTRE[None])
    assert probes.size == len(seen) == 2 and slower[0] < seen[0]


def test_no_probes_say_nothing():
    assert probe_errors([])(np.array([CENTRE, CENTRE])).shape == (2, 0)


def test_a_processor_computes_what_its_host_starts_one_after_the_other():
    truth = cpu_prior("fp32").medians
    slow_host = truth | {"host_torch_s": truth["host_torch_s"] + 1e-3}
    x = cases_of([replace(CPU, devices=1, domain=1)])
    more = step_time(x, slow_host).total[0] - step_time(x, truth).total[0]
    assert more == pytest.approx(CPU.layers * CPU.global_batch * 1e-3)


def test_numbers_of_four_bytes_count_twice_in_what_moves_them():
    wide, narrow = cpu_prior("fp32").medians, cpu_prior("bf16").medians
    assert wide["elementwise"] == pytest.approx(2 * narrow["elementwise"])
    assert wide["gemm_cpu"] == narrow["gemm_cpu"] == ON_CPU["gemm_cpu"][0]
