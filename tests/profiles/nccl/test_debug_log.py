"""Logs of NCCL_DEBUG=INFO, whole and damaged."""

from __future__ import annotations

import gzip
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import pytest

from paceline.core.layout import Layout
from paceline.profiles.nccl.communication import Communication, ExchangeRow
from paceline.profiles.nccl.debug_log import DebugLog
from paceline.profiles.nccl.traffic_comparison import axis_groups
from paceline.profiles.nccl_logs import read_file
from paceline.runs.profile_report import profile_document
from tests.profiles.nccl.debug_lines import begun, call, channel, setup, steps, who

AXES = axis_groups(Layout(tp=2), 4)


def told(folder: Path, *texts: Iterable[str], steps: int | None = None) -> Communication:
    """What logs say, one a file."""
    log = DebugLog()
    for number, text in enumerate(texts):
        path = folder / f"{number}.log"
        path.write_text("\n".join(text) + "\n")
        log.read(path)
    return log.communication(AXES, steps)


def row(table: Communication, collective: str, size: int) -> ExchangeRow:
    return next(r for r in table.rows if (r.collective, r.size) == (collective, size))


def test_calls_and_bytes_are_those_of_a_rank_by_kind_of_communicator(tmp_path: Path) -> None:
    table = told(tmp_path, [*setup(), *steps()])

    assert table.ranks == 8 and table.torn_lines == 0
    sums = row(table, "all_reduce", 2)
    assert (sums.axis, sums.stride, sums.communicators, sums.members) == ("tp", 1, 4, 8)
    assert (sums.calls, sums.num_bytes, sums.link_bytes) == (6, 6 * 2048, 6 * 2048)
    assert [(size.up_to_bytes, size.calls) for size in sums.sizes] == [(2048, 6)]
    # One rank's part, times the four ranks that hold the whole.
    scattered, gathered = row(table, "reduce_scatter", 4), row(table, "all_gather", 4)
    assert (scattered.axis, scattered.stride, scattered.communicators) == ("dp", 2, 2)
    assert scattered.num_bytes == 2 * 500 * 4 * 4 and gathered.num_bytes == 2 * 500 * 2 * 4
    assert scattered.link_bytes == scattered.num_bytes * 3 / 4
    world = row(table, "all_reduce", 8)
    assert world.axis is None and world.num_bytes == 8


def test_a_communicator_of_which_ranks_were_not_logged_has_no_axis(tmp_path: Path) -> None:
    """Of 16 ranks 0 and 8 log: all that is known of the world is the ranks of a group of dp."""
    lines: list[str] = []
    for place, rank in enumerate((0, 8)):
        process = 4 * place  # the first of its host
        lines.append(begun(process, f"0xa{rank}", rank, 16, "0xadcb40d61cc1bc4b"))
        lines.append(begun(process, f"0xc{rank}", place, 2, "0x20"))
        lines.append(call(process, "AllReduce", 1000, f"0xa{rank}", 16))
        lines.append(call(process, "AllReduce", 500, f"0xc{rank}", 2))
    path = tmp_path / "nccl.log"
    path.write_text("\n".join(lines))
    log = DebugLog()
    log.read(path)
    rows = log.communication(axis_groups(Layout(tp=8), 2)).rows
    assert [(r.size, r.axis, r.num_bytes) for r in rows] == [(16, None, 4000), (2, "dp", 2000)]


def test_how_it_connects_is_told(tmp_path: Path) -> None:
    network = told(tmp_path, setup()).network

    assert network.library == ("2.21.5+cuda12.4",) and network.used == ("IB",)
    assert network.devices == ("mlx5_0:1/IB", "mlx5_1:1/IB") and network.sockets == ("eth0",)
    assert network.transports == {
        "P2P/CUMEM": 1, "NET/IB GDRDMA": 1, "NET/IBext_v8 GDRDMA": 1,
    }  # fmt: skip
    assert network.channels == (24,) and network.settings == {"NCCL_IB_HCA": "mlx5"}


@pytest.mark.parametrize(
    "line",
    [
        "AllReduce: 4096 Bytes -> Algo 1 proto 2 time 33.208008",
        "AllReduce: 4096 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..23}",
        "AllReduce: 4096 Bytes -> Algo Ring proto Simple channel{Lo..Hi}={3..7}",
    ],
)
def test_algorithm_and_protocol_are_read_in_every_form(tmp_path: Path, line: str) -> None:
    (choice,) = told(tmp_path, [f"{who(0)} {line}"]).algorithms
    assert (choice.collective, choice.algorithm, choice.protocol) == (
        "all_reduce",
        "Ring",
        "Simple",
    )
    assert choice.num_bytes == 4096 and choice.first_channel in (None, 0, 3)


def test_torn_lines_are_counted_and_glued_ones_are_read(tmp_path: Path) -> None:
    lines = [*setup(), *steps()]
    whole = told(tmp_path, lines)
    cut = call(3, "AllReduce", 7, "0xb3", 2)
    headless = call(5, "AllReduce", 1024, "0xb5", 2, kind=9).split("NCCL INFO ")[1]
    glued = [f"{who(2)} {call(4, 'AllReduce', 1024, '0xb4', 2, kind=9)}", headless]
    table = told(tmp_path, [*lines, *glued, cut[: cut.index("datatype")]])

    assert table.torn_lines == 1
    assert row(table, "all_reduce", 2).calls == row(whole, "all_reduce", 2).calls + 2 / 8


