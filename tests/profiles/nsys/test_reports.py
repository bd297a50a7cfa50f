"""Reports of known content: where their time goes, and what is refused."""

from __future__ import annotations

import signal
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.core import interrupts
from paceline.core.errors import UserError
from paceline.profiles.breakdown import CATEGORIES
from paceline.profiles.nsys import timelines, tool
from paceline.profiles.nsys.tool import database, importer_program, reports_of
from tests.profiles.nsys.report_file import PROCESS, ReportFile

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n"
RING = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def two_steps(path: Path, registered: bool = True) -> Path:
    """Two steps of 10 ms on the device, whose program runs 6 ms ahead of it."""
    report = ReportFile(path)
    for step in (1, 2):
        host, device = 10.0 * step, 10.0 * step + 6

        def mark(text: str, begin: float, end: float) -> None:
            report.mark(text, host + begin, host + end, registered)  # noqa: B023

        def kernel(name: str, begin: float, end: float, launched: float) -> None:
            report.kernel(name, device + begin, device + end, host + launched)  # noqa: B023

        mark(f"paceline:step {20 + step} rank 3", 0, 9.5)
        mark("paceline:communication:tp:allreduce", 2.0, 2.2)
        mark("paceline:communication:dp:allreduce", 3.0, 3.2)
        mark("paceline:clip", 5, 6)
        mark("paceline:data", 8.2, 8.6)
        kernel(GEMM, 0, 3, 1.0)
        kernel(RING, 3, 4, 2.1)  # exposed
        kernel("flash_fwd_kernel", 4, 6, 2.5)
        kernel(RING, 5, 6, 3.1)  # behind attention
        kernel("vectorized_elementwise_kernel", 6, 7, 5.5)
        report.copy(1, device + 7, device + 7.5, host + 7)
    report.kernel(GEMM, 0, 40, 0, PROCESS + (1 << 24))  # another program on the device
    return report.done()


@pytest.mark.parametrize("registered", [True, False])
def test_each_moment_of_a_step_has_its_kind(tmp_path: Path, registered: bool) -> None:
    profile = tool.read_file(two_steps(tmp_path / "a.sqlite", registered))

    assert (profile.ranks, profile.steps) == ((3,), (21, 22))
    first = profile.breakdowns[0]
    assert first.step_time_s == pytest.approx(0.010)
    told = {name: round(1e3 * first.parts[name], 6) for name in first.parts}
    assert told == {
        "gemm": 3, "attention": 2, "optimizer": 1, "memory_bound": 0.5, "other": 0, "bubble": 0,
        "communication_exposed": 1, "communication_overlapped": 1, "data_wait": 0, "host_gap": 2.5,
    }  # fmt: skip
    axes = first.communication
    assert axes["tp"].exposed_s == pytest.approx(1e-3) and axes["tp"].overlapped_s == 0
    assert axes["dp"].overlapped_s == pytest.approx(1e-3) and axes["dp"].exposed_s == 0
    covered_s = sum(first.parts[name] for name in CATEGORIES)
    assert covered_s == pytest.approx(first.step_time_s, rel=1e-9)
    # The last one ends with its last kernel.
    assert profile.breakdowns[1].step_time_s == pytest.approx(0.0075)
    assert profile.kernels[0].name == GEMM


def test_reports_of_several_ranks_are_one_profile(tmp_path: Path) -> None:
    for local in (0, 1):
        report = ReportFile(tmp_path / f"tiny-bf16_2g_77_0_{local}.sqlite")
        report.mark("iteration 5", 0, 4)
        report.kernel(GEMM, 1, 3 + local, 0.5)
        report.done()
    profile = tool.read_file(tmp_path)
    assert (profile.ranks, profile.steps, profile.n) == ((0, 1), (5,), 2)
    assert profile.step_time_s == pytest.approx(2.5e-3)


def foreign(path: Path) -> None:
    """A report that says nothing of its rank."""
    report = ReportFile(path)
    report.mark("iteration 5", 0, 4)
    report.kernel(GEMM, 1, 3, 0.5)
    report.done()


