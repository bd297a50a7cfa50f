"""A planned cluster: the levels of its fabric."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import UserError
from paceline.core.hardware import FabricLevel, Site
from paceline.estimate.fit.evidence import shipped_evidence
from paceline.estimate.model.case import Case, cases_of
from paceline.estimate.model.coefficients import coefficient_values
from paceline.estimate.model.collectives import all_reduce_s, all_to_all_s, group_rate, port_rate
from paceline.estimate.request import EstimateRequest
from paceline.estimate.single_estimate import Estimate, estimate
from tests.estimate.model.test_step import LLAMA_70B

C = coefficient_values(shipped_evidence().fit().centre)
ONE = np.ones(1)
POD = replace(LLAMA_70B, leaf=256.0, leaf_bytes_per_s=50e9, pod=1024.0, pod_bytes_per_s=12.5e9)
NODES = Site(name="nodes", device="H100-SXM", nodes=64, devices_per_node=8)


def site(**changes: Any) -> Site:
    return NODES.model_copy(update=changes)


def asked(where: Site, devices: int | None = None) -> Estimate:
    request = EstimateRequest("llama31-70b", where.device, devices or where.world_size)
    return estimate(replace(request, site=where), shipped_evidence())


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
    plain = EstimateRequest(
        "llama31-70b", "H100-SXM", 512, intra_link="NVLink4", inter_link="InfiniBand-NDR"
    )
    assert asked(site(fabric=levels)).step_time_s == pytest.approx(
        estimate(plain, shipped_evidence()).step_time_s, rel=1e-12
    )


def test_oversubscription_slows_the_exchange_that_crosses_it():
    levels = (
        FabricLevel(name="NVLink", devices=8, link="NVLink4"),
        FabricLevel(name="pod", devices=128, link="8x400 Gb/s"),
        FabricLevel(name="spine", oversubscription=8.0),
    )
    slow = asked(site(fabric=levels)).parts["stages"]
    fast = asked(site(fabric=(*levels[:2], levels[2].model_copy(update={"oversubscription": 1.0}))))
    assert slow > fast.parts["stages"]


def test_no_more_devices_than_the_cluster_has():
    with pytest.raises(UserError, match="has 512 devices; allowed: up to 512"):
        asked(site(), devices=520)
