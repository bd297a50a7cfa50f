"""Every surface with seeded inputs; the long form is `make bench-fuzz`."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from paceline.core import stats
from paceline.core.errors import PacelineError, UserError
from paceline.core.hardware import SshSettings
from paceline.files.catalog import cluster
from paceline.machines.ssh.checks import HostRequirements, check_hosts
from paceline.machines.ssh.run import SshHost
from paceline.machines.ssh.session import Message, Session
from tests.attacks.fuzzing import MAX_BYTES, Place, Surface
from tests.attacks.surfaces import SURFACES

SEED = 41
COUNT = 150
SLOW = {"run folders": 20, "bundles": 60, "archives of logs": 20}
"""Surfaces whose inputs take longer than a few milliseconds, and how many they get."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(stats, "BOOTSTRAP_RESAMPLES", 10)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return Place(tmp_path / "place")


@pytest.mark.parametrize("surface", SURFACES, ids=lambda surface: surface.name)
def test_every_input_ends_in_an_answer_or_a_clear_error(surface: Surface, place: Place):
    inputs = enumerate(islice(surface.inputs(SEED), SLOW.get(surface.name, COUNT)))
    faults = {number: place.fault(surface, parts) for number, parts in inputs}
    assert {number: fault for number, fault in faults.items() if fault} == {}


@pytest.mark.parametrize("surface", SURFACES, ids=lambda surface: surface.name)
def test_the_inputs_of_a_surface_begin_with_valid_ones(surface: Surface, place: Place):
    for seed in range(20):
        (folder := place.root / str(seed)).mkdir()
        try:
            surface.read(surface.example(random.Random(seed)), folder)
        except PacelineError:
            continue
        return
    raise AssertionError("none of 20 is read")


def test_each_kind_of_fault_is_found(place: Place):
    def raises(parts: dict[str, bytes], folder: Path) -> None:
        raise ValueError("x")

    def writes(parts: dict[str, bytes], folder: Path) -> None:
        (folder.parent / "other").touch()

    def grows(parts: dict[str, bytes], folder: Path) -> None:
        bytearray(b"x") * (MAX_BYTES + (1 << 28))

    def refuses(parts: dict[str, bytes], folder: Path) -> None:
        (folder / "inside").touch()
        raise UserError("a", "is wrong")

    def fault(read: object) -> str | None:
        return place.fault(Surface("s", lambda rng: {}, read), {})  # type: ignore[arg-type]

    assert fault(refuses) is None
    assert fault(raises) == "ValueError: x"
    assert fault(grows) is not None
    assert fault(writes) == "leaves 'other'"


@pytest.mark.parametrize("text", ["x", "\N{SUPERSCRIPT TWO}", "-1", "", "9" * 5000])
def test_a_host_that_names_no_number_has_not_ended(text: str):
    host = SshHost(0, Session("a", []))
    host.session.inbox.extend(Message(1.0, word, text) for word in ("@pgid", "@alive", "@rc"))
    host.update()
    assert (host.group, host.last_heartbeat, host.code, host.over) == (0, 0, None, False)


FACTS = "@ready 10.0.0.1\\n@clock 1\\n@clock 1\\n@clock 1\\n@facts "


@pytest.mark.parametrize(
    "facts", ["[]", '"x"', '{"host": "b"}', '{"fault": null}', '{"open_files": "many"}', "{}{"]
)
def test_a_host_that_reports_no_facts_cannot_run_a_job(facts: str, monkeypatch: pytest.MonkeyPatch):
    argv = ["bash", "-c", f"printf '{FACTS}%s\\n' '{facts}' >&2"]
    monkeypatch.setattr("paceline.machines.ssh.checks.ssh_argv", lambda host, settings: argv)
    (check,) = check_hosts(["a"], HostRequirements("python"), SshSettings())
    assert (check.host, check.fault) == ("a", f"cannot run python: {facts}")


def test_a_list_is_no_key(tmp_path: Path):
    path = tmp_path / "cluster.yaml"
    path.write_text("? [[a], b]\n: c\n")
    with pytest.raises(UserError, match="a list or a mapping as a key; allowed: text"):
        cluster(path)
