"""The answer is sentences, and each says what the figures say."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.core.node_groups import GroupThroughput
from paceline.scaling.analysis.analysis import AnalysisContext, analyse
from paceline.scaling.analysis.result import ScaleResult, scale_result
from paceline.scaling.analysis.slow_nodes import HealthySpeed
from tests.scaling.analysis.lambda_values import alone, group, published


def sentences_on(
    measured: list[GroupThroughput] | tuple[GroupThroughput, ...],
    context: AnalysisContext | None = None,
) -> str:
    return "\n".join(scale_result(analyse(measured, context)).sentences)


def test_opt_13b_has_no_single_culprit(reference_data: Path):
    words = sentences_on(published(reference_data, "opt-13b").measured)
    assert words.startswith("64 nodes reach 98.58% (98.35 to 98.81) of 64 times the median node")
    assert "No node is flagged" in words
    assert "No single replacement helps: replacing ml-512-node-020 alone gives +0.04%" in words
    assert "the slow tail as a whole costs about 0.9%" in words
    assert "a node 1.8% slower" in words
    assert "1 value of 1node excluded: measured separately" in words


def test_opt_350m_claims_no_straggler(reference_data: Path):
    words = sentences_on(published(reference_data, "opt-350m").measured)
    assert "cannot be separated: groups do not follow their slowest member" in words
    assert "The loss of 1.80% is not attributed to any node" in words
    assert "replacing" not in words.lower()


def test_the_json_has_the_agreed_form(reference_data: Path):
    result = scale_result(analyse(published(reference_data, "opt-13b").measured))
    document = result.model_dump(mode="json")
    assert {
        "base",
        "scaling",
        "sizes",
        "flagged",
        "nodes",
        "smallest_fault_found",
        "sentences",
    } <= set(document)
    assert document["base"] == {
        "nodes": 1,
        "value": pytest.approx(72.7018),
        "statistic": "median of 64 nodes",
    }
    last = document["sizes"][-1]
    assert {
        "nodes",
        "n",
        "value",
        "efficiency",
        "straggler",
        "communication",
        "naive",
        "low",
        "high",
    } <= set(last)
    assert last["naive"] == {
        "straggler": pytest.approx(0.9904, abs=5e-5),
        "communication": pytest.approx(0.9953, abs=5e-5),
    }
    assert document["nodes"][0]["host"] == "ml-512-node-020" and document["flagged"] == []
    assert ScaleResult.model_validate(document) == result


def test_few_nodes_are_too_few():
    words = sentences_on([*alone([100.0, 80.0]), group("n1 n2", 158.0)])
    assert "Too few to judge: 2 nodes measured alone. It takes 8" in words
    assert "Smallest fault" not in words


def test_a_reference_is_named_with_how_far_the_median_is_from_it():
    context = AnalysisContext(reference=HealthySpeed(100.0))
    words = sentences_on([*alone([99.0, 95.0]), group("n1 n2", 188.0)], context)
    assert "The median node reaches 97.00% of the reference, 100 samples/s." in words
    assert "n2 was 5.00% below the reference (by the margin alone, one value): suspect" in words
    assert "The smallest detectable fault is unknown" in words


def test_only_one_size_says_nothing_of_scaling():
    assert "scaling needs larger groups too" in sentences_on(alone([100.0] * 9))


def test_one_value_a_node_can_only_suspect_and_the_smallest_fault_says_so():
    values = alone([100.0 + 0.2 * (at % 4) for at in range(9)])
    once, twice = (sentences_on(values * times) for times in (1, 2))
    assert "Smallest fault suspected in 9 of 10" in once and "takes a second value" in once
    assert "Smallest fault found in 9 of 10" in twice and "takes a second value" not in twice


def test_failures_are_told_by_host():
    words = sentences_on([*alone([100.0 + at for at in range(8)]), group("n9", None)])
    assert "No value for 1 of 9 sub-clusters: n9." in words


def test_many_flagged_nodes_are_not_all_listed():
    values = [100 + 0.1 * (at % 5) for at in range(40)] + [90.0 + at for at in range(8)]
    words = sentences_on(alone(values) * 2)
    assert "2 more nodes are flagged: n[47-48]." in words
    assert words.count("below the median node") == 6


def test_nothing_measured_is_refused():
    with pytest.raises(UserError, match="no sub-cluster has a value"):
        analyse([group("n1", None)])
