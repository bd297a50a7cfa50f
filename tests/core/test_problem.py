"""What a check finds stands in words of ours: what is wrong, and what is allowed."""

from __future__ import annotations

import csv
import json
from datetime import date
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, StringConstraints, ValidationError, field_validator

from paceline.core.problem import invalid_input, problem_of, problem_of_union
from paceline.core.value import PositiveInt, Value

TEXT = "text, in quotes if it looks like a number or date"
SECRET = f"Zq7{'x1Y' * 20}w"
JWT = f"eyJhbGciOiJIUzI1NiJ9.{'a1B2' * 20}.{'c3D4' * 11}"


class Inner(Value):
    """A group of fields inside Example."""

    x: int = 0


class Example(Value):
    """A field of every kind that a file may have."""

    whole: int = 1
    positive: PositiveInt = 1
    real: float = 0.0
    share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    year: Annotated[int, Field(ge=2017)] = 2017
    pause: Annotated[float, Field(ge=1e-6, le=10_000)] = 1.0
    even: Annotated[int, Field(multiple_of=2)] = 2
    switch: bool = False
    words: str = ""
    code: Annotated[str, StringConstraints(pattern="^[a-z]+$")] = "a"
    label: Annotated[str, Field(min_length=1, max_length=3)] = "a"
    day: date | None = None
    names: tuple[str, ...] = ()
    few: Annotated[tuple[int, ...], Field(min_length=1, max_length=2)] = (1,)
    settings: dict[str, int] = {}
    inner: Inner = Inner()
    choice: Literal["a", "b"] = "a"
    either: int | tuple[int, ...] = 1

    @field_validator("words")
    @classmethod
    def _calm(cls, words: str) -> str:
        if words == "oh":
            raise ValueError("Must be calm")
        if words.startswith("oh "):
            raise ValueError(f"Must {'really ' * 38}be calm {words}")
        return words


def found(field: str, value: Any) -> ValidationError:
    """The error of one wrong field."""
    with pytest.raises(ValidationError) as caught:
        Example.model_validate({field: value})
    return caught.value


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("whole", "abc", "'abc' is not a whole number; allowed: a whole number"),
        ("whole", 1.5, "1.5 is not a whole number; allowed: a whole number"),
        ("whole", None, "is empty; allowed: a whole number"),
        ("whole", [1], "a list is not a whole number; allowed: a whole number"),
        ("whole", {"a": 1}, "a mapping is not a whole number; allowed: a whole number"),
        ("whole", "9" * 5000, "is too large; allowed: 9,007,199,254,740,992 or less"),
        ("positive", 0, "0 is too small; allowed: a number above 0"),
        ("positive", "0", "0 is too small; allowed: a number above 0"),
        ("positive", 2**60, f"{2**60} is too large; allowed: 9,007,199,254,740,992 or less"),
        ("year", 2010, "2010 is too small; allowed: 2017 or more"),
        ("pause", 0.0, "0.0 is too small; allowed: 0.000001 or more"),
        ("pause", 1e5, "100000.0 is too large; allowed: 10,000 or less"),
        ("even", 3, "input should be a multiple of 2, not 3"),
        ("real", "abc", "'abc' is not a number; allowed: a number"),
        ("real", float("nan"), "nan is not a finite number; allowed: a finite number"),
        ("share", -0.5, "-0.5 is too small; allowed: 0 or more"),
        ("share", 1.0, "1.0 is too large; allowed: a number below 1"),
        ("switch", "maybe", "'maybe' is not a boolean; allowed: true or false"),
        ("words", 5, "5 is not text; allowed: text, in quotes if it looks like a number or date"),
        (
            "words",
            True,
            "true is not text; allowed: text, in quotes if it looks like a number or date",
        ),
        ("words", "oh", "must be calm, not 'oh'"),
        ("code", "A1", "'A1' has the wrong format; allowed: text that matches ^[a-z]+$"),
        ("label", "", "'' is too short; allowed: 1 character or more"),
        ("label", "long", "'long' is too long; allowed: 3 characters or fewer"),
        ("day", "soon", "'soon' is not a date; allowed: a date, such as 2026-11-30"),
        ("names", "a", "'a' is not a list; allowed: a list, such as [a, b]"),
        ("few", [], "a list is too short; allowed: 1 value or more"),
        ("few", [1, 2, 3], "a list is too long; allowed: 2 values or fewer"),
        ("settings", 5, "5 is not a mapping; allowed: a mapping, such as {name: value}"),
        ("inner", "a", "'a' is not a mapping; allowed: a mapping, such as {name: value}"),
        ("choice", "c", "'c' is not one of the choices; allowed: 'a', 'b'"),
        ("choice", None, "is empty; allowed: 'a', 'b'"),
        ("words", "oh no", f"must {'really ' * 38}be calm oh no, not 'oh no'"),
        (
            "words",
            f"oh {'never ' * 6}",
            f"must {'really ' * 38}be calm oh never never ..., not 'oh {'never ' * 6}'",
        ),
        ("unknown", 1, "is not a known field"),
    ],
)
def test_an_error_is_a_sentence_with_what_is_allowed(field: str, value: Any, sentence: str):
    assert str(problem_of(found(field, value).errors()[0])) == sentence


