"""Series of repeats: their order, their names, and what is left after an interruption."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import UserError
from paceline.files.run_folder import (
    Repeat,
    groups,
    read_record,
    this_controller,
)
from paceline.machines.placement import Request
from paceline.machines.probe import inventory
from paceline.runs.repeat_plan import Series, SeriesSide, new_series, resumed_series, side_request
from paceline.runs.tasks.slot import JobSlot
from tests.runs.series_example import make_finished

BASE = Request("tiny-llama", overrides=("steps=20",))


@pytest.fixture(autouse=True)
def a_short_look_at_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "BUSY_SAMPLE_S", 0.001)


def repeat_fields(
    number: int, group: str = "g", num_repeats: int = 3, **fields: Any
) -> dict[str, Any]:
    """Fields of the record of one repeat."""
    return {
        "group": group,
        "repeat": Repeat(number=number, num_repeats=num_repeats, groups=(group,)),
        **fields,
    }


def side(group: str, missing: Sequence[int]) -> SeriesSide:
    plan = new_series(Path("none"), [BASE], 1, None).sides[0].plan
    return SeriesSide(group, plan, missing=tuple(missing))


def order(*sides: SeriesSide, num_repeats: int = 5) -> str:
    return " ".join(f"{t.letter}{t.number}" for t in Series(sides, num_repeats).schedule())


@pytest.mark.parametrize(
    ("text", "recipe", "variant", "overrides"),
    [
        ("", "tiny-llama", None, ("steps=20",)),
        ("layout.zero_stage=3", "tiny-llama", None, ("steps=20", "layout.zero_stage=3")),
        ("lr=1e-3, steps=5", "tiny-llama", None, ("steps=20", "lr=1e-3", "steps=5")),
        ("betas=[0.9, 0.95],lr=1", "tiny-llama", None, ("steps=20", "betas=[0.9, 0.95]", "lr=1")),
        ("tiny-gpt", "tiny-gpt", None, ("steps=20",)),
        (":fast", "tiny-llama", "fast", ("steps=20",)),
        ("mine.yaml:fast,lr=1", "mine.yaml", "fast", ("steps=20", "lr=1")),
    ],
)
def test_a_side_is_a_change_of_the_recipe(
    text: str, recipe: str, variant: str | None, overrides: tuple[str, ...]
):
    request = side_request(BASE, text)
    assert (request.recipe, request.variant, request.overrides) == (recipe, variant, overrides)


@pytest.mark.parametrize("text", [":", "tiny-gpt:"])
def test_a_colon_without_a_variant_is_refused(text: str):
    with pytest.raises(UserError, match="has no variant"):
        side_request(BASE, text)


def test_a_side_without_any_recipe_is_refused():
    with pytest.raises(UserError, match="has no recipe"):
        side_request(Request(""), "steps=3")


def test_two_sides_take_turns_so_that_a_linear_drift_cancels():
    both = side("a", range(1, 5)), side("b", range(1, 5))
    assert order(*both, num_repeats=4) == "A1 B1 B2 A2 A3 B3 B4 A4"
    places = {letter: [] for letter in "AB"}
    for place, turn in enumerate(Series(both, 4).schedule()):
        places[turn.letter].append(place)
    assert sum(places["A"]) == sum(places["B"])


def test_on_several_slots_pairs_stay_together_and_turn_on_each_slot():
    both = side("a", range(1, 5)), side("b", range(1, 5))
    series = Series(both, 4, slots=(JobSlot(1, ("x",)), JobSlot(2, ("y",))))
    lanes = [" ".join(f"{t.letter}{t.number}" for t in series.schedule(slot)) for slot in (1, 2)]
    assert lanes == ["A1 B1 B3 A3", "A2 B2 B4 A4"]


def test_one_side_runs_in_order_and_has_no_letter():
    assert order(side("a", range(1, 4)), num_repeats=3) == "1 2 3"


def test_only_what_is_missing_runs_and_keeps_its_place():
    assert order(side("a", [3]), side("b", [1, 4])) == "B1 A3 B4"


def test_a_new_group_is_named_by_recipe_and_content_and_has_a_number_of_its_own(tmp_path: Path):
    first = new_series(tmp_path, [BASE], 2, None).sides[0]
    assert first.group == f"tiny-llama-{first.plan.spec.key}-r1" and first.missing == (1, 2)
    make_finished(tmp_path, 1, 0.2, group=first.group)
    assert new_series(tmp_path, [BASE], 2, None).sides[0].group.endswith("-r2")


def test_two_groups_tell_in_what_they_differ(tmp_path: Path):
    other = side_request(BASE, "layout.zero_stage=3")
    series = new_series(tmp_path, [BASE, other], 5, "night")
    assert [s.group for s in series.sides] == ["night-a", "night-b"]
    assert [s.changes for s in series.sides] == [("layout.zero_stage=0",), ("layout.zero_stage=3",)]


@pytest.mark.parametrize("name", ["last", "a,b", "", "-x", "a/b", "../x", "a b", "\x1b[31m"])
def test_a_name_that_could_be_taken_for_something_else_is_refused(tmp_path: Path, name: str):
    with pytest.raises(UserError, match="is not a valid group name"):
        new_series(tmp_path, [BASE], 2, name)


def test_a_group_may_not_have_the_name_of_a_run(tmp_path: Path):
    folder = make_finished(tmp_path, 1, 0.2)
    with pytest.raises(UserError, match="is the name of a run"):
        new_series(tmp_path, [BASE], 2, folder.name)


def test_a_group_is_gone_on_with_under_its_name(tmp_path: Path):
    spec = new_series(tmp_path, [BASE], 2, None).sides[0].plan.spec
    make_finished(tmp_path, 1, 0.2, spec=spec, **repeat_fields(1))
    make_finished(tmp_path, 2, 0.2, spec=spec, status="failed", **repeat_fields(2))
    make_finished(tmp_path, 3, 0.2, spec=spec, **repeat_fields(3))
    (group_side,) = new_series(tmp_path, [BASE], 4, "g").sides
    assert group_side.missing == (2, 4) and len(group_side.results) == 3
    assert new_series(tmp_path, [BASE], 2, "g").sides[0].missing == ()


def test_a_group_of_another_configuration_is_refused_with_the_difference(tmp_path: Path):
    spec = new_series(tmp_path, [BASE], 2, None).sides[0].plan.spec
    make_finished(tmp_path, 1, 0.2, spec=spec, **repeat_fields(1))
    with pytest.raises(UserError, match=r"training\.steps 20 there, 30 here"):
        new_series(tmp_path, [side_request(BASE, "steps=30")], 2, "g")


def test_a_group_that_is_being_measured_is_left_alone(tmp_path: Path):
    spec = new_series(tmp_path, [BASE], 2, None).sides[0].plan.spec
    make_finished(
        tmp_path,
        1,
        0.2,
        spec=spec,
        status="running",
        controller=this_controller(),
        **repeat_fields(1),
    )
    with pytest.raises(UserError, match="is being measured by process"):
        new_series(tmp_path, [BASE], 2, "g")


def test_a_broken_off_group_knows_what_it_lacks(tmp_path: Path):
    spec = new_series(tmp_path, [BASE], 2, None).sides[0].plan.spec
    make_finished(tmp_path, 1, 0.2, spec=spec, tag="night", **repeat_fields(1))
    make_finished(tmp_path, 2, 0.2, spec=spec, tag="night", status="cancelled", **repeat_fields(2))
    series = resumed_series(tmp_path, "g", None)
    assert (series.num_repeats, series.tag) == (3, "night")
    assert series.sides[0].missing == (2, 3) and series.sides[0].plan.spec == spec
    assert resumed_series(tmp_path, "g", 5).sides[0].missing == (2, 3, 4, 5)


def test_two_groups_go_on_together_even_if_one_has_not_begun(tmp_path: Path):
    first, second = new_series(tmp_path, [BASE, side_request(BASE, "steps=30")], 2, "n").sides
    repeat = Repeat(number=1, num_repeats=2, groups=("n-a", "n-b"), partner=second.plan.spec)
    make_finished(tmp_path, 1, 0.2, spec=first.plan.spec, group="n-a", repeat=repeat)
    series = resumed_series(tmp_path, "n-a", None)
    assert [s.group for s in series.sides] == ["n-a", "n-b"]
    assert [s.plan.spec.training.steps for s in series.sides] == [20, 30]
    assert order(*series.sides, num_repeats=2) == "B1 B2 A2"


def test_a_group_of_another_machine_is_not_gone_on_with(tmp_path: Path):
    make_finished(tmp_path, 1, 0.2, **repeat_fields(1))
    spec = read_record(groups(tmp_path)["g"][0]).spec
    assert spec is not None
    elsewhere = spec.cluster.model_copy(update={"device_label": "Epyc of somebody else"})
    make_finished(
        tmp_path,
        2,
        0.2,
        spec=spec.model_copy(update={"cluster": elsewhere}),
        **repeat_fields(1, "h"),
    )
    with pytest.raises(UserError, match="was measured on Epyc of somebody else"):
        resumed_series(tmp_path, "h", None)


@pytest.mark.parametrize(
    ("fields", "words"), [({}, "is not in"), ({"group": "g"}, "was not made by")]
)
def test_what_is_no_group_of_repeats_cannot_be_gone_on_with(
    tmp_path: Path, fields: dict[str, Any], words: str
):
    make_finished(tmp_path, 1, 0.2, **fields)
    with pytest.raises(UserError, match=words):
        resumed_series(tmp_path, "g", None)
