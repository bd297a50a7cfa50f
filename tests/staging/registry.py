"""Debian's registry on loopback, behind a login and a relay that cuts and holds connections."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import os
import shutil
import socket
import subprocess
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.staging.staged import noise
from tests.waiting import wait_until

PROGRAMS = ("docker-registry", "skopeo")
USER, PASSWORD = "me", "tr0ub4dor-and-3-more"
# bcrypt of the password, which is the only form that this registry takes.
HTPASSWD = f"{USER}:$2b$04$abcdefghijklmnopqrstuuVkXGniQdEewJppoOO0iEyV86PkfJ4.a\n"
SETTINGS = """\
version: 0.1
storage: {{filesystem: {{rootdirectory: "{folder}/images"}}}}
http: {{addr: "127.0.0.1:{port}"}}
log: {{level: error, accesslog: {{disabled: true}}}}
auth: {{htpasswd: {{realm: test, path: "{folder}/htpasswd"}}}}
"""
LAYER_BYTES = (200_000, 1_500_000)
REPOSITORY, TAG = "some/image", "1.0"
OCI = "application/vnd.oci.image"
LIMIT_S = 120.0


@dataclass
class Registry:
    """The registry as its users see it, and the faults of the way to it."""

    folder: Path
    port: int = 0
    """Of the relay."""
    digest: str = ""
    layers: tuple[str, ...] = ()
    """Digests of the image's layers, the small one first."""
    cut_after: int | None = None
    """Bytes of an answer after which a connection ends."""
    hold_after: int | None = None
    """Bytes of an answer after which nothing more comes until this is None again."""
    relayed: int = 0
    """Bytes of all answers."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def image(self) -> str:
        """Its name without a tag."""
        return f"127.0.0.1:{self.port}/{REPOSITORY}"

    @property
    def home(self) -> Path:
        """A home whose programs may speak to this registry without encryption."""
        return self.folder / "home"

    def login(self, password: str = PASSWORD) -> str:
        """Docker's config.json with the login."""
        text = base64.b64encode(f"{USER}:{password}".encode()).decode()
        return json.dumps({"auths": {f"127.0.0.1:{self.port}": {"auth": text}}})

    def carry(self, client: socket.socket, port: int) -> None:
        """Relay one connection until an end of it closes."""
        with client, suppress(OSError), socket.create_connection(("127.0.0.1", port)) as server:
            threading.Thread(target=_pour, args=(client, server), daemon=True).start()
            sent = 0
            while data := server.recv(1 << 14):
                if self.cut_after is not None and sent + len(data) > self.cut_after:
                    # Closing alone ends nothing while a thread still reads from it.
                    client.shutdown(socket.SHUT_RDWR)
                    return
                while self.hold_after is not None and sent + len(data) > self.hold_after:
                    time.sleep(0.01)
                client.sendall(data)
                sent += len(data)
                with self._lock:
                    self.relayed += len(data)


def need_registry() -> None:
    """Skips a test where the programs are missing, and fails it where they are required."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing and "registry" in os.environ.get("PACELINE_REQUIRE", "").split(","):
        pytest.fail(f"not installed: {', '.join(missing)}; `make deps-clusters` installs them")
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


@contextmanager
def serving_registry(folder: Path) -> Iterator[Registry]:
    """A registry with one image of nothing but noise, for those who log in."""
    port = free_port()
    (folder / "htpasswd").write_text(HTPASSWD)
    (folder / "settings.yml").write_text(SETTINGS.format(folder=folder, port=port))
    registry = Registry(folder)
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as door,
        (folder / "log").open("wb") as log,
        subprocess.Popen(
            ["docker-registry", "serve", folder / "settings.yml"], stdout=log, stderr=log
        ) as server,
    ):
        try:
            registry.port = door.getsockname()[1]
            threading.Thread(target=_receive, args=(registry, door, port), daemon=True).start()
            _until_open(port)
            _push(registry)
            yield registry
        finally:
            server.kill()


def _push(registry: Registry) -> None:
    settings = registry.home / ".config" / "containers" / "registries.conf"
    settings.parent.mkdir(parents=True)
    place = f"127.0.0.1:{registry.port}"
    settings.write_text(f'[[registry]]\nlocation = "{place}"\ninsecure = true\n')
    (registry.folder / "login.json").write_text(registry.login())
    registry.digest, *layers = _write_image(registry.folder / "image")
    registry.layers = tuple(layers)
    command = ("skopeo", "copy", "--quiet", f"oci:{registry.folder / 'image'}")
    env = {**os.environ, "HOME": str(registry.home)}
    env["REGISTRY_AUTH_FILE"] = str(registry.folder / "login.json")
    subprocess.run([*command, f"docker://{registry.image}:{TAG}"], env=env, check=True)


def _write_image(folder: Path) -> list[str]:
    """An image in the layout of the Open Container Initiative; its digest, those of its layers."""
    (folder / "blobs" / "sha256").mkdir(parents=True)

    def blob(kind: str, content: bytes) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        (folder / "blobs" / "sha256" / digest).write_bytes(content)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content)}

    tars = [_tar(f"file-{n}", noise(size, n)) for n, size in enumerate(LAYER_BYTES)]
    layers = [blob(f"{OCI}.layer.v1.tar+gzip", gzip.compress(tar, 1, mtime=0)) for tar in tars]
    roots = [f"sha256:{hashlib.sha256(tar).hexdigest()}" for tar in tars]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": roots},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{OCI}.manifest.v1+json",
        "config": blob(f"{OCI}.config.v1+json", json.dumps(config).encode()),
        "layers": layers,
    }
    top = blob(f"{OCI}.manifest.v1+json", json.dumps(manifest).encode())
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [top]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return [str(part["digest"]) for part in (top, *layers)]


def _tar(name: str, content: bytes) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    return stream.getvalue()


def _receive(registry: Registry, door: socket.socket, port: int) -> None:
    with suppress(OSError):
        while True:
            client, _ = door.accept()
            threading.Thread(target=registry.carry, args=(client, port), daemon=True).start()


def _pour(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 14):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def _until_open(port: int) -> None:
    def is_open() -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return True
        return False

    wait_until(is_open, "the registry", LIMIT_S)
