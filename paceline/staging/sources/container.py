"""Container images, by whichever program this machine has for them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from paceline.core.assets import Asset
from paceline.core.errors import SystemFaultError, UserError, did_you_mean
from paceline.machines.programs import last_line, run_program

RUNTIMES = ("enroot", "apptainer", "singularity", "docker", "podman", "skopeo")
"""In the order in which they are looked for: what Slurm starts comes first."""
IN_A_DAEMON = ("docker", "podman")
"""Those that keep images themselves: what is staged is a note of the image and its digest."""
NOTE_FILE = "image.json"
_REFUSED = re.compile(r"unauthorized|authentication required|denied|\b40[13]\b", re.IGNORECASE)

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def container_runtime(asked: str | None) -> str:
    """The program that fetches images; raises UserError where there is none."""
    if asked and asked not in RUNTIMES:
        raise UserError(
            f"--runtime {asked}",
            "is no program for container images",
            allowed=", ".join(RUNTIMES),
            remedy=did_you_mean(asked, RUNTIMES) or None,
        )
    names = (asked,) if asked else RUNTIMES
    for name in names:
        if shutil.which(name):
            return name
    raise UserError(
        "container",
        f"{asked} is not installed" if asked else "no program for container images is installed",
        allowed=", ".join(RUNTIMES),
        remedy="on a cluster with pyxis install enroot (github.com/NVIDIA/enroot), else docker; or "
        "stage on a machine that has one, in a folder that both see",
    )


def fetch_image(asset: Asset, done: Path, runtime: str, check: Callable[[], None]) -> str | None:
    """Fetch an image into `done`; the digest of its manifest, None where no program tells it.

    Registry logins are those of the program itself (`docker login`, enroot's credentials file).
    Raises UserError where access is refused, SystemFaultError where the image cannot be had or has
    another digest than is stated.
    """
    image = image_name(asset)
    by_tag = asset.digest is not None and asset.revision is not None
    if by_tag and not _tells_digest(runtime):
        raise UserError(
            f"container {image}",
            f"{runtime} does not tell the digest that is stated",
            remedy="install skopeo, or state the digest without a revision",
        )
    command = image_command(runtime, image, done / image_file(asset, runtime))
    ended = run_program(command, check)
    if ended.returncode:
        raise _failed(asset, runtime, ended.stderr or ended.stdout)
    digest = _digest(runtime, image, check)
    if asset.digest and (digest or by_tag) and digest != asset.digest:
        told = f"has digest {digest}" if digest else "does not tell its digest"
        raise SystemFaultError(f"container {image}", f"{told}, {asset.digest} is stated")
    if runtime in IN_A_DAEMON:
        note = {"runtime": runtime, "image": image, "digest": digest}
        (done / NOTE_FILE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
    return digest


def image_name(asset: Asset) -> str:
    """`registry/repository:tag`, or `@digest` where one is stated and no tag."""
    if asset.revision:
        return f"{asset.source}:{asset.revision}"
    return f"{asset.source}@{asset.digest}" if asset.digest else asset.source


def image_file(asset: Asset, runtime: str) -> str:
    """The file that an image becomes: `nvidia+nemo+24.09.sqsh`, as enroot itself calls it."""
    repository = asset.source.partition("/")[2] if _registry(asset.source) else asset.source
    stem = re.sub(r"[/:@]", "+", "+".join(filter(None, (repository, asset.revision))))
    ending = {"enroot": "sqsh", "apptainer": "sif", "singularity": "sif"}.get(runtime, "tar")
    return f"{stem}.{ending}"


def image_command(runtime: str, image: str, file: Path) -> tuple[str, ...]:
    """What fetches `image` into `file`."""
    if runtime == "enroot":
        # A registry is told from the image by a #.
        name = image.replace("/", "#", 1) if _registry(image) else image
        return ("enroot", "import", "--output", str(file), f"docker://{name}")
    if runtime in ("apptainer", "singularity"):
        return (runtime, "build", "--force", str(file), f"docker://{image}")
    if runtime in IN_A_DAEMON:
        return (runtime, "pull", "--quiet", image)
    return ("skopeo", "copy", "--quiet", f"docker://{image}", f"oci-archive:{file}")


def _registry(image: str) -> str | None:
    first, slash, _ = image.partition("/")
    return first if slash and (set(".:") & set(first) or first == "localhost") else None


def _tells_digest(runtime: str) -> bool:
    """Whether a program is here that says which digest an image of `runtime` has."""
    return runtime in IN_A_DAEMON or shutil.which("skopeo") is not None


def _digest(runtime: str, image: str, check: Callable[[], None]) -> str | None:
    if runtime in IN_A_DAEMON:
        template = "{{index .RepoDigests 0}}"
        command = (runtime, "image", "inspect", "--format", template, image)
    elif _tells_digest(runtime):
        command = ("skopeo", "inspect", "--format", "{{.Digest}}", f"docker://{image}")
    else:
        return None
    match = re.search(r"sha256:[0-9a-f]{64}", run_program(command, check).stdout)
    return match[0] if match else None


def _failed(asset: Asset, runtime: str, said: str) -> Exception:
    where, why = f"container {image_name(asset)}", last_line(said)
    if not _REFUSED.search(said):
        return SystemFaultError(where, f"{runtime} cannot fetch it: {why}")
    logins = {
        "enroot": "put a login into ~/.config/enroot/.credentials",
        "skopeo": f"`skopeo login {_registry(asset.source) or 'docker.io'}`",
    }
    usual = f"`{runtime} login {_registry(asset.source) or 'docker.io'}`"
    page = f"ask for access on {asset.gate}; " if asset.gate else ""
    return UserError(where, f"access is refused: {why}", remedy=page + logins.get(runtime, usual))
