"""Files from a server that fails in every way: whole and right in the end, or not there at all."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import PacelineError, SystemFaultError, UserError
from paceline.files.staged import asset_state, read_manifest
from paceline.staging import connection
from paceline.staging.verification import BLOCK_BYTES
from tests.staging.mirror import Mirror
from tests.staging.staged import content_of, folder_of, noise, recipe_of, stage_all

DATA = noise(3 * BLOCK_BYTES + 17)
DIGEST = f"sha256:{hashlib.sha256(DATA).hexdigest()}"
PATH = "/data/corpus.bin"


def recipe(mirror: Mirror, **changes: Any) -> Any:
    mirror.files[PATH] = DATA
    asset = {"name": "corpus", "kind": "url", "source": f"{mirror.url}{PATH}"}
    return recipe_of({**asset, **changes})


def test_a_file_is_staged_with_a_manifest_of_its_digest(mirror: Mirror, tmp_path: Path):
    one = recipe(mirror)
    stage_all(one, tmp_path)

    assert content_of(one, tmp_path, "corpus") == {"corpus.bin": DATA}
    manifest = read_manifest(folder_of(one, tmp_path, "corpus"))
    assert manifest is not None
    assert [(f.path, f.bytes, f"sha256:{f.sha256}") for f in manifest.files] == [
        ("corpus.bin", len(DATA), DIGEST)
    ]
    assert not (folder_of(one, tmp_path, "corpus") / "partial").exists()


def test_a_second_call_asks_for_nothing(mirror: Mirror, tmp_path: Path):
    one = recipe(mirror)
    stage_all(one, tmp_path)
    mirror.asked.clear()
    stage_all(one, tmp_path)
    assert mirror.asked == []


@pytest.mark.parametrize(
    "faults",
    [
        [("cut", 1000)],
        [("cut", BLOCK_BYTES + 5), ("cut", 10), ("cut", BLOCK_BYTES)],
        [429],
        [500, 503, 502, 500],
        [("damage",)],
        [("cut", 5), ("damage",), 500],
    ],
    ids=str,
)
def test_what_fails_for_a_while_comes_in_the_end(mirror: Mirror, tmp_path: Path, faults: list[Any]):
    one = recipe(mirror, digest=DIGEST)
    mirror.fail(PATH, *faults)
    stage_all(one, tmp_path)
    assert content_of(one, tmp_path, "corpus") == {"corpus.bin": DATA}


def test_a_cut_file_goes_on_where_it_was(mirror: Mirror, tmp_path: Path):
    one = recipe(mirror)
    mirror.fail(PATH, ("cut", BLOCK_BYTES))
    stage_all(one, tmp_path)

    first, second = mirror.gets(PATH)
    assert "Range" not in first
    assert second["Range"] == f"bytes={BLOCK_BYTES}-" and "If-Range" in second


def test_a_file_that_changed_meanwhile_is_fetched_anew(mirror: Mirror, tmp_path: Path):
    one = recipe(mirror)
    mirror.fail(PATH, ("cut", BLOCK_BYTES), *[500] * 5)
    with pytest.raises(SystemFaultError):
        stage_all(one, tmp_path)
    mirror.files[PATH] = other = noise(len(DATA), seed=1)
    stage_all(one, tmp_path)
    assert content_of(one, tmp_path, "corpus") == {"corpus.bin": other}


def test_without_a_version_or_a_digest_a_cut_file_is_fetched_anew(mirror: Mirror, tmp_path: Path):
    """A size alone, which the server tells, does not show that both parts are of one version."""
    one = recipe(mirror)
    nameless = {"ETag": None, "Connection": "close"}
    mirror.fail(PATH, ("cut", BLOCK_BYTES, nameless), *[500] * 5)
    with pytest.raises(SystemFaultError):
        stage_all(one, tmp_path)
    mirror.files[PATH] = other = noise(len(DATA), seed=1)
    mirror.fail(PATH, ("headers", nameless))
    stage_all(one, tmp_path)
    assert content_of(one, tmp_path, "corpus") == {"corpus.bin": other}


def test_the_rest_of_another_version_is_not_put_behind_the_first(mirror: Mirror, tmp_path: Path):
    one = recipe(mirror)
    mirror.fail(PATH, ("cut", BLOCK_BYTES), *[500] * 5)
    with pytest.raises(SystemFaultError):
        stage_all(one, tmp_path)
    mirror.files[PATH] = other = noise(len(DATA), seed=1)
    mirror.fail(PATH, ("headers", {"ETag": '"another"'}))
    stage_all(one, tmp_path)
    assert content_of(one, tmp_path, "corpus") == {"corpus.bin": other}


def test_what_ends_without_a_length_is_taken_only_where_something_else_is_stated(
    mirror: Mirror, tmp_path: Path
):
    mirror.silent = True
    endless = ("headers", {"Content-Length": None, "Connection": "close"})
    mirror.fail(PATH, endless, endless)
    with pytest.raises(SystemFaultError, match="does not report its size"):
        stage_all(recipe(mirror), tmp_path)
    stage_all(recipe(mirror, digest=DIGEST), tmp_path)


def test_more_than_is_stated_is_not_written(mirror: Mirror, tmp_path: Path):
    one = recipe(mirror, bytes=BLOCK_BYTES)
    with pytest.raises(SystemFaultError, match="is longer than expected"):
        stage_all(one, tmp_path)


@pytest.mark.parametrize(
    ("faults", "kind", "words"),
    [
        ([500] * 5, SystemFaultError, "returns HTTP 500"),
        ([("cut", 0)] * 5, SystemFaultError, "the connection was closed"),
        ([("damage",)] * 2, SystemFaultError, "does not match the expected checksum (sha256)"),
        ([401], UserError, "access denied (HTTP 401)"),
        ([403], UserError, "access denied (HTTP 403)"),
        ([404], SystemFaultError, "does not exist (HTTP 404)"),
    ],
    ids=str,
)
def test_what_fails_for_good_leaves_nothing_staged_and_a_second_call_goes_on(
    mirror: Mirror, tmp_path: Path, faults: list[Any], kind: type[PacelineError], words: str
):
    one = recipe(mirror, digest=DIGEST)
    mirror.fail(PATH, *faults)
    with pytest.raises(kind) as caught:
        stage_all(one, tmp_path)

    assert words in str(caught.value)
    assert asset_state(folder_of(one, tmp_path, "corpus")) == "partial"
    stage_all(one, tmp_path)
    assert content_of(one, tmp_path, "corpus") == {"corpus.bin": DATA}


def test_a_server_that_says_nothing_is_given_up(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(connection, "TIMEOUT_S", 0.2)
    one, end = recipe(mirror), threading.Event()
    mirror.fail(PATH, *[("slow", end, 0)] * 5)
    try:
        with pytest.raises(SystemFaultError):
            stage_all(one, tmp_path)
    finally:
        end.set()


def test_a_pause_within_the_limit_is_waited_for(mirror: Mirror, tmp_path: Path):
    one, end = recipe(mirror), threading.Event()
    mirror.fail(PATH, ("slow", end, BLOCK_BYTES))
    threading.Timer(0.2, end.set).start()
    stage_all(one, tmp_path)
    assert content_of(one, tmp_path, "corpus") == {"corpus.bin": DATA}


def test_a_wish_to_wait_for_long_is_told(mirror: Mirror, tmp_path: Path):
    error = connection.error_for_status(429, "https://host/file", None, "7200")
    assert isinstance(error, SystemFaultError) and "asks to wait 7,200 s" in str(error)


def test_several_files_come_beside_each_other(mirror: Mirror, tmp_path: Path):
    contents = {f"shard-{number}.bin": noise(50_000, number) for number in range(12)}
    mirror.files = {f"/shards/{name}": content for name, content in contents.items()}
    files = [{"path": name} for name in contents]
    one = recipe_of(
        {"name": "shards", "kind": "url", "source": f"{mirror.url}/shards", "files": files}
    )
    mirror.fail("/shards/shard-3.bin", ("cut", 7))
    stage_all(one, tmp_path, jobs=6)
    assert content_of(one, tmp_path, "shards") == contents


def test_a_list_of_mlcommons_gives_files_and_checksums(mirror: Mirror, tmp_path: Path):
    contents = {"a.bin": noise(1000), "deep/b c.idx": noise(999, 1)}
    lines = [f"{hashlib.md5(c).hexdigest()}  ./{name}\n" for name, c in contents.items()]
    mirror.files = {
        "/metadata/set.uri": f"{mirror.url}/store/set\n".encode(),
        "/metadata/set.md5": "".join(lines).encode(),
        "/store/set/a.bin": contents["a.bin"],
        "/store/set/deep/b%20c.idx": contents["deep/b c.idx"],
    }
    one = recipe_of({"name": "set", "kind": "r2", "source": f"{mirror.url}/metadata/set.uri"})
    mirror.fail("/store/set/a.bin", ("damage",))
    stage_all(one, tmp_path)
    assert content_of(one, tmp_path, "set") == contents

    mirror.asked.clear()
    tables = recipe_of(one.assets[0].model_dump() | {"include": ("*.idx",)})
    stage_all(tables, tmp_path)
    assert content_of(tables, tmp_path, "set") == {"deep/b c.idx": contents["deep/b c.idx"]}
    assert not [path for _, path, _ in mirror.asked if path.endswith(".bin")]
    nothing = recipe_of(one.assets[0].model_dump() | {"include": ("*.json",)})
    with pytest.raises(SystemFaultError, match=r"lists no file that matches \*\.json"):
        stage_all(nothing, tmp_path)


def test_a_list_behind_a_login_says_so(mirror: Mirror, tmp_path: Path):
    mirror.files = {"/login": b"<html>please log in</html>"}
    mirror.fail("/m/set.uri", ("redirect", f"{mirror.url}/login"))
    one = recipe_of({"name": "set", "kind": "r2", "source": f"{mirror.url}/m/set.uri"})
    with pytest.raises(UserError, match="requires a login; set CF_ACCESS_CLIENT_ID and"):
        stage_all(one, tmp_path)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("../../escaped", "must be a relative path that stays inside its folder"),
        ("a//b", "must be written as a/b"),
        ("a/__pycache__/b.pyc", "must not include __pycache__"),
        ("a\n{digest}  a", "lists a file twice"),
    ],
)
def test_a_path_that_cannot_be_staged_is_refused(
    mirror: Mirror, tmp_path: Path, path: str, words: str
):
    digest = hashlib.md5(b"x").hexdigest()
    mirror.files = {
        "/m/set.uri": f"{mirror.url}/store".encode(),
        "/m/set.md5": f"{digest}  {path}\n".replace("{digest}", digest).encode(),
        "/escaped": b"x",
    }
    one = recipe_of({"name": "set", "kind": "r2", "source": f"{mirror.url}/m/set.uri"})
    with pytest.raises(SystemFaultError, match=words):
        stage_all(one, tmp_path / "stage")
    assert not (tmp_path / "escaped").exists()
    with pytest.raises(ValueError, match=r"twice|must"):
        files = [{"path": line.split()[-1]} for line in f"x {path}".splitlines()]
        recipe_of({"name": "set", "kind": "url", "source": mirror.url, "files": files})


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("http://host:abc/x", "invalid URL"),
        ("http://127.0.0.1:9/\u20ac", "does not respond: Connection refused"),
        ("http://[x", "does not respond: Name or service not known"),
    ],
)
def test_an_address_that_nobody_can_ask_is_told(
    mirror: Mirror, tmp_path: Path, address: str, words: str
):
    mirror.files = {"/m/set.uri": address.encode(), "/m/set.md5": f"{'0' * 32}  a\n".encode()}
    one = recipe_of({"name": "set", "kind": "r2", "source": f"{mirror.url}/m/set.uri"})
    with pytest.raises(SystemFaultError, match=words):
        stage_all(one, tmp_path)
    behind = recipe_of({"name": "it", "kind": "url", "source": f"{mirror.url}/a%2F..%2Fb"})
    with pytest.raises(SystemFaultError, match="must be a relative path"):
        stage_all(behind, tmp_path)
