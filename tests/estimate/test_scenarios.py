"""Scenarios compared: what one estimate is of another."""

from __future__ import annotations

from dataclasses import replace
from math import log

import pytest

from paceline.cli.scenario_option import scenario
from paceline.core.errors import UserError
from paceline.estimate.costs import Prices
from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.request import EstimateRequest
from paceline.estimate.scenarios import compare_scenarios, step_time_ratio
from paceline.estimate.single_estimate import estimate
from tests.estimate.test_single_estimate import LLAMA_70B


def test_two_scenarios_share_what_is_uncertain_about_both():
    evidence = shipped_evidence()
    twice = replace(LLAMA_70B, devices=128, overrides=("training.global_batch=128",))
    value, low, high = step_time_ratio(LLAMA_70B, twice, evidence)
    alone = [estimate(one, evidence) for one in (LLAMA_70B, twice)]
    assert value == pytest.approx(alone[1].step_time_s / alone[0].step_time_s)
    assert low < value < high and 0.45 < value < 0.6
    widest = alone[1].high_s / alone[0].low_s / value
    assert high / value < widest


def test_scenarios_with_coefficients_of_their_own_share_nothing():
    evidence = shipped_evidence()
    own = evidence.model_copy(update={"provenance": "stored profile"})
    shared, apart = (step_time_ratio(LLAMA_70B, LLAMA_70B, evidence, one) for one in (None, own))
    assert step_time_ratio(LLAMA_70B, LLAMA_70B, evidence, evidence) == shared
    assert shared[0] == apart[0] == 1 and apart[2] > shared[2]
    alone = estimate(LLAMA_70B, evidence)
    assert log(apart[2]) == pytest.approx(2**0.5 * log(alone.high_s / alone.step_time_s))


def test_a_stack_or_device_without_rows_cancels_where_both_have_it():
    exact = shipped_evidence().model_copy(update={"unseen_sd": {}})
    evidence = exact.model_copy(update={"unseen_sd": {"software": 0.09, "device": 0.05}})
    first = replace(LLAMA_70B, device="MI300X", intra_link=None)

    def widths(second: EstimateRequest) -> list[float]:
        ratios = (step_time_ratio(first, second, by) for by in (evidence, exact))
        return [log(high / low) for _, low, high in ratios]

    alike, alike_exact = widths(replace(first, devices=128))
    assert alike == pytest.approx(alike_exact)
    apart, apart_exact = widths(replace(first, device="H100-SXM"))
    assert apart > apart_exact


@pytest.mark.parametrize(
    ("changes", "cancels"),
    [({}, True), ({"software": "torch"}, False), ({"device": "A100"}, False)],
)
def test_the_deviation_of_a_source_cancels_for_one_software_on_one_device(
    changes: dict[str, str], cancels: bool
):
    exact = shipped_evidence().model_copy(update={"unseen_sd": {}})
    evidence = exact.model_copy(update={"unseen_sd": {"source": 0.05}})
    first = replace(LLAMA_70B, software="nemo")
    second = replace(first, devices=128, intra_link=None, **changes)  # type: ignore[arg-type]
    low, high = (log(step_time_ratio(first, second, by).high) for by in (exact, evidence))
    assert (high == pytest.approx(low)) is cancels and high >= low
    with_source, without = (estimate(first, by) for by in (evidence, exact))
    assert with_source.high_s > without.high_s


def test_what_nobody_states_of_the_links_widens_a_ratio_too():
    def width(**links: str | None) -> float:
        asked = replace(LLAMA_70B, **links)  # type: ignore[arg-type]
        _, low, high = step_time_ratio(asked, asked, shipped_evidence())
        return log(high / low)

    assert width() < width(intra_link=None, inter_link=None)


def test_a_larger_batch_takes_longer_and_is_faster_in_tokens():
    evidence = shipped_evidence()
    few = replace(LLAMA_70B, prices=Prices(per_device_hour=2), tokens=1e12)
    many = replace(few, devices=128, prices=Prices(per_device_hour=3))
    step = step_time_ratio(few, many, evidence)
    one, other = (estimate(asked, evidence) for asked in (few, many))

    beside = compare_scenarios(one, other, step)

    assert beside.step_time == step and beside.batch == 2
    rate, cost = beside.tokens_per_s, beside.cost
    assert rate.value == pytest.approx(other.tokens_per_s / one.tokens_per_s)
    assert rate.value == pytest.approx(2 / step.value) and rate.high == pytest.approx(2 / step.low)
    assert cost is not None and cost.value == pytest.approx(128 * 3 / (64 * 2) / rate.value)
    assert cost.high / cost.value == pytest.approx(step.high / step.value)


@pytest.mark.parametrize("priced", ["first", "second", "neither"])
def test_money_is_compared_where_both_have_a_price(priced: str):
    def request(which: str) -> EstimateRequest:
        prices = Prices(per_device_hour=2) if which == priced else Prices()
        return replace(LLAMA_70B, prices=prices, tokens=1e12)

    requests = [request("first"), request("second")]
    found = [estimate(each, shipped_evidence()) for each in requests]
    ratio = step_time_ratio(requests[0], requests[1], shipped_evidence())
    assert compare_scenarios(found[0], found[1], ratio).cost is None


@pytest.mark.parametrize("part", ["gpus=0", "gpus=99999999999999999999", "price=inf", "price=nan"])
def test_a_scenario_of_no_number_of_devices_or_price_is_refused(part: str):
    key, _, word = part.partition("=")
    with pytest.raises(UserError, match=f"{key} is '{word}'; allowed: "):
        scenario(LLAMA_70B, f"device=B200,{part}")
