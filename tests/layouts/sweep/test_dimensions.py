"""What a sweep varies, as it stands on the command line."""

from __future__ import annotations

import pytest

from paceline.core.errors import UserError
from paceline.layouts.sweep.plan import (
    MAX_COMBINATIONS,
    Dimension,
    combinations,
    dimensions,
    split_list,
)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("1,2,4", ["1", "2", "4"]),
        (" 1 , 2 ", ["1", "2"]),
        ("none,full", ["none", "full"]),
        ("[0.9, 0.95]", ["[0.9, 0.95]"]),
        ("[0.9, 0.95],[0.9, 0.999]", ["[0.9, 0.95]", "[0.9, 0.999]"]),
        (
            "{kind: cosine, warmup: 5},{kind: constant}",
            ["{kind: cosine, warmup: 5}", "{kind: constant}"],
        ),
        ('"a,b.txt",c.txt', ['"a,b.txt"', "c.txt"]),
        ("it's,they're", ["it's", "they're"]),
        ("1,,2", ["1", "", "2"]),
        ("", [""]),
    ],
)
def test_commas_part_values_unless_they_belong_to_one(text: str, parts: list[str]):
    assert split_list(text) == parts


def test_named_options_and_lists_of_set_vary_and_single_values_do_not():
    varied, fixed = dimensions(
        {"tp": "1,2", "mbs": "4", "pp": None}, ["steps=8", "layout.vp=1,2", "betas=[0.9, 0.95]"]
    )
    assert varied == (
        Dimension("layout.tp", ("1", "2"), "--tp"),
        Dimension("layout.micro_batch", ("4",), "--mbs"),
        Dimension("layout.vp", ("1", "2")),
    )
    assert fixed == ("steps=8", "betas=[0.9, 0.95]")


def test_short_names_of_fields_are_found_in_set_as_well():
    varied, _ = dimensions({}, ["lr=1e-3,1e-4", "zero_stage=0,1"])
    assert [dimension.field for dimension in varied] == ["training.lr", "layout.zero_stage"]
    assert [dimension.short_name for dimension in varied] == ["lr", "zero"]


def test_a_value_given_twice_runs_once():
    varied, _ = dimensions({"mbs": "1,2,1"}, [])
    assert varied[0].values == ("1", "2")


@pytest.mark.parametrize(
    ("named", "overrides", "words"),
    [
        ({}, [], "nothing to vary; allowed"),
        ({"tp": "1..4"}, ["steps=8"], r"nothing to vary: tp 1\.\.4 is a single value"),
        ({"tp": "1,"}, [], "empty value"),
        ({"tp": "1,2"}, ["layout.tp=3,4"], "given twice"),
        ({}, ["stpes=1,2"], "did you mean 'steps'"),
        (
            {"tp": ",".join(map(str, range(1, 60))), "pp": ",".join(map(str, range(1, 60)))},
            [],
            f"at most {MAX_COMBINATIONS:,}",
        ),
    ],
)
def test_what_makes_no_sweep_is_refused(
    named: dict[str, str | None], overrides: list[str], words: str
):
    with pytest.raises(UserError, match=words):
        dimensions(named, overrides)


def test_every_combination_comes_once_the_last_dimension_fastest():
    varied = (Dimension("a", ("1", "2")), Dimension("b", ("x", "y", "z")))
    settings = list(combinations(varied))
    assert len(settings) == 6 and settings[:2] == [{"a": "1", "b": "x"}, {"a": "1", "b": "y"}]
    assert len({tuple(combination.items()) for combination in settings}) == 6
