"""Layouts as arrays: nothing that a layout decides is lost on the way to the formulas."""

from __future__ import annotations

from dataclasses import fields

from paceline.core.layout import Layout
from paceline.estimate.model.case import Case
from paceline.layouts.search.columns import columns

LAYOUTS = [
    Layout(tp=2, pp=4, cp=2, vp=3, micro_batch=8, zero_stage=1, sequence_parallel=True),
    Layout(zero_stage=3, recompute="full"),
    Layout(recompute="selective", ep=4),
]


def test_each_axis_is_a_column_in_the_order_of_the_layouts():
    found = columns(LAYOUTS)
    assert found["tp"].tolist() == [2, 1, 1] and found["vp"].tolist() == [3, 1, 1]
    assert found["zero_stage"].tolist() == [1, 3, 0] and found["ep"].tolist() == [1, 1, 4]
    assert found["sequence_parallel"].tolist() == [1, 0, 0]
    assert found["full_recompute"].tolist() == [0, 1, 0]
    assert found["selective_recompute"].tolist() == [0, 0, 1]


def test_every_column_is_a_field_of_a_case():
    assert set(columns(LAYOUTS)) <= {field.name for field in fields(Case)}
