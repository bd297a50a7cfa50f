"""Error messages of YAML files that do not fit their model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from paceline.core.errors import UserError
from paceline.core.value import Value
from paceline.files.yaml_file import read_document, validate

SCALARS = (
    "true or false, or a whole number, or a number, or "
    "text, in quotes if it looks like a number or date"
)


class Example(Value):
    """Groups whose keys are the user's."""

    env: dict[str, str] = {}
    counts: dict[str, int] = {}
    settings: dict[str, bool | int | float | str | None] = {}
    choice: Literal["a", "b"] = "a"


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        (
            "counts",
            {"int": "a", "float": "b"},
            "counts.int: 'a' is not a whole number; allowed: a whole number\n"
            "mine.yaml: counts.float: 'b' is not a whole number; allowed: a whole number",
        ),
        (
            "env",
            {"int": ["hush"], "str": ["hush"]},
            "env.int: is not text; allowed: text, in quotes if it looks like a number or date\n"
            "mine.yaml: env.str: is not text; "
            "allowed: text, in quotes if it looks like a number or date",
        ),
        ("settings", {"x": [1]}, f"settings.x: a list is not valid; allowed: {SCALARS}"),
        ("settings", {"int": [1]}, f"settings.int: a list is not valid; allowed: {SCALARS}"),
        (
            "settings",
            {"x": {"bool": 1, "int": 2}},
            f"settings.x: a mapping is not valid; allowed: {SCALARS}",
        ),
        (
            "settings",
            {"int": [1], "str": [2]},
            f"settings.int: a list is not valid; allowed: {SCALARS}\n"
            f"mine.yaml: settings.str: a list is not valid; allowed: {SCALARS}",
        ),
    ],
)
def test_a_key_that_is_called_as_a_kind_of_value_is_a_key(field: str, value: Any, told: str):
    with pytest.raises(UserError) as caught:
        validate(Example, {field: value}, "mine.yaml")
    assert str(caught.value) == f"mine.yaml: {told}"


def test_a_number_of_more_digits_than_are_written_is_no_choice():
    with pytest.raises(UserError) as caught:
        validate(Example, {"choice": 16**5000}, "mine.yaml")
    assert str(caught.value) == (
        "mine.yaml: choice: a number of more than 4,300 digits is not one of the choices; "
        "allowed: 'a', 'b'"
    )


def test_a_key_that_stands_twice_is_told_whole(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text("a with value b: 1\na with value b: 2\n")
    with pytest.raises(UserError) as caught:
        read_document(path)
    assert str(caught.value) == f'{path}:2: duplicate key "a with value b"; keep one of the two'


def test_a_file_that_would_be_parsed_for_seconds_is_refused_at_once(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text(f"a: [{'0, ' * 200_000}0]\n")
    with pytest.raises(UserError, match="is larger than 524,288 bytes"):
        read_document(path)
