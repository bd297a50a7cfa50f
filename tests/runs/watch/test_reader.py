"""A reader of a run folder keeps up with restarts, with a thousand ranks and with long files."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from paceline.files.documents import write_text, write_value
from paceline.files.run_folder import RUN_FILE
from paceline.report.terminal import plain_text
from paceline.runs import step_follower
from paceline.runs.step_follower import StepFollower
from paceline.runs.watch import reader as reading
from paceline.runs.watch.reader import RECENT, RunReader
from paceline.runs.watch.report import snapshot_document, state_line
from tests.files.test_events import START, STEP, lines
from tests.files.test_run_folder import make_record

HOSTILE = "h\x1b[31mred\x1b]0;title\x07\u202eback"


def write_run(folder: Path, **fields: object) -> Path:
    write_value(folder / RUN_FILE, make_record("failed", name=folder.name, **fields))
    return folder


def write_rank(
    folder: Path, rank: int, steps: Iterable[int], host: str = "h", busy_s: float = 0.1
) -> Path:
    """One rank's file: its first step of this attempt takes 9 s, each other 0.2 s."""
    numbers = list(steps)
    begin = {**START, "rank": rank, "first_step": numbers[0], "host": host}
    events = [
        {**STEP, "step": n, "step_time_s": 9.0 if n == numbers[0] else 0.2, "busy_time_s": busy_s}
        for n in numbers
    ]
    path = folder / "steps" / f"rank-{rank:05d}.jsonl"
    write_text(path, "".join(lines(begin, *events)))
    return path


def test_a_restarted_job_is_watched_on_and_its_earlier_attempt_forgotten(tmp_path: Path):
    folder = write_run(tmp_path / "it")
    for rank in range(2):
        write_rank(folder, rank, range(1, 91))
    reader, follower = RunReader(folder), StepFollower(folder / "steps" / "rank-00000.jsonl")
    assert reader.state().step == 90 and len(follower.new_steps()) == 90
    place = folder / "attempts" / "17.0"
    place.mkdir(parents=True)
    (folder / "steps").rename(place / "steps")
    (folder / "steps").mkdir()
    write_rank(folder, 0, range(51, 57), host="other")
    state = reader.state()
    assert (state.step, state.n, [rank.host for rank in state.ranks]) == (56, 5, ["other"])
    assert [step.index for step in follower.new_steps()] == [*range(51, 57)]
    assert follower.new_steps() == []


def test_an_achievable_throughput_near_zero_gives_no_fraction(tmp_path: Path):
    (good,) = (Path(__file__).parents[2] / "forms" / "runs").glob("*-tiny-llama-good-dp2-*")
    folder = tmp_path / "it"
    shutil.copytree(good, folder)
    record = json.loads((folder / RUN_FILE).read_text()) | {"achievable_flops_per_s": 1e-300}
    write_text(folder / RUN_FILE, json.dumps(record))
    assert RunReader(folder).state().achievable_fraction is None


def test_the_first_step_of_a_resumed_run_counts_nowhere(tmp_path: Path):
    folder = write_run(tmp_path / "it")
    write_rank(folder, 0, range(51, 54))
    state = RunReader(folder).state()
    assert state.step_time_s == pytest.approx(0.2) and (state.n, state.usual_n) == (2, 0)


def test_a_long_file_is_read_from_its_end_and_by_what_is_added(tmp_path: Path):
    path = write_rank(tmp_path, 0, range(1, 1001))
    last = len(path.read_bytes().splitlines(keepends=True)[-1])
    follower = StepFollower(path, tail_bytes=3 * last + 10)
    assert [step.index for step in follower.new_steps()] == [998, 999, 1000]
    (line,) = lines({**STEP, "step": 1001})
    for half, steps in ((line[:20], []), (line[20:], [1001])):
        with path.open("a") as file:
            file.write(half)
        assert [step.index for step in follower.new_steps()] == steps


def test_one_call_reads_a_limited_part_and_gets_past_a_line_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write_rank(tmp_path, 0, range(1, 101))
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"x" * size + b"\n" + "".join(lines({**STEP, "step": 101})).encode())
    monkeypatch.setattr(step_follower, "MAX_READ_BYTES", size // 4)
    follower = StepFollower(path)
    calls = [[step.index for step in follower.new_steps()] for _ in range(12)]
    assert max(map(len, calls)) < 30
    assert [index for call in calls for index in call] == [*range(1, 102)]


def test_more_ranks_than_files_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_run(tmp_path / "it")
    for rank in range(80):
        write_rank(folder, rank, range(1, 2 * RECENT), busy_s=0.15 if rank == 7 else 0.1)
    looks: list[int] = []
    recent = reading._Rank.recent.fget
    assert recent is not None
    monkeypatch.setattr(
        reading._Rank, "recent", property(lambda rank: (looks.append(1), recent(rank))[1])
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len([*Path("/dev/fd").iterdir()]) + 16
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        reader = RunReader(folder)
        states = [reader.state(), reader.state()]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [len(state.ranks) for state in states] == [80, 80]
    assert states[1].waited_for == 7 and states[1].waited_for_excess == pytest.approx(0.5)
    assert len(looks) < 2 * 10 * 80, "each rank's recent steps are looked at a few times a look"


def test_foreign_text_reaches_no_terminal_raw(tmp_path: Path):
    folder = write_run(tmp_path / "it", reason=f"{HOSTILE} hf_{'a1B2' * 9}")
    for rank in range(2):
        write_rank(folder, rank, range(1, 4), host=HOSTILE)
    state = RunReader(folder).state().model_copy(update={"run": HOSTILE})
    page = plain_text(snapshot_document(state))
    for text in (page, state_line(state)):
        assert not set("\x1b\x07\u202e") & set(text) and "a1B2a1B2" not in text
    assert page.count("hred\N{REPLACEMENT CHARACTER}back") >= 3
