"""What bounds this process: the container around it, and the limits of its control groups."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

PODMAN_FILE = Path("/run/.containerenv")
DOCKER_FILE = Path("/.dockerenv")
IMAGE_VARIABLES = ("PACELINE_IMAGE", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")
"""Docker hides the image from what runs in it, so a user can state it in the first of these."""

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_URL_USER = re.compile(r"(?<=://)\S*@")


def container() -> dict[str, str | None] | None:
    """Kind, image and digest of the container around this process; None outside containers.

    Image and digest are None where nothing tells them.
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
    """Podman's `name="value"` lines, empty elsewhere."""
    try:
        text = PODMAN_FILE.read_text(errors="replace")
    except OSError:
        return {}
    return dict(re.findall(r'^(\w+)="(.*)"$', text, re.MULTILINE))


ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
VMSTAT = Path("/proc/vmstat")


def core_quota() -> float | None:
    """The smallest CPU quota in cores, None without one."""
    # `QUOTA PERIOD`, both in microseconds; the quota is `max` where there is none.
    quotas = [text.split() for text in _texts("cpu.max")]
    return min(
        (int(q[0]) / int(q[1]) for q in quotas if len(q) == 2 and q[0].isdigit()), default=None
    )


def group_memory_limit_bytes() -> int | None:
    """The smallest memory limit in bytes, None without one."""
    return min((int(text) for text in _texts("memory.max") if text.isdigit()), default=None)


def oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory (0 if unknown).

    Counted in the innermost group that says so, because elsewhere on the machine other people's
    processes die; without such a group, on the whole machine.
    """
    text = next(_texts("memory.events"), None) or _read(VMSTAT) or ""
    match = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(match.group(1)) if match else 0


def _texts(name: str) -> Iterator[str]:
    """The file `name` of the own group and of every group around it, innermost first."""
    match = re.search(r"^0::/(.*)$", _read(MEMBERSHIP) or "", re.MULTILINE)
    inside = match.group(1) if match else ""
    # Not resolved: a path may start with `..` where the process lies outside its name space's root.
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