def test_a_value_of_none_of_several_kinds_is_told_all_of_them():
    problem = problem_of_union(found("either", "a").errors())
    assert str(problem) == "'a' is not valid; allowed: a whole number, or a list, such as [a, b]"
    problem = problem_of_union(found("either", None).errors())
    assert str(problem) == "is empty; allowed: a whole number, or a list, such as [a, b]"


def test_a_hidden_value_is_not_repeated():
    for field, value in (("whole", "s3cret"), ("words", "oh"), ("choice", "s3cret")):
        sentence = str(problem_of(found(field, value).errors()[0], hidden=True))
        assert "s3cret" not in sentence and "'oh'" not in sentence


def test_a_long_value_is_shortened():
    sentence = problem_of(found("whole", "x" * 1000).errors()[0]).what
    assert sentence == f"'{'x' * 55} ... is not a whole number"


def test_a_number_of_many_digits_is_shortened_however_many_they_are():
    allowed = "is too large; allowed: 9,007,199,254,740,992 or less"
    for number, shown in (
        (10**1000, f"1{'0' * 55} ..."),
        ("9" * 90, f"{'9' * 56} ..."),
        (16**5000, "a number of more than 4,300 digits"),
    ):
        assert str(problem_of(found("positive", number).errors()[0])) == f"{shown} {allowed}"


def test_a_refusal_names_place_and_field():
    error = invalid_input("file.json", found("inner", {"x": "y"}))
    assert str(error) == "file.json: inner.x: 'y' is not a whole number; allowed: a whole number"
    with pytest.raises(ValidationError) as caught:
        Example.model_validate_json("{")
    assert str(invalid_input("file.json", caught.value)).startswith(
        "file.json: is not valid JSON: EOF"
    )


@pytest.mark.parametrize("secret", [SECRET, JWT])
def test_a_long_secret_is_taken_out_before_a_value_is_cut(
    secret: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MY_TOKEN", SECRET)
    (row,) = csv.DictReader(["whole", secret])
    with pytest.raises(ValidationError) as of_json:
        Example.model_validate_json(json.dumps({"whole": secret}))
    with pytest.raises(ValidationError) as of_csv:
        Example.model_validate(row)
    for error in (of_json.value, of_csv.value, found("choice", secret), found("either", secret)):
        assert ": '(redacted)' is not" in (told := str(invalid_input("file", error))), told


@pytest.mark.parametrize("secret", [SECRET, JWT])
def test_a_long_secret_in_what_a_check_says_is_taken_out(
    secret: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MY_TOKEN", SECRET)
    told = str(invalid_input("file", found("words", f"oh {secret}")))
    assert "be calm oh (redacted)" in told and secret[:4] not in told


def test_what_stands_under_env_is_not_repeated():
    class Place(Value):
        """Something with variables."""

        env: dict[str, int] = {}

    with pytest.raises(ValidationError) as caught:
        Place.model_validate({"env": {"MY_TOKEN": "hush"}})
    assert str(invalid_input("file", caught.value)) == (
        "file: env.MY_TOKEN: is not a whole number; allowed: a whole number"
    )
