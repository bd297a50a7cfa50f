"""A planned cluster: levels of a fabric, failures, spare nodes and prices over time."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import UserError
from paceline.core.site import FabricLevel, Outages, PowerDraw, PricePeriod, Site
from paceline.estimate.answer import Estimate, estimate
from paceline.estimate.costs import Failures
from paceline.estimate.fit.evidence import shipped
from paceline.estimate.model.case import Case, cases_of
from paceline.estimate.model.coefficients import named
from paceline.estimate.model.collectives import all_reduce_s, all_to_all_s, group_rate, port_rate
from paceline.estimate.outages import availability
from paceline.estimate.outlook import Outlook
from paceline.estimate.passage import passage
from paceline.estimate.question import Question
from tests.estimate.model.test_step import LLAMA_70B

C = named(shipped().fit().centre)
ONE = np.ones(1)
DAY = 86_400.0
POD = replace(LLAMA_70B, leaf=256.0, leaf_bytes_per_s=50e9, pod=1024.0, pod_bytes_per_s=12.5e9)
NODES = Site(name="nodes", device="H100-SXM", nodes=64, devices_per_node=8)


def site(**changes: Any) -> Site:
    return NODES.model_copy(update=changes)


def asked(where: Site, recipe: str = "llama31-70b", devices: int | None = None) -> Estimate:
    question = Question(recipe, where.device, devices or where.training_devices, tokens=1e12)
    return estimate(replace(question, site=where), shipped())


def planned(where: Site) -> Outlook:
    found = asked(where).outlook
    assert found is not None
    return found


def rates(case: Case, span: float, stride: float) -> tuple[float, float]:
    x = cases_of([case])
    return (
        float(group_rate(x, C, span * ONE, stride * ONE)[0] / C["inter"] / 1e9),
        float(port_rate(x, C, span * ONE)[0] / C["inter"] / 1e9),
    )


def test_oversubscription_binds_what_crosses_the_pod_and_nothing_else():
    assert rates(POD, 1024, 8) == (pytest.approx(50), pytest.approx(50))
    alone = rates(POD, 4096, 1024)
    assert alone == (pytest.approx(12.5), pytest.approx(12.5))
    # 128 members in a pod share what leaves it, so that their own ports bind.
    assert rates(POD, 4096, 8) == (pytest.approx(50), pytest.approx(12.5))
    scattered = replace(POD, scattered=True, devices=4096)
    assert rates(scattered, 1024, 8)[0] == pytest.approx(12.5)
    assert rates(replace(scattered, devices=1024), 1024, 8)[0] == pytest.approx(50)


def test_an_all_to_all_sends_beyond_a_pod_what_is_for_ranks_there():
    x, size = cases_of([replace(POD, leaf=64.0, leaf_bytes_per_s=1e6)]), 128 * ONE
    seconds = float(all_to_all_s(x, C, 1e6 * ONE, size, ONE, ONE)[0])
    assert seconds == pytest.approx(0.5 * 1e6 / (1e6 * C["inter"]), rel=1e-3)


def test_each_levels_latency_counts_for_the_doublings_that_cross_it():
    far = replace(POD, inter_latency_s=1e-3, leaf_latency_s=1e-2)
    added = [
        float(
            (all_reduce_s(cases_of([far]), C, *args) - all_reduce_s(cases_of([POD]), C, *args))[0]
        )
        for args in ((1e6 * ONE, n * ONE, ONE) for n in (8.0, 64.0, 1024.0))
    ]
    # 8 domains of a leaf are 3 doublings, 32 domains 5, 4 leaves 2.
    assert added == pytest.approx([0.0, 3e-3, 5e-3 + 2e-2])


def test_a_plain_fabric_is_the_same_as_the_links_it_has():
    levels = (
        FabricLevel(name="NVLink", devices=8, link="NVLink4"),
        FabricLevel(name="rail", link="InfiniBand-NDR"),
    )
    plain = Question(
        "llama31-70b", "H100-SXM", 512, intra_link="NVLink4", inter_link="InfiniBand-NDR"
    )
    assert asked(site(fabric=levels)).step_time_s == pytest.approx(
        estimate(plain, shipped()).step_time_s, rel=1e-12
    )


def test_the_answer_names_the_level_that_each_exchange_crosses():
    levels = (
        FabricLevel(name="NVLink", devices=8, link="NVLink4"),
        FabricLevel(name="pod", devices=128, link="8x400 Gb/s"),
        FabricLevel(name="spine", oversubscription=8.0),
    )
    found = planned(site(fabric=levels))
    levels_of = {reach.exchange: reach.level for reach in found.reaches}
    assert levels_of == {
        "tensor": "NVLink",
        "context": "NVLink",
        "data": "pod",
        "pipeline": "spine",
    }
    slow = asked(site(fabric=levels)).parts["stages"]
    fast = asked(site(fabric=(*levels[:2], levels[2].model_copy(update={"oversubscription": 1.0}))))
    assert slow > fast.parts["stages"]


def test_the_middle_is_the_first_order_formula_and_unsureness_widens_it():
    outages = Outages(device_mtbf_h=50_000, checkpoint_s=60)
    sure, unsure = (
        passage(30 * DAY, sd, site(failures=outages.model_copy(update={"mtbf_within": within})), 64)
        for sd, within in ((0.0, 1.0), (0.1, 3.0))
    )
    goodput = Failures(device_mtbf_h=50_000, checkpoint_s=60).goodput(512)
    assert 30 * DAY / sure.seconds[0] == pytest.approx(goodput)
    assert sure.seconds[1:].mean() == pytest.approx(sure.seconds[0], rel=1e-3)
    assert np.std(unsure.seconds[1:]) > 3 * np.std(sure.seconds[1:]) > 0


def test_a_nodes_own_failures_add_to_those_of_its_devices():
    both = planned(site(failures=Outages(device_mtbf_h=8000, node_mtbf_h=1000)))
    assert both.cluster_mtbf_h == pytest.approx(1 / (64 * (8 / 8000 + 1 / 1000)))


def test_spares_bridge_repairs_by_erlangs_loss_formula():
    offered = np.array([0.5, 2.0])
    without = availability(offered, 0)
    assert without == pytest.approx(1 / (1 + offered))
    two = offered**3 / 6 / (1 + offered + offered**2 / 2 + offered**3 / 6)
    assert availability(offered, 2) == pytest.approx(1 - two)
    assert availability(offered, 100_000) == pytest.approx([1, 1])


def test_spares_are_paid_and_bring_goodput():
    failing = {"device_mtbf_h": 20_000, "repair_h": 24}
    price = (PricePeriod(per_device_hour=2.0),)
    none, four = (
        planned(
            site(nodes=64 + spares, prices=price, failures=Outages(**failing, spare_nodes=spares))
        )
        for spares in (0, 4)
    )
    assert none.goodput and four.goodput and four.goodput.value > none.goodput.value
    assert (none.paid_devices, four.paid_devices, four.devices) == (512, 544, 512)
    assert four.money and four.days
    assert four.money.value == pytest.approx(544 * 24 * 2.0 * four.days.value)
    assert four.days.low < four.days.value < four.days.high


def test_prices_change_with_their_day_and_spot_is_not_paid_while_it_is_away():
    periods = (
        PricePeriod(per_device_hour=3.0),
        PricePeriod(
            since=date(2026, 12, 11),
            per_device_hour=1.0,
            terms="spot",
            interrupted_every_h=24,
            interrupted_for_h=6,
        ),
    )
    outages = Outages(device_mtbf_h=1e9, checkpoint_s=0, restart_s=0)
    where = site(start=date(2026, 12, 1), prices=periods, failures=outages)
    way = passage(20 * DAY, 0.0, where, 64)
    first, second = way.stretches
    assert first.seconds[0] == pytest.approx(10 * DAY)
    assert second.seconds[0] == pytest.approx(10 * DAY * (1 + 6 / 24), rel=1e-4)
    assert second.paid_s[0] == pytest.approx(10 * DAY, rel=1e-4)
    money = way.money(512)
    assert money is not None and money[0] == pytest.approx(512 * 240 * (3 + 1), rel=1e-4)
    later = passage(20 * DAY, 0.0, where.model_copy(update={"start": date(2027, 1, 1)}), 64)
    assert [each.period for each in later.stretches] == [periods[1]]


def test_energy_counts_the_stated_power_and_what_is_not_stated_is_said():
    power = PowerDraw(device_w=500, node_w=2000, pue=1.5, carbon_g_per_kwh=100)
    found = planned(site(power=power))
    assert found.days and found.energy_kwh and found.carbon_kg
    kwh = (512 * 0.5 + 64 * 2.0) * 1.5 * 24 * found.days.value
    assert found.energy_kwh.value == pytest.approx(kwh)
    assert found.carbon_kg.value == pytest.approx(0.1 * kwh)
    assert found.goodput is None and found.money is None
    told = " ".join(planned(site()).unknown)
    for words in (
        "failures are not stated",
        "no price is stated",
        "node_w is not stated",
        "fabric",
    ):
        assert words in told


def test_a_cluster_that_does_nothing_but_fail_is_refused():
    outages = Outages(node_mtbf_h=0.01, repair_h=1000)
    with pytest.raises(UserError, match="goodput has no meaning"):
        asked(site(failures=outages))
    with pytest.raises(UserError, match="4 nodes of it kept as spares"):
        asked(site(failures=Outages(node_mtbf_h=1000, spare_nodes=4)), devices=512)
