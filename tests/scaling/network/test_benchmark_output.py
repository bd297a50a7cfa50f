"""`paceline probe network --from` reads the tables of nccl-tests, rccl-tests and perftest."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.core.units import MIB
from paceline.scaling.network.benchmark_output import read_benchmark
from tests.command import paceline

HEADER = """\
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
"""  # noqa: E501
ROWS = """\
     8388608       2097152     float     sum      -1    100.0   83.89  125.83       0    101.0   83.06  124.58       0
   134217728      33554432     float     sum      -1    640.0  209.72  314.57       0    641.0  209.39  314.08       0
"""  # noqa: E501


def ranks(num_hosts: int, per_host: int, device: str = "NVIDIA H100 80GB HBM3") -> str:
    lines = ["# Using devices"]
    for rank in range(num_hosts * per_host):
        host, local = divmod(rank, per_host)
        lines.append(
            f"#  Rank {rank:2} Group  0 Pid   4711 on   node-{host} device {local:2} "
            f"[0000:{local:02x}:00] {device}"
        )
    return "\n".join([*lines, ""])


def written(folder: Path, text: str) -> Path:
    path = folder / "output.txt"
    path.write_text(text)
    return path


def test_an_all_reduce_is_compared_with_the_link_inside_a_host(tmp_path: Path):
    start = "# Collective test starting: all_reduce_perf\n"
    path = written(tmp_path, start + ranks(1, 4) + HEADER + ROWS)
    report = read_benchmark(path, "NVLink4", None)
    assert report.identity == {"device": "H100-SXM", "nodes": 1, "devices_per_node": 4}
    small, large = report.collectives
    assert (large.operation, large.bytes, large.ranks) == ("all_reduce", 134217728, 4)
    assert large.latency_s == pytest.approx(640e-6)
    assert large.bytes_per_s == pytest.approx(134217728 / 640e-6)
    assert large.bus_bytes_per_s == pytest.approx(134217728 / 640e-6 * 1.5)
    assert small.bus_bytes_per_s == pytest.approx(125.83e9, rel=1e-4)
    assert report.fabric[0].share == pytest.approx(314.57e9 / 450e9, rel=1e-3)
    assert report.elapsed_s is None and large.spread is None


def test_ranks_on_several_hosts_are_compared_with_the_network(tmp_path: Path):
    text = "$ mpirun -np 4 ./build/all_reduce_perf -b 8M -e 128M\n" + ranks(2, 2) + HEADER + ROWS
    report = read_benchmark(written(tmp_path, text), "NVLink4", "InfiniBand-NDR")
    assert (report.identity["nodes"], report.identity["devices_per_node"]) == (2, 2)
    # A ring leaves a host once, over its two ports of 50 GB/s.
    assert report.fabric[0].expected_bytes_per_s == 100e9
    assert report.fabric[0].link == "InfiniBand-NDR"


PASTED = {
    "all_reduce": ("sum", "-1", 1.5, "0"),
    "reduce_scatter": ("sum", "-1", 0.75, "0"),
    "send_recv": ("sum", "-1", 1.0, "N/A"),
    "all_gather": ("none", "-1", 0.75, "0"),
    "all_to_all": ("none", "-1", 0.75, "N/A"),
    "broadcast": ("none", "0", 1.0, "0"),
    "reduce": ("sum", "0", 1.0, "0"),
}


@pytest.mark.parametrize("operation", PASTED)
def test_the_columns_of_a_pasted_table_identify_the_collective(tmp_path: Path, operation: str):
    operator, root, factor, in_place = PASTED[operation]
    rows = ""
    for size, time_us in ((1024, 20.0), (134217728, 640.0)):
        rate = size / time_us / 1e3
        result = f"{time_us:8.1f} {rate:7.2f} {rate * factor:7.2f}"
        rows += f"{size:12} {size // 4:12} float {operator:>7} {root:>7} "
        rows += f"{result} 0 {result} {in_place:>7}\n"
    report = read_benchmark(written(tmp_path, ranks(1, 4) + HEADER + rows), None, None)
    assert [row.operation for row in report.collectives] == [operation] * 2
    assert report.collectives[1].bus_bytes_per_s == pytest.approx(134217728 / 640e-6 * factor)


@pytest.mark.parametrize(("operator", "root", "factor"), [("none", "0", 0.75), ("sum", "-1", 1.2)])
def test_a_table_of_another_collective_is_refused(tmp_path: Path, operator, root, factor):
    rows = f"134217728 33554432 float {operator} {root} 640 209.72 {209.72 * factor:.2f} 0 "
    rows += f"640 209.72 {209.72 * factor:.2f} 0\n"
    with pytest.raises(UserError, match="its columns do not decide it"):
        read_benchmark(written(tmp_path, ranks(1, 4) + HEADER + rows), None, None)


OLD_RCCL = """\
# Rank  0 Pid  123 on node-a device  0 [0000:0c:00.0] AMD Instinct MI250X
# Rank  1 Pid  123 on node-a device  1 [0000:22:00.0] AMD Instinct MI250X
#       size         count      type     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
  1073741824     134217728     float  10000.0  107.37   53.69  0e+00  10000.0  107.37   53.69    N/A
