"""What a run reads is kept in its folder: by content, wherever it lies."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from paceline.core.assets import Asset, Manifest, RunInput, StagedFile, content_digest
from paceline.core.training import Data
from paceline.files import inputs
from paceline.files.documents import write_text, write_value
from paceline.files.inputs import find_input, find_run_inputs
from tests.example import make_spec


def staged(root: Path, content: str) -> Path:
    """The only file of a staged asset called corpus."""
    file = root / "corpus-0123456789ab/content/text/a.txt"
    write_text(file, content)
    listed = StagedFile(
        path="text/a.txt", bytes=len(content), sha256=hashlib.sha256(content.encode()).hexdigest()
    )
    write_manifest(root, (listed,))
    return file


def write_manifest(root: Path, files: tuple[StagedFile, ...]) -> None:
    manifest = Manifest(
        asset=Asset(name="corpus", kind="made", source="jsonl"),
        revision="abc123",
        bytes=sum(file.bytes for file in files),
        sha256=content_digest(files),
        files=files,
        origin="here",
        staged_at="2026-01-01T00:00:00+00:00",
        seconds=1.0,
        paceline_version="0",
    )
    write_value(root / "corpus-0123456789ab/manifest.json", manifest)


def test_a_staged_file_is_identified_by_its_manifest_and_not_read_again(tmp_path: Path):
    file = staged(tmp_path, "text")
    sha256 = hashlib.sha256(b"text").hexdigest()
    file.write_text("rot!")

    kept = find_run_inputs(make_spec(data=Data(source="text", path=str(file))), {})

    assert kept is not None and [m.asset.name for m in kept.manifests] == ["corpus"]
    (part,) = kept.inputs
    assert (part.field, part.asset, part.inside) == ("data.path", "corpus", "text/a.txt")
    assert (part.revision, part.sha256, part.bytes) == ("abc123", sha256, 4)


def several(folder: Path, manifest: bool) -> RunInput:
    """What a run told that read a folder of two files; as part of a staged asset or not."""
    content = folder / "corpus-0123456789ab/content"
    for name in ("one", "two"):
        write_text(content / "text" / name, name)
    files = tuple(
        StagedFile(path=f"text/{name}", bytes=3, sha256=hashlib.sha256(name.encode()).hexdigest())
        for name in ("one", "two")
    )
    if manifest:
        write_manifest(folder, files)
    told = find_input("data.path", content / "text")
    assert told is not None
    return told


def test_the_same_files_have_one_digest_staged_or_not(tmp_path: Path):
    there, here = several(tmp_path / "a", manifest=True), several(tmp_path / "b", manifest=False)

    assert (there.asset, here.asset) == ("corpus", None)
    assert there.sha256 and there.is_alike(here)


def test_a_file_that_no_manifest_lists_leaves_no_digest(tmp_path: Path):
    staged(tmp_path, "text").with_name("more.txt").write_text("12345")

    told = find_input("data.path", tmp_path / "corpus-0123456789ab/content/text")

    assert told is not None
    assert (told.asset, told.files, told.bytes, told.sha256) == ("corpus", 2, 9, None)


def test_files_that_nobody_staged_are_read_up_to_a_size(tmp_path: Path):
    for suffix in (".bin", ".idx"):
        (tmp_path / f"part{suffix}").write_bytes(b"1234")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    data = Data(source="indexed", blend=((str(tmp_path / "part"), 1.0),))
    spec = make_spec(data=data, engine_settings={"model": str(tmp_path / "model")})

    kept = find_run_inputs(spec, {"data.text": tmp_path / "model/config.json"})

    assert kept is not None and not kept.manifests
    told = {part.field: (part.files, part.bytes, part.sha256) for part in kept.inputs}
    assert told["data.blend.0.0"][:2] == (2, 8) and told["data.blend.0.0"][2]
    assert told["engine_settings.model"][:2] == (1, 2)
    assert told["data.text"][2] == hashlib.sha256(b"{}").hexdigest()


def test_a_large_file_is_identified_by_its_size(tmp_path: Path):
    file = tmp_path / "large"
    with file.open("wb") as content:
        content.truncate(inputs.DIGEST_LIMIT_BYTES + 1)

    kept = find_run_inputs(make_spec(data=Data(source="text", path=str(file))), {})

    assert kept is not None
    assert kept.inputs[0].sha256 is None
    assert kept.inputs[0].bytes == inputs.DIGEST_LIMIT_BYTES + 1


def test_synthetic_data_is_not_an_input():
    assert find_run_inputs(make_spec(), {}) is None


def test_a_pipe_among_the_files_of_an_input_has_no_digest(tmp_path):
    (tmp_path / "file").write_text("content")
    os.mkfifo(tmp_path / "pipe")
    assert find_input("data", tmp_path).sha256 is None
