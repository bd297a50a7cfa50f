"""Whatever a log holds, reading it ends soon, with a bounded answer and without an error."""

from __future__ import annotations

import gzip
import random
import re
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.engines import log_formats
from paceline.files.log_file import BLOCK_BYTES
from tests.engines.generic_inputs import check_generic, random_log
from tests.engines.promises import check_parse, check_read, read
from tests.engines.samples import NOISE, PREFIXES, SAMPLES, log_text, times_of
from tests.nightly import NIGHTLY

LOG_FORMATS = pytest.mark.parametrize("name", log_formats())
FUZZED = settings(
    max_examples=100 if NIGHTLY else 20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
TIMES = times_of(6)

HOSTILE = st.sampled_from(
    [
        b"9" * 24,
        b"1e308",
        b"-1e-308",
        b"1e999",
        b"nan",
        b"-inf",
        b"NaN",
        b"0",
        b"-1",
        b"1e5e5",
        b"1.2.3",
        b"9" * 400,
        b"18446744073709551616",
        b"\xd9\xa3",
        b"",
        b"e",
        b"+",
        b"1,234,567",
        b"\x00",
        b"\x1b[0m",
        b"|",
        b": ",
        b"\n",
        b"\r",
        b"[",
        b"]",
        b"{",
        b"}",
        b"\xff",
        b'"',
        b"'",
    ]
)


def grown(name: str) -> bytes:
    return log_text(name, TIMES)


@pytest.mark.parametrize(
    "name", ["llama_factory", "llm_c", "modded_nanogpt", "nanochat", "nanotron", "olmo_core"]
)
def test_a_damaged_number_of_steps_leaves_the_one_before(name: str):
    content, kind = grown(name), log_formats()[name]
    total = read(kind, content).facts["total_steps"]
    before, _, behind = content.rpartition(b"%d" % total)
    assert before, name
    damaged = before + b"0" * len(str(total)) + behind
    assert check_read(kind, damaged).facts["total_steps"] == total


@pytest.mark.parametrize("name", ["fairseq", "nanochat", "picotron"])
def test_a_line_without_its_rate_has_no_time_however_the_log_is_cut(name: str):
    """Step times follow from rates; only in a log without any they follow from its clock."""
    first, *others = re.split(rb"(?=wps=|tok/sec|Tokens/s)", grown(name), maxsplit=2)
    assert others, name
    check_read(log_formats()[name], first + b"?" + others[0][1:] + b"".join(others[1:]))


@LOG_FORMATS
@FUZZED
@given(content=st.binary(max_size=4000))
def test_random_bytes(name: str, content: bytes):
    check_read(log_formats()[name], content)


@LOG_FORMATS
@FUZZED
@given(data=st.data())
def test_a_log_with_some_of_it_overwritten(name: str, data: st.DataObject):
    content = bytearray(grown(name))
    for _ in range(data.draw(st.integers(1, 6))):
        start = data.draw(st.integers(0, len(content)))
        length = data.draw(st.integers(0, 12))
        content[start : start + length] = data.draw(HOSTILE)
    check_read(log_formats()[name], bytes(content))


@LOG_FORMATS
@FUZZED
@given(data=st.data())
def test_a_log_with_other_numbers_in_it(name: str, data: st.DataObject):
    """Each run of digits, whole numbers and decimals, may become something that no log prints."""
    seen = 0
    chosen = data.draw(st.sets(st.integers(0, 200), max_size=8))

    def changed(match: re.Match[bytes]) -> bytes:
        nonlocal seen
        seen += 1
        return data.draw(HOSTILE) if seen in chosen else match[0]

    check_read(log_formats()[name], re.sub(rb"[0-9][0-9.]*", changed, grown(name)))


@LOG_FORMATS
@FUZZED
@given(data=st.data())
def test_lines_of_two_ranks_in_any_order(name: str, data: st.DataObject):
    lines = [
        prefix + line
        for prefix in data.draw(st.lists(st.sampled_from(PREFIXES), min_size=2, max_size=2))
        for line in grown(name).splitlines(keepends=True)
    ]
    check_read(log_formats()[name], b"".join(data.draw(st.permutations(lines))))


@LOG_FORMATS
@FUZZED
@given(data=st.data())
def test_two_writers_that_tear_each_others_lines(name: str, data: st.DataObject):
    first, second, torn = grown(name), grown(name), b""
    for length in data.draw(st.lists(st.integers(1, 400), max_size=20)):
        torn, first, second = torn + first[:length], second, first[length:]
    check_read(log_formats()[name], torn + first + second)


@LOG_FORMATS
@FUZZED
@given(data=st.data())
def test_pieces_of_all_logs_one_after_the_other(name: str, data: st.DataObject):
    pieces = []
    for _ in range(data.draw(st.integers(1, 8))):
        text = grown(data.draw(st.sampled_from(sorted(SAMPLES))))
        start = data.draw(st.integers(0, len(text)))
        pieces.append(text[start : start + data.draw(st.integers(0, 800))])
    check_read(log_formats()[name], b"".join(pieces))


@LOG_FORMATS
def test_a_log_cut_off_at_every_byte(name: str):
    kind, content = log_formats()[name], log_text(name, TIMES[:2])

    counts = [len(read(kind, content[:end])) for end in range(len(content) + 1)]

    assert counts[0] == 0 and counts[-1] == 2
    assert max(counts) == 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzzed")


@FUZZED
@given(data=st.data())
def test_the_whole_way_from_a_damaged_file_to_a_status(folder: Path, data: st.DataObject):
    content = bytearray(grown(data.draw(st.sampled_from(sorted(SAMPLES)))))
    for _ in range(data.draw(st.integers(0, 4))):
        start = data.draw(st.integers(0, len(content)))
        content[start : start + data.draw(st.integers(0, 300))] = data.draw(HOSTILE)
    packed = data.draw(st.booleans())
    path = folder / "a.log"
    path.write_bytes(gzip.compress(content) if packed else content)
    check_parse(path)


@pytest.mark.parametrize("name", ["olmo_core", "composer", "nemo_rl"])
@pytest.mark.parametrize("num_bytes", [20_000, 200_000])
def test_a_long_record_is_read_alike_wherever_blocks_end(name: str, num_bytes: int):
    """A record over several lines may hold any number of other lines."""
    first, second = (SAMPLES[name].line(number, 1.5) for number in (1, 2))
    head, line, rest = second.partition(b"\n")
    filler = b"    another/value=0.0012\n"
    content = first + head + line + filler * (num_bytes // len(filler)) + rest + first
    check_read(log_formats()[name], content, (BLOCK_BYTES, 4096, 977, 50_000))


FOUND = {
    "an argument whose line another one has torn": (
        "megatron",
        b"  hidden_size ......... 4096\n  num_layers ......... 2\n"
        + b"-\n" * 60
        + b"  hidden_size .. 8192\n"
        + SAMPLES["megatron"].line(1, 1.0),
    ),
    "a count of 309 digits": (
        "megatron",
        SAMPLES["megatron"].line(1, 1.0).replace(b"nan iterations:   0", b"nan iterations: 1e308"),
    ),
    "step times of zero": (
        "maxtext",
        re.sub(rb"seconds: [0-9.]+", b"seconds: 0.000", log_text("maxtext", TIMES)),
    ),
    "a step number beyond 64 bit": (
        "nemo2",
        SAMPLES["nemo2"].line(3, 1.0).replace(b"iteration 3", b"iteration " + b"9" * 19),
    ),
    "figures beyond 32 bit": (
        "maxtext",
        re.sub(rb"(: )[0-9.]+,", rb"\g<1>1e99,", log_text("maxtext", TIMES)),
    ),
}
"""What broke a promise once."""


@pytest.mark.parametrize("damage", FOUND)
def test_what_was_found_once_is_not_found_again(damage: str, folder: Path):
    name, content = FOUND[damage]
    check_read(log_formats()[name], content)
    (folder / "found.log").write_bytes(content)
    check_parse(folder / "found.log")


def near_matches(name: str) -> list[bytes]:
    """Beginnings of the log format's own lines, each repeated until it fills a block."""
    sample, kind = SAMPLES[name], log_formats()[name]
    line = sample.line(20, 1.25).rstrip(b"\r\n")
    begun = [*kind.marks, *(line[: len(line) * share // 6] for share in range(1, 6))]
    return [*begun, line[1:], b"|", b" ", b"[", b"9", b"a: ", b"=", b"{", b'{"a":', *NOISE[:1]]


def seconds_to_read(name: str, content: bytes) -> float:
    """The faster of two attempts."""
    kind, took = log_formats()[name], []
    for _ in range(2):
        begin = time.process_time()
        read(kind, content)
        took.append(time.process_time() - begin)
    return min(took)


@LOG_FORMATS
@pytest.mark.parametrize(
    "end",
    [
        pytest.param(b"", id="none"),
        pytest.param(b"\n", id="LF"),
        pytest.param(b"\r", id="CR", marks=pytest.mark.nightly),
        pytest.param(b" ", id="blank", marks=pytest.mark.nightly),
    ],
)
def test_time_grows_no_faster_than_the_text(name: str, end: bytes):
    """16 times the text takes at most 64 times as long, or less than a tenth of a second."""
    for piece in near_matches(name):
        small, large = ((piece + end) * (size // len(piece + end)) for size in (1 << 14, 1 << 18))
        took = seconds_to_read(name, large)

        assert took < max(0.1, 64 * seconds_to_read(name, small)), piece


def test_the_generic_reader_names_the_column_of_every_figure():
    """The long form is `benchmarks/fuzz.py --surfaces "generic logs"`."""
    rng = random.Random(7)
    num_read = sum(len(check_generic(random_log(rng))) > 0 for _ in range(400))
    assert num_read > 40
