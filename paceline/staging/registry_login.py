"""A registry's login from the environment, handed to programs without argument or file."""

from __future__ import annotations

import base64
import binascii
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from paceline.core.errors import UserError

AUTH_VARIABLE = "DOCKER_AUTH_CONFIG"
"""The content of docker's config.json: `{"auths": {"registry:port": {"auth": "base64"}}}`."""
NGC_VARIABLE, NGC_REGISTRY, NGC_USER = "NGC_API_KEY", "nvcr.io", "$oauthtoken"
DOCKER_HUB = "docker.io"
DOCKER_HUB_KEY = "https://index.docker.io/v1/"
"""What docker calls its own hub among its logins."""


@dataclass(frozen=True)
class Login:
    """User and password of one registry."""

    registry: str
    user: str
    password: str = field(repr=False)

    @property
    def docker_config(self) -> dict[str, Any]:
        """As docker, podman and skopeo read it."""
        text = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        key = DOCKER_HUB_KEY if self.registry == DOCKER_HUB else self.registry
        return {"auths": {key: {"auth": text}}}


@dataclass(frozen=True)
class LoginPassage:
    """How a program finds the login: variables, and handles that it has to inherit."""

    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    handles: tuple[int, ...] = ()


def environment_login(registry: str) -> Login | None:
    """The login of a registry that $DOCKER_AUTH_CONFIG holds, or $NGC_API_KEY for NVIDIA's.

    None leaves it to the program's own files. Raises UserError for a text that cannot be read.
    """
    if login := _configured(registry):
        return login
    key = os.environ.get(NGC_VARIABLE)
    return Login(registry, NGC_USER, key) if key and registry == NGC_REGISTRY else None


@contextmanager
def passage(runtime: str, login: Login | None) -> Iterator[LoginPassage]:
    """What gives `runtime` the login while the block runs; nothing of it is written to a disk."""
    if login is None:
        yield LoginPassage()
    elif runtime in ("apptainer", "singularity"):
        names = (f"{runtime.upper()}_DOCKER_{what}" for what in ("USERNAME", "PASSWORD"))
        yield LoginPassage(dict(zip(names, (login.user, login.password), strict=True)))
    elif runtime == "docker":
        own = Path(os.environ.get("DOCKER_CONFIG") or "~/.docker").expanduser()
        text = json.dumps({**_own_config(own / "config.json"), **login.docker_config})
        with _in_memory(text) as handle, _beside(own, "config.json", handle) as folder:
            yield LoginPassage({"DOCKER_CONFIG": str(folder)}, (handle,))
    elif runtime == "enroot":
        home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
        own = Path(os.environ.get("ENROOT_CONFIG_PATH") or f"{home}/enroot").expanduser()
        text = f"machine {login.registry} login {login.user} password {login.password}\n"
        with _in_memory(text) as handle, _beside(own, ".credentials", handle) as folder:
            yield LoginPassage({"ENROOT_CONFIG_PATH": str(folder)}, (handle,))
    else:
        with _in_memory(json.dumps(login.docker_config)) as handle:
            yield LoginPassage({"REGISTRY_AUTH_FILE": _path(handle)}, (handle,))


def _configured(registry: str) -> Login | None:
    text = os.environ.get(AUTH_VARIABLE)
    if not text:
        return None
    keys = (DOCKER_HUB_KEY, DOCKER_HUB) if registry == DOCKER_HUB else (registry,)
    try:
        auths = cast(dict[str, dict[str, str]], json.loads(text).get("auths", {}))
        entry = next((auths[key] for key in keys if key in auths), None)
        if entry is None:
            return None
        if "auth" not in entry:
            return Login(registry, entry["username"], entry["password"])
        user, _, word = base64.b64decode(entry["auth"], validate=True).decode().partition(":")
        return Login(registry, user, word)
    except (ValueError, AttributeError, TypeError, KeyError, binascii.Error):
        raise UserError(
            f"${AUTH_VARIABLE}",
            "cannot be read",
            allowed='{"auths": {"registry": {"auth": "base64 of user:password"}}}',
        ) from None


def _own_config(file: Path) -> dict[str, Any]:
    """What else docker's configuration says; its stores of logins would be asked before ours."""
    try:
        content = cast(dict[str, Any], json.loads(file.read_text(encoding="utf-8")))
        return {k: v for k, v in content.items() if k not in ("credsStore", "credHelpers")}
    except (OSError, ValueError, AttributeError):
        return {}


@contextmanager
def _in_memory(text: str) -> Iterator[int]:
    """The handle of a file that no folder has, and that a kill leaves nowhere."""
    handle = os.memfd_create("login")
    try:
        os.write(handle, text.encode())
        yield handle
    finally:
        os.close(handle)


@contextmanager
def _beside(own: Path, name: str, handle: int) -> Iterator[Path]:
    """A folder with what `own` has, where `name` is the file behind the handle."""
    with tempfile.TemporaryDirectory(prefix="paceline-") as text:
        folder = Path(text)
        for entry in own.iterdir() if own.is_dir() else ():
            if entry.name != name:
                (folder / entry.name).symlink_to(entry.absolute())
        (folder / name).symlink_to(_path(handle))
        yield folder


def _path(handle: int) -> str:
    return f"/proc/self/fd/{handle}"