def test_messages_and_communicators_without_a_begin_still_count(tmp_path: Path) -> None:
    lines = [call(0, "Send", 100, "0xd0", 2), call(1, "Recv", 100, "0xd1", 2, 0xD60)]
    table = told(tmp_path, lines)

    assert {(r.collective, r.axis, r.stride, r.num_bytes) for r in table.rows} == {
        ("send", None, None, 400), ("recv", None, None, 400),
    }  # fmt: skip


def test_lines_of_rccl_and_of_old_versions_are_read(tmp_path: Path) -> None:
    rccl = call(0, "AllReduce", 10, "0xa0", 8) + " task 0 globalrank 0"
    newer = call(0, "AllReduce", 10, "0xa0", 8).replace("count", "acc (nil) count", 1)
    old = (
        "node:3384:3414 [0] NCCL INFO comm 0xa0 rank 0 nranks 8 cudaDev 0 nvmlDev 0 - Init COMPLETE"
    )
    assert row(told(tmp_path, [rccl, newer, old]), "all_reduce", 8).calls == 2


def test_logs_of_single_processes_are_joined(tmp_path: Path) -> None:
    one = [
        [line for line in [*setup(), *steps()] if f":{4000 + rank}:" in line] for rank in range(8)
    ]
    assert told(tmp_path, *one).rows == told(tmp_path, [*setup(), *steps()]).rows


def test_a_log_is_streamed_and_hostile_sizes_stay_small(tmp_path: Path) -> None:
    path = tmp_path / "large.log.gz"
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write("\n".join(setup()) + "\n")
        for number in range(20_000):
            file.write(call(number % 8, "AllReduce", number, f"0xa{number % 8}", 8, number) + "\n")
    log = DebugLog()
    tracemalloc.start()
    log.read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    table = log.communication(AXES)
    assert row(table, "all_reduce", 8).num_bytes * 8 == sum(range(20_000)) * 4
    assert peak < 10e6


def test_a_compressed_log_that_was_cut_short_says_so(tmp_path: Path) -> None:
    path = tmp_path / "cut.log.gz"
    content = gzip.compress("\n".join([*setup(), *steps(200)]).encode())
    path.write_bytes(content[: len(content) // 2])
    log = DebugLog()
    log.read(path)
    table = log.communication(AXES)
    assert table.broken_off and table.rows


def test_a_log_without_calls_names_no_rank(tmp_path: Path) -> None:
    (path := tmp_path / "nccl.log").write_bytes(b"a:1:1 [0] NCCL INFO Using network Socket\n")
    document = profile_document(read_file(path), "nccl.log")
    assert document.setup[0] == "no rank known"
    assert any("NCCL_DEBUG_SUBSYS must include COLL" in note for note in document.notes)


def test_a_healthy_log_raises_no_doubt(tmp_path: Path) -> None:
    assert told(tmp_path, [*setup(), *steps()]).warnings == ()


SOCKETS = [
    f"{who(0)} NET/IB : No device found.",
    f"{who(0)} NET/Socket : Using [0]docker0:172.17.0.1<0>",
    f"{who(0)} Using network Socket",
    channel(0, 3, 4, "[send] via NET/Socket/0"),
]


def test_one_host_communicates_with_no_other(tmp_path: Path) -> None:
    one_host = [f"{who(rank)} Using network Socket" for rank in (0, 1)]
    assert told(tmp_path, one_host).warnings == ()
    two_hosts = [*one_host, f"{who(4)} Using network Socket"]
    assert "TCP sockets" in told(tmp_path, two_hosts).warnings[0]
    other_logs_missing = [*one_host, begun(0, "0xa0", 0, 8, None)]
    assert "TCP sockets" in told(tmp_path, other_logs_missing).warnings[0]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (SOCKETS, "TCP sockets (docker0), not over InfiniBand or RoCE; NCCL found no InfiniBand"),
        ([channel(0, 3, 4, "[send] via NET/IB/0")], "1 of 1 InfiniBand connections do not use GPU"),
        (
            [channel(0, 0, 1, "via P2P/IPC"), channel(0, 1, 2, "via SHM/direct/direct")],
            "1 connection goes through CPU memory (SHM)",
        ),
        (
            ["node:1:1 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]"],
            "Failed to open libibverbs",
        ),
        (["NCCL version 2.21.5+cuda12.4", "NCCL version 2.19.3+cuda12.3"], "different libraries"),
    ],
)
def test_a_slow_connection_is_named(tmp_path: Path, lines: list[str], says: str) -> None:
    (warning,) = told(tmp_path, lines).warnings
    assert says in warning


def test_communicators_that_split_are_told_by_their_own_ids(tmp_path: Path) -> None:
    split = begun(0, "0xe0", 0, 2, "0x77").replace("ncclCommInitRank", "ncclCommSplit")
    table = told(tmp_path, [split, call(0, "AllReduce", 4, "0xe0", 2)])
    assert row(table, "all_reduce", 2).communicators == 1
