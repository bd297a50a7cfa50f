"""Fields of run folders that hold what nobody would write: a clear error or an answer, no fall."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import pytest

from paceline.core import stats
from tests.attacks.fields import PRINTED_VERBS, VERBS, Change, Folders, changes, sample
from tests.nightly import NIGHTLY

COUNT = 600 if NIGHTLY else 250
SEED = 16


def test_every_field_of_every_file_is_among_the_changes():
    files = {change.file for change in changes()}
    assert {"run.json", "result.json", "inventory.json", "trainer.json", "steps.jsonl"} <= files
    assert any(file.startswith("steps/") for file in files)
    assert len(changes()) > 10_000


def test_no_field_of_a_run_folder_makes_a_verb_fall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each change is read by two verbs in turn, every fortieth by all and into their pages."""
    monkeypatch.setattr(stats, "BOOTSTRAP_RESAMPLES", 10)
    folders, falls = Folders(tmp_path), {}
    pairs = cycle(zip(PRINTED_VERBS, PRINTED_VERBS[1:] + PRINTED_VERBS[:1], strict=True))
    for number, (change, pair) in enumerate(zip(sample(COUNT, SEED), pairs, strict=False)):
        for fall in folders.read_with(change, *(VERBS if number % 40 == 0 else pair)):
            falls[fall] = change
    assert not falls


RANK_0 = "steps/rank-00000.jsonl"


@pytest.mark.parametrize(
    ("line", "path", "value"),
    [
        (0, ("torch",), "\ud800"),
        (0, ("host",), "\ud800"),
        (2, ("why",), "\ud800"),
        (0, ("layout", "coordinates", "pp"), 10**20),
        (0, ("layout", "coordinates", "pp"), 2**63),
    ],
)
def test_what_a_long_campaign_brought_down(
    tmp_path: Path, line: int, path: tuple[str, ...], value: object
):
    """Half a character in an event line, and a pipeline stage beyond what JSON can hold."""
    change = Change(RANK_0, line, path, value)
    assert change in [each for each in changes() if each.path == path and each.line == line]
    assert Folders(tmp_path).read_with(change, "show", "list") == []
