"""Container and control-group limits of this process."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

PODMAN_FILE = Path("/run/.containerenv")
DOCKER_FILE = Path("/.dockerenv")
IMAGE_VARIABLES = ("PACELINE_IMAGE", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")
"""Variables that name the image. Docker hides the image from the processes in it, so a user can
state it in the first of these."""

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_URL_USER = re.compile(r"(?<=://)\S*@")


def container() -> dict[str, str | None] | None:
    """Return kind, image and digest of the container around this process; None outside containers.

    Image and digest are None if unknown.
    """
    podman = _podman()
    image = next(filter(None, (os.environ.get(name) for name in IMAGE_VARIABLES)), None)
    image = _URL_USER.sub("", image or podman.get("image") or "") or None
    kind = _kind()
    if kind is None and image is None:
        return None
    match = _DIGEST.search(f"{image or ''} {podman.get('imageid', '')}")
    digest = match[0] if match else podman.get("imageid") or None
    return {"kind": kind, "image": image, "digest": digest}


def _kind() -> str | None:
    if os.environ.get("APPTAINER_CONTAINER") or os.environ.get("SINGULARITY_CONTAINER"):
        return "apptainer"
    if PODMAN_FILE.exists():
        return "podman"
    if DOCKER_FILE.exists():
        return "docker"
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    return os.environ.get("container") or None  # noqa: SIM112 (systemd's own spelling)


def _podman() -> dict[str, str]:
    """Return Podman's `name="value"` lines as a dictionary; empty outside Podman."""
    try:
        text = PODMAN_FILE.read_text(errors="replace")
    except OSError:
        return {}
    return dict(re.findall(r'^(\w+)="(.*)"$', text, re.MULTILINE))


ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
VMSTAT = Path("/proc/vmstat")


def core_quota() -> float | None:
    """Return the smallest CPU quota in cores, None if there is none."""
    # `QUOTA PERIOD`, both in microseconds; QUOTA is `max` if there is no limit.
    quotas = [text.split() for text in _texts("cpu.max")]
    return min(
        (int(q[0]) / int(q[1]) for q in quotas if len(q) == 2 and q[0].isdecimal()), default=None
    )


def group_memory_limit_bytes() -> int | None:
    """Return the smallest memory limit in bytes, None if there is none."""
    return min((int(text) for text in _texts("memory.max") if text.isdecimal()), default=None)


def oom_kills() -> int:
    """Return the number of processes that the kernel has killed for lack of memory (0 if unknown).

    The count is that of the innermost group that reports it, because elsewhere on the machine other
    users' processes are killed. Without such a group it is the count of the whole machine.
    """
    text = next(_texts("memory.events"), None) or _read(VMSTAT) or ""
    match = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(match.group(1)) if match else 0


def _texts(name: str) -> Iterator[str]:
    """Yield the file `name` of this process's group and of each enclosing one, innermost first."""
    match = re.search(r"^0::/(.*)$", _read(MEMBERSHIP) or "", re.MULTILINE)
    inside = match.group(1) if match else ""
    # Not resolved: a path may start with `..` if the process is outside its namespace's root.
    parts = [part for part in inside.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        text = _read(ROOT.joinpath(*parts[:depth], name))
        if text is not None:
            yield text


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