"""


def test_an_older_table_without_some_columns_is_read(tmp_path: Path):
    report = read_benchmark(written(tmp_path, "all_gather_perf\n" + OLD_RCCL), None, None)
    (row,) = report.collectives
    assert (row.operation, row.ranks, row.wrong) == ("all_gather", 2, 0)
    assert row.bus_bytes_per_s == pytest.approx(1073741824 / 10000e-6 / 2)
    assert report.identity["device"] == "MI250X-GCD"


def test_wrong_elements_fail_the_check(tmp_path: Path):
    bad = ROWS.replace("125.83       0", "125.83      12")
    text = ranks(1, 4) + HEADER + bad + "# Out of bounds values : 12 FAILED\n"
    path = written(tmp_path, "all_reduce_perf\n" + text)
    report = read_benchmark(path, None, None)
    assert [row.wrong for row in report.collectives] == [12, 0]
    assert report.faults == ("all_reduce_perf: Out of bounds values : 12 FAILED",)
    shown = paceline("probe", "network", "--from", path)
    assert shown.returncode == 3 and "WRONG RESULTS of all-reduce" in shown.stdout


PERFTEST = """\
                    RDMA_Write BW Test
 #bytes     #iterations    BW peak[{unit}/sec]    BW average[{unit}/sec]   MsgRate[Mpps]
 4096       5000             9000.00            8000.00                   2.000000
 65536      5000             {rate}             {rate}                    0.743683
"""


@pytest.mark.parametrize(
    ("unit", "rate", "bytes_per_s"),
    [
        ("MB", "46000.00", 46000 * MIB),
        ("MiB", "46000.00", 46000 * MIB),
        ("Gb", "386.00", 386e9 / 8),
    ],
)
def test_a_port_is_compared_with_the_network(
    tmp_path: Path, unit: str, rate: str, bytes_per_s: float
):
    text = PERFTEST.format(unit=unit, rate=rate)
    text = text.replace("9000.00            8000.00", "90.00            80.00")
    report = read_benchmark(written(tmp_path, text), None, "InfiniBand-NDR")
    (pair,) = report.pairs
    assert pair.bytes_per_s == bytes_per_s and pair.latency_s is None
    assert report.fabric[0].share == pytest.approx(bytes_per_s / 50e9)


def test_both_directions_of_a_port_are_halved(tmp_path: Path):
    text = PERFTEST.format(unit="Gb", rate="780.00").replace("Write BW", "Write Bidirectional BW")
    text = text.replace("9000.00            8000.00", "90.00            80.00")
    (pair,) = read_benchmark(written(tmp_path, text), None, None).pairs
    assert pair.bytes_per_s == 390e9 / 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            PERFTEST.format(unit="Gb", rate="0.00").replace("8000.00", "0.00"),
            "holds no results of nccl-tests, rccl-tests or perftest",
        ),
        ("hello\n", "holds no results of nccl-tests, rccl-tests or perftest"),
        (
            ranks(1, 4) + HEADER + ROWS.replace("       0", "     N/A"),
            r"output.txt:10: does not name its program, and its columns do not decide it.*above it",
        ),
        ("gather_perf\n" + ranks(1, 4) + HEADER + ROWS, "is of gather_perf; allowed: .*alltoall"),
        ("all_reduce_perf\n" + HEADER + ROWS, "has no lines `# Rank` of two or more ranks"),
        (
            "all_gather_perf\n" + ranks(1, 4) + HEADER + ROWS,
            "prints a bus bandwidth of 125.83 GB/s, but all-gather of 4 ranks has 62.91 GB/s",
        ),
        (
            "all_reduce_perf\n" + ranks(1, 4) + HEADER.replace("  time  ", "cputime ") + ROWS,
            "shows CPU times",
        ),
        (
            "all_reduce_perf\n" + ranks(1, 4) + HEADER + ROWS.replace("100.0", "1x0.0"),
            "does not match the header of the table",
        ),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(tmp_path: Path, text: str, message: str):
    with pytest.raises(UserError, match=message):
        read_benchmark(written(tmp_path, text), None, None)


def test_options_of_a_measurement_have_no_effect_with_a_file(tmp_path: Path):
    path = written(tmp_path, "all_reduce_perf\n" + ranks(1, 4) + HEADER + ROWS)
    shown = paceline("probe", "network", "--from", path, "--seconds", "3")
    assert shown.returncode == 1 and "--seconds: has no effect with --from" in shown.stderr
