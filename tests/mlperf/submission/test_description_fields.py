"""A system description: what is open in it, what is wrong, and in which line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.mlperf.submission.description_check import (
    FIELDS,
    faults,
    is_placeholder,
    open_fields,
    open_value,
    with_settings,
)
from tests.mlperf.submissions import description


def lines_and_messages(path: Path) -> list[tuple[int | None, str]]:
    text = path.read_text()
    return [(finding.line, finding.message) for finding in faults(text, json.loads(text))]


def test_a_whole_description_has_no_fault(tmp_path: Path):
    assert lines_and_messages(description(tmp_path / "box.json")) == []


def test_published_descriptions_have_none(reference_data: Path):
    for path in sorted((reference_data / "mlperf/systems").glob("v5.1__*.json")):
        assert lines_and_messages(path) == [], path.name


@pytest.mark.parametrize(
    "software", [{"nccl": "2.28"}, ["NCCL 2.28", "cuDNN 9.14"], "NCCL 2.28", ""]
)
def test_other_software_may_be_a_table_a_list_or_a_text(tmp_path: Path, software: object):
    """Seven published submissions of v5.1 have a list, and the official checker accepts it."""
    path = description(tmp_path / "box.json", other_software_stack=software)
    assert lines_and_messages(path) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cooling": None}, "cooling is missing"),
        ({"status": "onprem"}, "status must be one of Available on-premise; Available cloud;"),
        ({"division": "Closed"}, "division must be closed or open, not 'Closed'"),
        ({"accelerators_per_node": 8}, "accelerators_per_node must be a string, not 8"),
        ({"number_of_nodes": "two"}, "number_of_nodes must be an integer, not 'two'"),
        ({"submitter": "SUBMISSION_ORG_PLACEHOLDER"}, "submitter is a placeholder"),
        ({"cooling": open_value("cooling")}, "cooling is still UNKNOWN (air, liquid, ...)"),
        ({"hw_notes": ["a"]}, 'hw_notes must be a string, not ["a"]'),
    ],
)
def test_each_fault_is_said_in_plain_words(
    tmp_path: Path, changed: dict[str, object], message: str
):
    ((line, words),) = lines_and_messages(description(tmp_path / "box.json", **changed))

    assert words.startswith(message)
    name, value = next(iter(changed.items()))
    assert line == (None if value is None else 2 + list(FIELDS).index(name))


def test_open_fields_are_listed_with_what_belongs_there():
    fields = {"cooling": open_value("cooling"), "division": "closed"}

    assert [(field.field, field.what) for field in open_fields(fields)] == [
        ("cooling", "air, liquid, ...")
    ]


def test_settings_fill_in_fields_and_parts_of_the_software():
    fields = {"cooling": open_value("cooling"), "other_software_stack": {"a": "1"}}
    filled = with_settings(fields, ["cooling=liquid", "other_software_stack.nccl=2=x"])

    assert filled == {"cooling": "liquid", "other_software_stack": {"a": "1", "nccl": "2=x"}}


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("cooling", "is not key=value"),
        ("coling=air", "did you mean 'cooling'"),
        ("other_software_stack=x", "is not a field"),
        ("a.b=c", "is not a field"),
    ],
)
def test_a_setting_that_is_no_field_is_refused(setting: str, words: str):
    with pytest.raises(UserError, match=words):
        with_settings({}, [setting])


@pytest.mark.parametrize(
    ("name", "empty"),
    [
        ("SUBMISSION_ORG_PLACEHOLDER", True),
        ("", True),
        ("  ", True),
        ("UNKNOWN: x", True),
        ("<org>", True),
        ("your_org", True),
        ("My Organization", True),
        ("TODO", True),
        ("xxx", True),
        ("Lambda", False),
        ("Example", False),
        ("XFusion", False),
        ("Todos GmbH", False),
    ],
)
def test_placeholders_are_told_from_names(name: str, empty: bool):
    assert is_placeholder(name) is empty
