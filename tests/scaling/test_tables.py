"""Tables of results measured elsewhere: columns are found by many names, faults are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.core.node_groups import GroupThroughput
from paceline.scaling.tables import MeasuredTable, measured_table, node_history, read_rows


def read(place: Path, text: str) -> MeasuredTable:
    path = place / "results.csv"
    path.write_text(text)
    return measured_table(read_rows(path), "results.csv")


LAMBDA = 'Hostnames,Throughput (samples/sec),Status\nn1,72.9532,Success\n"n1, n2",145.576,Success\n'


def test_the_form_that_lambda_writes_is_read(tmp_path: Path):
    table = read(tmp_path, LAMBDA)
    assert table.measured == (
        GroupThroughput(("n1",), 72.9532),
        GroupThroughput(("n1", "n2"), 145.576),
    )
    assert table.resolution == pytest.approx(1e-4) and table.scaling is None


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("hosts,samples_per_s\nn[01-03],9", ("n01", "n02", "n03")),
        ('nodelist,throughput\n"a[1,3];b",9', ("a1", "a3", "b")),
        ("Host Names,samples/s\na b,9", ("a", "b")),
        ("first_host,last_host,samples_per_s\nn-008,n-011,9", ("n-008", "n-009", "n-010", "n-011")),
        ("first_host,last_host,n_hosts,samples_per_s\nx,x,1,9", ("x",)),
    ],
)
def test_hosts_come_from_a_list_or_from_a_range(tmp_path: Path, text: str, hosts: tuple[str, ...]):
    assert read(tmp_path, text + "\n").measured[0].hosts == hosts


@pytest.mark.parametrize(
    ("value", "status", "samples_per_s"),
    [
        ("-1", "Fail", None),
        ("", "", None),
        ("-1.0", "", None),
        ("50.5", "Fail", 50.5),
        ("50.5", "timeout", None),
        ('"1,234.5"', "", 1234.5),
        ("59233.4", "Success", 59233.4),
    ],
)
def test_a_group_that_failed_has_no_value(
    tmp_path: Path, value: str, status: str, samples_per_s: float | None
):
    table = read(tmp_path, f"host,samples_per_s,status\nn1,{value},{status}\n")
    assert table.measured[0].samples_per_s == samples_per_s


def test_the_hostfile_and_the_kind_of_scaling_are_kept(tmp_path: Path):
    table = read(tmp_path, "hostfile,host,samples_per_s,scaling\nall,n1,100,strong\n")
    assert table.measured[0].series == "all" and table.scaling == "strong"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "is empty"),
        ("host;samples_per_s\na;1,5", "has a single column; separate the cells by commas"),
        ("host,samples_per_s", "has a header and no rows"),
        ("host,host,samples_per_s\na,b,1", "two columns are called 'host'"),
        ("host,samples_per_s\na,1,2", "results.csv:2: has 3 cells, the header 2"),
        (
            "host,thruput\na,1",
            "no column of samples/s, but host, thruput; .*did you mean 'throughput'",
        ),
        ("samples_per_s,machine\n1,a", "no column of host names, but samples_per_s, machine"),
        ('host,samples_per_s\na,"1,5"', "samples_per_s: '1,5' is not a positive number"),
        (
            "host,samples_per_s\na,fast",
            "results.csv:2: samples_per_s: 'fast' is not a positive number",
        ),
        ("host,samples_per_s\na,-3", "'-3' is not a positive number"),
        ("host,samples_per_s\na,inf", "'inf' is not a positive number"),
        ("host,samples_per_s\n,5", "results.csv:2: lists no hosts"),
        ('host,samples_per_s\n"a,a",5', "a is listed twice"),
        ("host,samples_per_s\n$(reboot),5", "results.csv:2: .* is not a host name"),
        ('host,nodes,samples_per_s\n"a,b",3,5', "nodes is 3, but 2 hosts are listed"),
        ("first_host,last_host,samples_per_s\nn9,n8,5", "n9 to n8 is not a range of hosts"),
        ("first_host,last_host,samples_per_s\na1,b2,5", "a1 to b2 is not a range of hosts"),
        ("first_host,last_host,samples_per_s\nn1,n99999999,5", "is too many"),
        ("host,samples_per_s,benchmark\na,5,x\nb,6,y", "2 values: x, y; choose one: --where bench"),
        ("host,samples_per_s,scaling\na,5,weak\nb,6,strong", "column scaling has 2 values"),
        ("host,samples_per_s,scaling\na,5,ideal", "scaling 'ideal' is unknown"),
    ],
)
def test_every_fault_is_named_with_its_place(tmp_path: Path, text: str, fault: str):
    with pytest.raises(UserError, match=fault):
        read(tmp_path, text)


def test_no_selected_row_is_no_table():
    with pytest.raises(UserError, match="no row is selected"):
        measured_table([], "results.csv")


def test_a_history_is_every_hosts_values_alone(tmp_path: Path):
    path = tmp_path / "before.csv"
    path.write_text('host,samples_per_s\nn1,10\nn1,11\nn2,9\n"n1,n2",19\nn2,-1\n')
    assert node_history(read_rows(path), "before.csv") == {"n1": [10.0, 11.0], "n2": [9.0]}


def test_what_followed_a_suspicion_up_is_no_sample_of_its_size(tmp_path: Path):
    table = read(tmp_path, "host,samples_per_s,purpose\na,9,plan\nb,9,Second pass\nc,9,for fun\n")
    assert [group.purpose for group in table.measured] == ["plan", "second pass", "plan"]
