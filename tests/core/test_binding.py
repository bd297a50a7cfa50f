"""Lists of cores are parsed strictly, and ranks that disturb each other cause a warning."""

from __future__ import annotations

import pytest

from paceline.core.binding import Place, binding_warnings, core_numbers, parse_bind_file
from paceline.core.errors import UserError


def test_a_list_of_cores_is_its_numbers():
    assert core_numbers("0-2,8") == {0, 1, 2, 8}


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-", "1,,2", "-1", "1;2", "999999", "0-999999"])
def test_what_is_no_list_of_cores_is_refused(text: str):
    with pytest.raises(UserError, match="is not a list of cores"):
        core_numbers(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 0-3\n0 4-7", "f:2: local rank 0 is listed twice"),
        ("0 0-3\n2 4-7", "f: has no cores for local rank 1"),
        ("# nothing", "f: has no cores for local rank 0"),
        ("0 0-3\n\n1 $(x)", r"f:3: '\$\(x\)' is not a list"),
        ("zero 1", "f:1: 'zero 1' is unknown"),
        ("0 1 mlx5_0 more", "f:1: .* is unknown; allowed: LOCAL_RANK CORES"),
        ("0 1 ;reboot", "f:1: ';reboot' is not a network device"),
    ],
)
def test_a_wrong_line_of_a_file_is_named(text: str, message: str):
    with pytest.raises(UserError, match=message):
        parse_bind_file(text, "f")


def place(
    rank: int,
    cores: str,
    host: str = "n1",
    by: str | None = "cpu",
    threads: int = 1,
    host_cores: str | None = "0-3",
    numa: int = 1,
) -> Place:
    return Place(rank, host, cores, threads, by, by is not None, None, host_cores, numa)


def test_ranks_that_have_their_own_cores_are_no_matter():
    assert binding_warnings([place(0, "0-1"), place(1, "2-3")]) == []
    assert binding_warnings([place(0, "0-1", by=None), place(1, "0-1", by=None)]) == []


def test_one_host_says_nothing_about_another():
    assert binding_warnings([place(0, "0-3", "n1"), place(1, "0-3", "n2")]) == []


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([place(0, "0-2"), place(1, "2-3")], "used by several bound ranks (n1: 1 of them, core 2"),
        ([place(0, "0,2"), place(1, "3")], "no bound rank uses (n1: 1 of 4)"),
        ([place(r, "0-3", by=None, threads=4) for r in (0, 1)], "(n1: 8 threads on 4 cores)"),
        ([place(r, "3", by=None, threads=1) for r in (0, 1)], "(n1: 2 threads on 1 core)"),
        ([place(r, "0-3", by=None, numa=2) for r in (0, 1)], "--bind auto"),
    ],
)
def test_what_disturbs_the_figures_is_told(places: list[Place], words: str):
    (sentence,) = binding_warnings(places)
    assert words in sentence


def test_hosts_with_the_same_trouble_share_a_sentence():
    crowd = [place(rank, "0", f"n{rank // 2}", threads=1, host_cores="0") for rank in range(6)]
    sentences = binding_warnings(crowd)
    assert len(sentences) == 2 and all(sentence.startswith("n[0-2]") for sentence in sentences)


def test_a_binding_that_failed_is_told_with_its_reason():
    failed = Place(
        3, "n1", "0-1", 1, None, requested=True, why="setting the CPU affinity failed: no"
    )
    (sentence,) = binding_warnings([failed])
    assert sentence.startswith("rank 3 was not bound") and sentence.endswith("failed: no")
