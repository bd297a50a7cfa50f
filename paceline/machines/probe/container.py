"""Which container image this process runs in, as far as that can be seen from the inside."""

from __future__ import annotations

import os
import re
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