def test_foreign_reports_are_ranks_by_their_order(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        foreign(tmp_path / f"{name}.sqlite")
    assert tool.read_file(tmp_path).ranks == (0, 1, 2)


def test_two_reports_of_one_rank_are_refused(tmp_path: Path) -> None:
    for name in ("first_rank1", "second_rank1"):
        foreign(tmp_path / f"{name}.sqlite")
    with pytest.raises(UserError, match=r"first_rank1.*second_rank1.*are both of rank 1"):
        tool.read_file(tmp_path)


@pytest.fixture
def own_signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The program's own handlers of signals, as long as a test lasts."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    interrupts.install_handlers()
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize(
    ("ends", "error"), [("exit 1", UserError), ("kill -INT $PPID; sleep 5", KeyboardInterrupt)]
)
def test_half_an_export_is_not_taken_for_a_whole_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ends: str,
    error: type[BaseException],
) -> None:
    report = tmp_path / "profiles" / "a_0_0.nsys-rep"
    report.parent.mkdir()
    report.touch()
    program = tmp_path / "nsys"
    program.write_text(f'#!/bin/sh\necho half > "${{4#--output=}}"\n{ends}\n')
    program.chmod(0o755)
    monkeypatch.setattr("paceline.profiles.nsys.tool.nsys_program", lambda: program)
    with pytest.raises(error):
        tool.read(tmp_path)
    assert list(report.parent.iterdir()) == [report]


def test_releases_without_some_tables_or_columns_are_read(tmp_path: Path) -> None:
    path = tmp_path / "old.sqlite"
    with sqlite3.connect(path) as db:
        db.executescript(
            """CREATE TABLE StringIds (id INTEGER, value TEXT);
            INSERT INTO StringIds VALUES (1, 'ampere_sgemm_128x64_nn');
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, shortName INTEGER);
            INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (2000000, 5000000, 1);
            CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, text TEXT);
            INSERT INTO NVTX_EVENTS VALUES (1000000, 6000000, 'train_step 7');
            INSERT INTO NVTX_EVENTS VALUES (1000000, NULL, 'a mark');"""
        )
    db.close()
    (step,) = tool.read_file(path).breakdowns
    assert (step.step, step.gemm) == (7, pytest.approx(3e-3))


def test_without_steps_the_systems_calls_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timelines, "MAX_ROWS", 2)  # calls are summed, not held
    path = tmp_path / "cpu.sqlite"
    with sqlite3.connect(path) as db:
        db.executescript(
            """CREATE TABLE StringIds (id INTEGER, value TEXT);
            INSERT INTO StringIds VALUES (1, 'read'), (2, 'poll'), (3, 'profiling started');
            CREATE TABLE OSRT_API (start INT, end INT, nameId INT, nestingLevel INT);
            INSERT INTO OSRT_API VALUES (0, 0, 3, NULL), (0, 4000000, 1, 0), (0, 2000000, 2, 1),
              (5000000, 8000000, 2, 0), (8000000, 10000000, 2, 0);"""
        )
    db.close()
    profile = tool.read_file(path)
    assert [(hot.name, hot.n, hot.seconds, hot.share) for hot in profile.kernels] == [
        ("poll", 2, pytest.approx(5e-3), 0.5), ("read", 1, pytest.approx(4e-3), 0.4),
    ]  # fmt: skip
    assert "no step marks" in profile.warnings[0]


def test_of_a_ranks_files_the_exported_one_is_taken(tmp_path: Path) -> None:
    for name in ("a_0_0.qdstrm", "a_0_0.nsys-rep", "a_0_0.sqlite", "a_0_1.qdstrm", "tool.json"):
        (tmp_path / name).touch()
    assert [path.name for path in reports_of(tmp_path)] == ["a_0_0.sqlite", "a_0_1.qdstrm"]


def test_the_importer_is_found_where_debian_and_nvidia_put_it(tmp_path: Path) -> None:
    for target, host in (
        ("usr/lib/x86_64-linux-gnu/nsight-systems/target-linux-x64", "usr/lib/nsight-systems"),
        ("opt/nvidia/2025.1/target-linux-x64", "opt/nvidia/2025.1"),
    ):
        importer = tmp_path / host / "host-linux-x64/QdstrmImporter"
        for file in (importer, tmp_path / target / "nsys"):
            file.parent.mkdir(parents=True)
            file.touch()
        assert importer_program(tmp_path / target / "nsys") == importer


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.sqlite", b"no database at all, but long enough to be one" * 30, "SQLite"),
        ("a.sqlite", b"", "no table StringIds"),
        ("a.txt", b"", "not an Nsight Systems report"),
    ],
)
def test_what_is_no_report_is_refused(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=says):
        tool.read_file(path)


def test_without_the_program_the_file_is_refused_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.profiles.nsys.tool.nsys_program", lambda: None)
    with pytest.raises(UserError, match=r"not in PATH.*export --type sqlite"):
        database(tmp_path / "a.nsys-rep", tmp_path)
