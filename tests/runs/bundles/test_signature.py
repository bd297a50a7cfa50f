"""A bundle is signed by an SSH key, and the receiver says whose signature counts."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from paceline.core.errors import SystemFaultError, UserError
from paceline.files.documents import write_value
from paceline.runs.bundles.signature import NAMESPACE, signature_file
from paceline.runs.bundles.verification import check_bundle
from paceline.runs.bundles.writing import write_bundle
from paceline.runs.outcome import evaluate
from tests.command import paceline
from tests.runs.example import write_run

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")


def new_key(path: Path, passphrase: str = "") -> Path:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", "x", "-f", str(path)]
    subprocess.run(command, check=True)
    return path


def allow(path: Path, key: Path, name: str = "alice@example.org", options: str = "") -> Path:
    path.write_text(f"{name} {options}{key.with_suffix('.pub').read_text()}")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "runs", "2026-01-01-run")
    write_value(folder / "result.json", evaluate(folder).result)
    return folder


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return new_key(tmp_path / "key")


@pytest.fixture
def bundle(folder: Path, key: Path, tmp_path: Path) -> Path:
    return write_bundle(folder, tmp_path / "a.bundle.tar.gz", key)[0]


def test_the_signer_of_a_bundle_is_named(bundle: Path, key: Path, tmp_path: Path):
    allowed = allow(tmp_path / "allowed", key, options=f'namespaces="{NAMESPACE}" ')
    check = check_bundle(bundle, allowed)
    assert (check.verdict, check.signer) == ("intact", "alice@example.org")
    done = paceline("runs", "verify", bundle, "--signer", allowed, runs=tmp_path)
    assert done.returncode == 0 and "signed by alice@example.org" in done.stdout


def test_the_signature_can_be_checked_without_paceline(bundle: Path, key: Path, tmp_path: Path):
    with tarfile.open(bundle) as archive:
        member = archive.extractfile("2026-01-01-run/bundle.json")
        assert member is not None
        text = member.read()
    allowed = allow(tmp_path / "allowed", key)
    words = ["-f", allowed, "-I", "alice@example.org", "-n", NAMESPACE]
    command = ["ssh-keygen", "-Y", "verify", *words, "-s", signature_file(bundle)]
    subprocess.run(command, input=text, check=True, capture_output=True)


def fault_of(bundle: Path, allowed: Path) -> str:
    check = check_bundle(bundle, allowed)
    assert check.verdict == "not signed" and check.signer is None
    return str(check.signature_fault)


def test_a_key_that_is_not_allowed_is_refused(bundle: Path, tmp_path: Path):
    allowed = allow(tmp_path / "allowed", new_key(tmp_path / "other"))
    assert "no signer in" in fault_of(bundle, allowed)
    done = paceline("runs", "verify", bundle, "--signer", allowed, "--json", runs=tmp_path)
    assert done.returncode == 3 and json.loads(done.stdout)["verdict"] == "not signed"


def test_a_key_for_another_purpose_is_refused(bundle: Path, key: Path, tmp_path: Path):
    allowed = allow(tmp_path / "allowed", key, options='namespaces="git" ')
    assert fault_of(bundle, allowed)


@pytest.mark.parametrize("text", ["", "x", "alice@example.org", "\0" * 100])
def test_a_damaged_list_of_signers_allows_nobody(bundle: Path, tmp_path: Path, text: str):
    (tmp_path / "allowed").write_text(text)
    assert "no signer in" in fault_of(bundle, tmp_path / "allowed")


@pytest.mark.parametrize("text", ["", "x", "-----BEGIN SSH SIGNATURE-----", "x" * 10**5])
def test_a_damaged_signature_is_none(bundle: Path, key: Path, tmp_path: Path, text: str):
    signature_file(bundle).write_text(text)
    assert fault_of(bundle, allow(tmp_path / "allowed", key))


def test_a_bundle_without_a_signature_is_not_signed(bundle: Path, key: Path, tmp_path: Path):
    signature_file(bundle).unlink()
    allowed = allow(tmp_path / "allowed", key)
    assert fault_of(bundle, allowed) == "a.bundle.tar.gz.sig: No such file or directory"
    assert check_bundle(bundle).verdict == "intact"


def test_the_signature_of_another_bundle_is_refused(
    folder: Path, bundle: Path, key: Path, tmp_path: Path
):
    (folder / "notes.txt").write_text("changed after the signature")
    other, _ = write_bundle(folder, tmp_path / "b.bundle.tar.gz")
    shutil.copy(signature_file(bundle), signature_file(other))
    assert "does not match the bundle" in fault_of(other, allow(tmp_path / "allowed", key))


def test_a_list_that_is_changed_with_its_files_is_found(bundle: Path, key: Path, tmp_path: Path):
    other = tmp_path / "c.bundle.tar.gz"
    with tarfile.open(bundle) as old, tarfile.open(other, "w:gz") as new:
        for member in old:
            file = old.extractfile(member)
            assert file is not None
            data = file.read()
            if member.name.endswith("bundle.json"):
                data = data.replace(b'"redacted": []', b'"redacted": ["run.json"]')
                member.size = len(data)
            new.addfile(member, BytesIO(data))
    shutil.copy(signature_file(bundle), signature_file(other))
    assert check_bundle(other).verdict == "intact"
    assert "does not match the bundle" in fault_of(other, allow(tmp_path / "allowed", key))


def test_a_key_with_a_passphrase_is_refused_without_a_question(folder: Path, tmp_path: Path):
    locked = new_key(tmp_path / "locked", "words of a passphrase")
    with pytest.raises(UserError, match="cannot sign"):
        write_bundle(folder, tmp_path / "a.tar.gz", locked)
    assert not (tmp_path / "a.tar.gz").exists()


def test_what_is_no_key_is_said_so(folder: Path, tmp_path: Path):
    with pytest.raises(UserError, match="is not a file"):
        write_bundle(folder, tmp_path / "a.tar.gz", tmp_path / "nothing")
    (tmp_path / "text").write_text("no key")
    with pytest.raises(UserError, match="cannot sign"):
        write_bundle(folder, tmp_path / "a.tar.gz", tmp_path / "text")


def test_a_signature_that_exists_is_kept(folder: Path, key: Path, tmp_path: Path):
    signature_file(tmp_path / "a.tar.gz").write_text("older")
    with pytest.raises(UserError, match=r"a.tar.gz.sig: exists"):
        write_bundle(folder, tmp_path / "a.tar.gz", key)
    assert signature_file(tmp_path / "a.tar.gz").read_text() == "older"
    assert not (tmp_path / "a.tar.gz").exists()


def test_without_ssh_keygen_nothing_is_signed_or_accepted(
    folder: Path, bundle: Path, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    allowed = allow(tmp_path / "allowed", key)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(SystemFaultError, match="ssh-keygen: is not installed"):
        write_bundle(folder, tmp_path / "d.tar.gz", key)
    with pytest.raises(SystemFaultError, match="install OpenSSH"):
        check_bundle(bundle, allowed)
    assert check_bundle(bundle).verdict == "intact"
