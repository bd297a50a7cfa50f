"""A bundle is the run, whole, without secrets, and its figures follow from its files."""

from __future__ import annotations

import gzip
import json
import os
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from paceline.core.errors import UserError
from paceline.files.documents import write_text, write_value
from paceline.runs.bundles import writing
from paceline.runs.bundles.verification import check_bundle, open_bundle
from paceline.runs.bundles.writing import write_bundle
from paceline.runs.outcome import evaluate
from tests.command import paceline
from tests.runs.example import write_run

SECRET = "hf_" + "Ab3" * 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that ended, with its result."""
    folder = write_run(tmp_path / "runs", "2026-01-01-run")
    write_value(folder / "result.json", evaluate(folder).result)
    return folder


def changed(bundle: Path, name: str, content: bytes | None, to: str = "other.tar.gz") -> Path:
    """A copy of a bundle in which one file holds something else, or is missing."""
    other = bundle.with_name(to)
    with tarfile.open(bundle) as old, tarfile.open(other, "w:gz") as new:
        for member in old:
            held = old.extractfile(member)
            assert held is not None
            data = held.read()
            if member.name.endswith(name):
                if content is None:
                    continue
                data, member.size = content, len(content)
            new.addfile(member, BytesIO(data))
    return other


def test_a_bundle_checks_on_another_machine_where_no_run_is(folder: Path, tmp_path: Path):
    path, written = write_bundle(folder, tmp_path / "a.bundle.tar.gz")
    folder.rename(tmp_path / "gone")

    check = check_bundle(path)

    assert check.verdict == "intact" and check.sha256 == written.sha256
    assert check.n_values > 100 and check.n_files == len(written.files)
    done = paceline("runs", "verify", path, runs=tmp_path / "none")
    assert done.returncode == 0 and written.sha256 in done.stdout
    told = paceline("runs", "diff", path, path, runs=tmp_path / "none")
    assert told.stdout == "no differences in what both runs recorded\n"


def test_the_same_run_gives_the_same_bytes(folder: Path, tmp_path: Path):
    one, _ = write_bundle(folder, tmp_path / "one.tar.gz")
    os.utime(folder / "run.json", (0, 0))
    two, _ = write_bundle(folder, tmp_path / "two.tar.gz")

    assert one.read_bytes() == two.read_bytes()


def test_a_changed_step_a_missing_file_and_a_nicer_figure_are_found(folder: Path, tmp_path: Path):
    bundle, _ = write_bundle(folder, tmp_path / "a.tar.gz")
    result = json.loads((folder / "result.json").read_text())
    result["metrics"]["tokens_per_s"]["value"] *= 2
    nicer = json.dumps(result).encode()

    steps = check_bundle(changed(bundle, "rank-00001.jsonl", b"{}\n"))
    lost = check_bundle(changed(bundle, "rank-00001.jsonl", None))
    assert [(f.path, f.fault) for f in steps.faults] == [("steps/rank-00001.jsonl", "changed")]
    assert [fault.fault for fault in lost.faults] == ["missing"]
    assert check_bundle(changed(bundle, "result.json", nicer)).verdict == "damaged"

    # With new digests the figures still do not follow from the files.
    write_text(folder / "result.json", nicer.decode())
    forged, _ = write_bundle(folder, tmp_path / "forged.tar.gz")
    check = check_bundle(forged)
    assert check.verdict == "values differ"
    assert [each.field for each in check.differences] == ["metrics.tokens_per_s.value"]
    done = paceline("runs", "verify", forged, "--json", runs=tmp_path)
    assert done.returncode == 3 and json.loads(done.stdout)["verdict"] == "values differ"


def test_secrets_checkpoints_and_links_stay_behind(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MY_TOKEN", "correct-horse-42")
    (folder / "logs").mkdir()
    (folder / "logs/rank-00000.log").write_bytes(f"{SECRET}\ncorrect-horse-42\n\xff".encode())
    write_text(folder / "checkpoints/step-1/state.json", "{}")
    (folder / "logs/outside").symlink_to("/etc/passwd")
    (folder / ".hidden").write_text("x")

    path, written = write_bundle(folder, tmp_path / "a.tar.gz")

    raw = gzip.decompress(path.read_bytes())
    assert SECRET.encode() not in raw and b"correct-horse" not in raw and b"root:" not in raw
    assert written.redacted == ("logs/rank-00000.log",)
    left_out = {part.path: part.why for part in written.left_out}
    assert left_out == {"checkpoints/step-1/state.json": "a checkpoint", "logs/outside": "a link"}
    assert check_bundle(path).verdict == "intact"


def test_figures_of_raw_files_stay_whatever_variables_hold(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MAX_TOKENS", "1048576")
    monkeypatch.setenv("SITE_PASSWORD", "20260101")
    (folder / "figures.json").write_text('{"tokens": 1048576, "day": 20260101}')

    _, written = write_bundle(folder, tmp_path / "a.tar.gz")

    assert not written.redacted


def test_a_private_key_that_is_longer_than_a_block_is_replaced(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(writing, "_BLOCK_BYTES", 100)
    key = "\n".join(["-----BEGIN PRIVATE " + "KEY-----", *["b3BlbnNzaC1rZXk" * 4] * 9])
    (folder / "rank.log").write_text(f"begins\n{key}\n-----END PRIVATE " + "KEY-----\nends\n")

    path, _ = write_bundle(folder, tmp_path / "a.tar.gz")

    with tarfile.open(path) as archive:
        kept = archive.extractfile(f"{folder.name}/rank.log")
        assert kept is not None and kept.read() == b"begins\n(redacted)\nends\n"


@pytest.mark.parametrize("name", ["odd.json", "odd.jsonl"])
def test_what_would_be_no_json_without_its_secrets_stays_behind(
    folder: Path, tmp_path: Path, name: str
):
    begin = "-----BEGIN PRIVATE " + "KEY-----"
    (folder / name).write_text(json.dumps({"key": f"{begin} b3BlbnNzaC1rZXk"}) + "\n")

    path, written = write_bundle(folder, tmp_path / "a.tar.gz")

    assert [part.path for part in written.left_out] == [name]
    assert b"b3Blbn" not in gzip.decompress(path.read_bytes())


def test_a_run_that_goes_on_cannot_be_bundled(tmp_path: Path):
    write_run(tmp_path, "going", status="running")

    done = paceline("runs", "bundle", "going", "-o", tmp_path / "a.tar.gz", runs=tmp_path)

    assert done.returncode == 1 and "the run is running" in done.stderr
    assert not (tmp_path / "a.tar.gz").exists()


def test_a_log_outside_of_the_bundle_is_not_read(folder: Path, tmp_path: Path):
    record = json.loads((folder / "run.json").read_text())
    record |= {"spec": None, "log": "../../outside.log"}
    write_text(folder / "run.json", json.dumps(record))
    path, _ = write_bundle(folder, tmp_path / "a.tar.gz")

    with pytest.raises(UserError, match="stays inside"):
        check_bundle(path)
    with pytest.raises(UserError, match="stays inside"), open_bundle(path):
        pass
    told = paceline("runs", "diff", path, path, runs=tmp_path)
    assert told.returncode == 1 and "stays inside" in told.stderr


def test_an_archive_that_is_no_bundle_is_said_so(tmp_path: Path):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("run/run.json"), BytesIO())

    done = paceline("runs", "verify", tmp_path / "a.tar.gz", runs=tmp_path)

    assert done.returncode == 1 and "contains no bundle.json" in done.stderr
