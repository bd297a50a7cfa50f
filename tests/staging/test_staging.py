"""A staging as a whole: killed, raced, out of room, damaged later; what is staged is whole."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.core.errors import SystemFaultError, UserError
from paceline.files.staged import (
    CONTENT_FOLDER,
    MANIFEST_FILE,
    asset_state,
    read_manifest,
    with_staged_files,
)
from paceline.staging import stager, verification
from paceline.staging.connection import (
    StagingStoppedError,
    StopSignal,
    TransientError,
    with_retries,
)
from paceline.staging.plan import DiskSpace, staging_plan
from paceline.staging.stager import Stager
from paceline.staging.verification import BLOCK_BYTES, verify
from tests.staging.mirror import Mirror
from tests.staging.staged import content_of, folder_of, noise, recipe_of, stage_all
from tests.waiting import wait_until

FILES = {f"part-{number}": noise(BLOCK_BYTES // 2 + number, number) for number in range(4)}
KILLS = 12


def shards(mirror: Mirror, **changes: object):
    mirror.files = {f"/data/{name}": content for name, content in FILES.items()}
    files = [{"path": name} for name in FILES]
    asset = {"name": "shards", "kind": "url", "source": f"{mirror.url}/data", "files": files}
    return recipe_of({**asset, **changes})


def in_a_child(work: Callable[[], None]) -> int:
    """The pid of a child that does the work and ends with 0, or 1 where it raises."""
    if child := os.fork():
        return child
    try:
        work()
        os._exit(0)
    except SystemFaultError as error:
        os._exit(2 if "is full" in str(error) else 3)
    finally:
        os._exit(1)


def test_killed_at_any_moment_nothing_half_done_is_taken_for_done(mirror: Mirror, tmp_path: Path):
    one = shards(mirror)
    began = time.monotonic()
    os.waitpid(in_a_child(lambda: stage_all(one, tmp_path / "whole")), 0)
    whole_s = time.monotonic() - began

    seconds = random.Random(7)
    for _ in range(KILLS):
        child = in_a_child(lambda: stage_all(one, tmp_path))
        time.sleep(seconds.uniform(0, whole_s))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if asset_state(folder_of(one, tmp_path, "shards")) == "staged":
            assert content_of(one, tmp_path, "shards") == FILES
            (folder_of(one, tmp_path, "shards") / MANIFEST_FILE).unlink()
    stage_all(one, tmp_path)
    assert content_of(one, tmp_path, "shards") == FILES
    assert verify(folder_of(one, tmp_path, "shards"), "shards") == []


def test_two_stagers_fetch_each_file_once(mirror: Mirror, tmp_path: Path):
    one = shards(mirror)
    children = [in_a_child(lambda: stage_all(one, tmp_path)) for _ in range(3)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]

    assert [len(mirror.gets(path)) for path in mirror.files] == [1] * len(FILES)
    assert content_of(one, tmp_path, "shards") == FILES


def test_a_disk_that_fills_up_is_told_and_what_came_is_kept(mirror: Mirror, tmp_path: Path):
    mirror.silent = True
    one = shards(mirror)

    def with_little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK_BYTES // 4, resource.RLIM_INFINITY))
        stage_all(one, tmp_path)

    child = in_a_child(with_little_room)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (2, 3)
    assert asset_state(folder_of(one, tmp_path, "shards")) == "partial"
    mirror.asked.clear()
    stage_all(one, tmp_path)
    assert content_of(one, tmp_path, "shards") == FILES
    assert any("Range" in headers for path in mirror.files for headers in mirror.gets(path))


def test_without_room_nothing_is_begun(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stager, "disk_space", lambda folder: DiskSpace(1000, None))
    one = shards(mirror)
    with pytest.raises(SystemFaultError, match=r"but only .* are free"):
        stage_all(one, tmp_path)
    assert not list(tmp_path.iterdir())
    assert not any(mirror.gets(path) for path in mirror.files)


def test_an_interrupt_ends_a_transfer_that_waits_for_its_server(mirror: Mirror, tmp_path: Path):
    one, server, ended = shards(mirror), threading.Event(), StopSignal()
    mirror.fail("/data/part-0", ("slow", server, 1000))

    def interrupt() -> None:
        wait_until(lambda: mirror.gets("/data/part-0"), "a request")
        time.sleep(0.1)
        ended.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(StagingStoppedError):
        Stager(stop=ended).stage(staging_plan(one, None, tmp_path))
    assert not server.is_set()  # nobody has waited for it
    thread.join()
    server.set()
    assert asset_state(folder_of(one, tmp_path, "shards")) == "partial"


def test_after_the_end_no_connection_is_opened_and_nobody_waits(mirror: Mirror, tmp_path: Path):
    one, server, ended = shards(mirror), threading.Event(), StopSignal()
    mirror.fail("/data/part-0", ("slow", server, 1000))

    def interrupt() -> None:
        wait_until(lambda: mirror.gets("/data/part-0"), "a request")
        ended.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(StagingStoppedError):
        Stager(jobs=1, stop=ended).stage(staging_plan(one, None, tmp_path))
    thread.join()
    server.set()

    def busy() -> None:
        raise TransientError("busy", wait_s=300)

    assert not any(mirror.gets(f"/data/part-{number}") for number in (1, 2, 3))
    with pytest.raises(StagingStoppedError):
        with_retries(busy, "source", ended)


@pytest.mark.parametrize(
    ("harm", "fault"),
    [
        (lambda content: (content / "part-1").unlink(), ("part-1", "missing")),
        (lambda content: (content / "part-2").write_bytes(FILES["part-3"]), ("part-2", "changed")),
        (lambda content: flip(content / "part-2"), ("part-2", "changed")),
        (lambda content: (content / "other").write_text("?"), ("other", "extra")),
    ],
    ids=["missing", "another size", "bit rot", "extra"],
)
def test_damage_is_found_refused_and_mended(
    mirror: Mirror, tmp_path: Path, harm: Callable[[Path], object], fault: tuple[str, str]
):
    one = shards(mirror)
    stage_all(one, tmp_path)
    folder = folder_of(one, tmp_path, "shards")
    harm(folder / CONTENT_FOLDER)

    assert [(f.path, f.fault) for f in verify(folder, "shards")] == [fault]
    assert asset_state(folder) == "damaged"
    mirror.asked.clear()
    stage_all(one, tmp_path)
    assert content_of(one, tmp_path, "shards") == FILES
    fetched = [path for path in mirror.files if mirror.gets(path)]
    assert fetched == ([f"/data/{fault[0]}"] if fault[0] in FILES else [])


@pytest.mark.parametrize("broken", ["damaged", "killed before its manifest"])
def test_what_is_there_takes_no_room_when_it_is_mended(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
):
    one = shards(mirror)
    stage_all(one, tmp_path)
    folder = folder_of(one, tmp_path, "shards")
    if broken == "damaged":
        (folder / CONTENT_FOLDER / "part-1").unlink()
        verify(folder, "shards")
    else:
        (folder / MANIFEST_FILE).unlink()
    space = DiskSpace(len(FILES["part-1"]), 1)
    monkeypatch.setattr(stager, "disk_space", lambda folder: space)
    stage_all(one, tmp_path)
    assert content_of(one, tmp_path, "shards") == FILES


def test_an_unreadable_manifest_is_written_anew(mirror: Mirror, tmp_path: Path):
    one = shards(mirror)
    stage_all(one, tmp_path)
    (folder_of(one, tmp_path, "shards") / MANIFEST_FILE).write_text("{")
    assert asset_state(folder_of(one, tmp_path, "shards")) == "damaged"
    stage_all(one, tmp_path)
    assert verify(folder_of(one, tmp_path, "shards"), "shards") == []


def test_what_programs_leave_beside_staged_files_hinders_no_run(mirror: Mirror, tmp_path: Path):
    one = shards(mirror)
    stage_all(one, tmp_path)
    content = folder_of(one, tmp_path, "shards") / CONTENT_FOLDER
    (content / "__pycache__").mkdir()
    (content / "__pycache__/train.pyc").write_bytes(b"code")
    assert verify(content.parent, "shards") == []
    (content / "index.cache").write_text("an index")
    assert asset_state(content.parent) == "staged"


def test_faults_are_told_where_they_cannot_be_marked_or_were_mended_meanwhile(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    one = shards(mirror)
    stage_all(one, tmp_path)
    folder = folder_of(one, tmp_path, "shards")
    flip(folder / CONTENT_FOLDER / "part-2")

    def refuse(path: Path, target: Path) -> Path:
        raise PermissionError(13, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refuse)
        assert [fault.path for fault in verify(folder, "shards")] == ["part-2"]
    manifests = iter([read_manifest(folder), None])
    with monkeypatch.context() as patch:
        patch.setattr(verification, "read_manifest", lambda folder: next(manifests))
        assert [fault.path for fault in verify(folder, "shards")] == ["part-2"]
    assert asset_state(folder) == "staged"


def test_a_copy_of_the_folder_is_as_good(mirror: Mirror, tmp_path: Path):
    one = shards(mirror)
    stage_all(one, tmp_path / "shared")
    shutil.copytree(tmp_path / "shared", tmp_path / "local")
    assert verify(folder_of(one, tmp_path / "local", "shards"), "shards", jobs=3) == []
    mirror.asked.clear()
    stage_all(one, tmp_path / "local")
    assert mirror.asked == []


def flip(path: Path) -> None:
    """Change one bit, as a disk may."""
    content = bytearray(path.read_bytes())
    content[100] ^= 4
    path.write_bytes(content)


def test_what_is_made_of_others_is_made_after_them_and_anew_when_they_change(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from paceline.staging.converters import CONVERTERS, ConversionJob

    def joined(conversion: ConversionJob) -> None:
        parts = sorted(conversion.inputs["shards"].iterdir())
        (conversion.folder / "all").write_bytes(b"".join(part.read_bytes() for part in parts))

    monkeypatch.setitem(CONVERTERS, "joined", joined)
    made = {"name": "whole", "kind": "made", "source": "joined", "needs": ["shards"]}
    source = shards(mirror).assets[0].model_dump(mode="json", exclude_unset=True)
    one = recipe_of(made, source)
    stage_all(one, tmp_path)
    assert content_of(one, tmp_path, "whole") == {"all": b"".join(FILES.values())}

    other = recipe_of(made, {**source, "files": source["files"][:2]})
    assert folder_of(other, tmp_path, "whole") != folder_of(one, tmp_path, "whole")


def test_what_fails_leaves_the_others_to_go_on(mirror: Mirror, tmp_path: Path):
    source = shards(mirror).assets[0].model_dump(mode="json", exclude_unset=True)
    mirror.files["/good"] = b"good"
    one = recipe_of(source, {"name": "good", "kind": "url", "source": f"{mirror.url}/good"})
    mirror.fail("/data/part-0", 403)
    with pytest.raises(UserError, match="part-0: access denied"):
        stage_all(one, tmp_path)
    assert asset_state(folder_of(one, tmp_path, "good")) == "staged"
    assert asset_state(folder_of(one, tmp_path, "shards")) == "partial"


def test_a_field_names_a_staged_file_and_is_refused_before_it_is(mirror: Mirror, tmp_path: Path):
    one = shards(mirror)
    data = one.data.model_copy(update={"source": "jsonl", "path": "staged:shards/part-0"})
    one = one.model_copy(update={"data": data})
    with pytest.raises(UserError, match=r"shards is missing.*`paceline recipes stage tiny-llama`"):
        with_staged_files(one, tmp_path)
    stage_all(one, tmp_path)
    located = with_staged_files(one, tmp_path).data.path
    assert located and Path(located).read_bytes() == FILES["part-0"]
    settings = {"tokenizer": "staged:shards/part-1", "model": "staged:shards", "offload": "cpu"}
    engines = with_staged_files(one.model_copy(update={"engine_settings": settings}), tmp_path)
    content = folder_of(one, tmp_path, "shards") / CONTENT_FOLDER
    assert engines.engine_settings == {
        "tokenizer": str(content / "part-1"),
        "model": str(content),
        "offload": "cpu",
    }
    unknown = data.model_copy(update={"path": "staged:shard/part-0"})
    with pytest.raises(UserError, match="did you mean 'shards'"):
        with_staged_files(one.model_copy(update={"data": unknown}), tmp_path)
