"""Progress of staging while it runs: bytes, rate and remaining time, each if it is known."""

from __future__ import annotations

import pytest

from paceline.staging import download_log
from paceline.staging.download_log import DownloadLog, StageProgress


def test_the_whole_is_the_sum_of_its_parts_with_a_rate_of_what_came(
    monkeypatch: pytest.MonkeyPatch,
):
    clock = [100.0]
    monkeypatch.setattr(download_log.time, "monotonic", lambda: clock[0])
    seen: list[StageProgress] = []
    book = DownloadLog(seen.append)
    book.add("model", 1000)
    book.add("data", 3000)
    book.add_present("data", 1000)
    for _ in range(3):
        book.add_received("model", 100)
        clock[0] += 1
    progress = book.progress

    assert (progress.done_bytes, progress.total_bytes) == (1300, 4000)
    assert progress.bytes_per_s == pytest.approx(100)
    assert progress.remaining_s == pytest.approx(27)
    assert [part.done_bytes for part in seen[-1].parts] == [300, 1000]


def test_of_an_unknown_size_no_time_is_left():
    book = DownloadLog()
    book.add("code", None)
    book.add_received("code", 10)
    assert book.progress.total_bytes is None and book.progress.remaining_s is None


def test_what_a_maker_tells_counts_while_it_works_and_its_files_afterwards(
    monkeypatch: pytest.MonkeyPatch,
):
    clock = [100.0]
    monkeypatch.setattr(download_log.time, "monotonic", lambda: clock[0])
    book = DownloadLog()
    book.add("shards", None)
    with book.conversion_progress("shards") as told:
        for done in (500, 600, 700):  # the first of it an earlier call has left
            told(done, 1000)
            clock[0] += 1
        assert (book.progress.done_bytes, book.progress.total_bytes) == (700, 1000)
        assert book.progress.bytes_per_s == pytest.approx(100)
    book.total("shards", 990)
    book.add_present("shards", 990)

    assert (book.progress.done_bytes, book.progress.total_bytes) == (990, 990)
