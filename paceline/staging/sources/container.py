"""Container images, fetched by the container program that this machine has."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.core.assets import Asset
from paceline.core.errors import SystemFaultError, UserError, unknown_name
from paceline.files.programs import last_line, run_program

DOCKER_HUB, NGC = "docker.io", "nvcr.io"
RUNTIMES = ("enroot", "apptainer", "singularity", "docker", "podman", "skopeo")
"""Supported programs in order of preference: those that Slurm starts come first."""
WITH_IMAGE_STORE = ("docker", "podman")
"""Programs with their own image store; only a note of the image and its digest is staged."""
NOTE_FILE = "image.json"
RETRIES = "--retry-times=2"
"""Option of skopeo to retry after 1 s and 2 s if a server or the network failed."""
_MESSAGE = re.compile(r'level=\w+ msg="((?:[^"\\]|\\.)*)"')
_ACCESS_DENIED = re.compile(
    r"unauthorized|authentication required|no basic auth|denied|\b40[13]\b", re.IGNORECASE
)


def container_runtime(runtime: str | None) -> str:
    """Return the program that fetches images; raises UserError if none is installed."""
    if runtime and runtime not in RUNTIMES:
        raise unknown_name(
            f"--runtime {runtime}", "is not a supported container program", runtime, RUNTIMES
        )
    names = (runtime,) if runtime else RUNTIMES
    for name in names:
        if shutil.which(name):
            return name
    raise UserError(
        "container",
        f"{runtime} is not installed" if runtime else "no container program is installed",
        allowed=", ".join(RUNTIMES),
        remedy="install enroot (github.com/NVIDIA/enroot) on a cluster with pyxis, else docker; "
        "or stage to a shared folder from a machine that has one",
    )


@dataclass(frozen=True)
class ImageFetch:
    """Fetch of one image by one program, which holds the registry logins."""

    asset: Asset
    runtime: str
    check: Callable[[], None]

    def fetch(self, complete: Path, underway: Path) -> str | None:
        """Fetch the image into `done`; return its manifest's digest, or None if it is unknown.

        skopeo keeps complete layers in `underway`; other programs keep them in their own cache.
        Raises UserError if access is denied, and SystemFaultError if the image cannot be fetched
        or its digest differs from the recipe's.
        """
        file = complete / image_file(self.asset, self.runtime)
        if self.runtime in WITH_IMAGE_STORE:
            return self._pull(complete)
        digest = self._registry_digest()
        self._check_digest(digest)
        if self.runtime == "skopeo":
            assert digest
            self._copy(digest, underway, file)
        else:
            self._run(*image_command(self.runtime, image_name(self.asset), file))
        return digest

    def _pull(self, complete: Path) -> str | None:
        image = image_name(self.asset)
        self._run(self.runtime, "pull", "--quiet", image)
        template = "{{range .RepoDigests}}{{println .}}{{end}}"
        command = (self.runtime, "image", "inspect", "--format", template, image)
        output = run_program(command, self.check).stdout
        digest = _repository_digest(output, self.asset.source)
        self._check_digest(digest)
        note = {"runtime": self.runtime, "image": image, "digest": digest}
        (complete / NOTE_FILE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
        return digest

    def _registry_digest(self) -> str | None:
        """Return the digest of the image in the registry, without fetching its layers."""
        if shutil.which("skopeo") is None:
            return None
        words = ("skopeo", "inspect", "--raw", f"docker://{image_name(self.asset)}")
        if self.runtime == "skopeo":
            manifest = self._run(*words)
        else:
            manifest = run_program(words, self.check).stdout
        return f"sha256:{hashlib.sha256(manifest.encode()).hexdigest()}" if manifest else None

    def _copy(self, digest: str, underway: Path, file: Path) -> None:
        """Copy the layers to a folder, from which a later call can resume, then to one file."""
        layers = underway / digest.partition(":")[2]
        name = f"{repository_of(self.asset.source)}@{digest}"
        image = f"docker://{name}"
        self._run("skopeo", "copy", "--quiet", RETRIES, image, f"oci:{layers}")
        try:
            self._run("skopeo", "copy", "--quiet", f"oci:{layers}", f"oci-archive:{file}")
        except SystemFaultError:
            shutil.rmtree(layers, ignore_errors=True)
            raise
        shutil.rmtree(layers)

    def _check_digest(self, digest: str | None) -> None:
        expected = self.asset.digest
        by_tag = expected is not None and self.asset.revision is not None
        if expected and (digest or by_tag) and digest != expected:
            fault = f"has digest {digest}" if digest else "does not report its digest"
            raise SystemFaultError(
                f"container {image_name(self.asset)}", f"{fault}; the recipe expects {expected}"
            )

    def _run(self, *command: str) -> str:
        """Return the output of a command; raises UserError or SystemFaultError if it failed."""
        result = run_program(command, self.check)
        if result.returncode:
            raise _fetch_error(self.asset, self.runtime, result.stderr or result.stdout)
        return result.stdout


def fetch_image(
    asset: Asset, complete: Path, underway: Path, runtime: str, check: Callable[[], None]
) -> str | None:
    """Fetch an image as `ImageFetch.fetch` does.

    Raises UserError before the fetch if the recipe's digest cannot be checked.
    """
    by_tag = asset.digest is not None and asset.revision is not None
    if by_tag and runtime not in WITH_IMAGE_STORE and shutil.which("skopeo") is None:
        raise UserError(
            f"container {image_name(asset)}",
            f"{runtime} cannot check the recipe's digest",
            remedy="install skopeo, or set the digest without a revision",
        )
    return ImageFetch(asset, runtime, check).fetch(complete, underway)


def image_name(asset: Asset) -> str:
    """Return `registry/repository:tag`, or `@digest` if a digest and no tag is stated."""
    if asset.revision:
        return f"{asset.source}:{asset.revision}"
    return f"{asset.source}@{asset.digest}" if asset.digest else asset.source


def image_file(asset: Asset, runtime: str) -> str:
    """Return the file name of an image, such as `nvidia+nemo+24.09.sqsh`, in enroot's style."""
    repository = asset.source.partition("/")[2] if _registry(asset.source) else asset.source
    stem = re.sub(r"[/:@]", "+", "+".join(filter(None, (repository, asset.revision))))
    ending = {"enroot": "sqsh", "apptainer": "sif", "singularity": "sif"}.get(runtime, "tar")
    return f"{stem}.{ending}"


def image_command(runtime: str, image: str, file: Path) -> tuple[str, ...]:
    """Return the command that fetches `image` into `file`."""
    if runtime == "enroot":
        # enroot separates registry and image by a #.
        name = image.replace("/", "#", 1) if _registry(image) else image
        return ("enroot", "import", "--output", str(file), f"docker://{name}")
    return (runtime, "build", "--force", str(file), f"docker://{image}")


def repository_of(source: str) -> str:
    """Return an image's name without its tag or digest."""
    return re.sub(r"(@.*|:[^/]*)$", "", source)


def registry_of(asset: Asset) -> str:
    """Return the name and port of an image's registry; Docker Hub if the image states none."""
    return _registry(asset.source) or DOCKER_HUB


def _registry(image: str) -> str | None:
    first, slash, _ = image.partition("/")
    return first if slash and (set(".:") & set(first) or first == "localhost") else None


def _repository_digest(text: str, source: str) -> str | None:
    """Return the digest of an image in its own repository; each repository may have its own."""
    pairs = [line.strip().rpartition("@")[::2] for line in text.splitlines() if "@" in line]
    return next(
        (d for name, d in pairs if name == repository_of(source)), pairs[0][1] if pairs else None
    )


def _fetch_error(asset: Asset, runtime: str, output: str) -> Exception:
    where, why = f"container {image_name(asset)}", _reason(output)
    if not _ACCESS_DENIED.search(output):
        plain = "HTTP response to HTTPS client" in output
        return SystemFaultError(
            where,
            f"{runtime} cannot fetch it: {why}",
            remedy="if intended, mark the registry as `insecure` in registries.conf"
            if plain
            else None,
        )
    registry = registry_of(asset)
    logins = {
        "enroot": "add credentials to ~/.config/enroot/.credentials",
        "apptainer": f"`apptainer registry login docker://{registry}`",
    }
    page = f"request access at {asset.gate}; " if asset.gate else ""
    login = logins.get(runtime, f"`{runtime} login {registry}`")
    key = " (user $oauthtoken, password: your NGC API key)" if registry == NGC else ""
    return UserError(where, f"access denied: {why}", remedy=f"{page}{login}{key}")


def _reason(output: str) -> str:
    """Return the error of a program, without the time and level that some add."""
    line = last_line(output)
    message = _MESSAGE.search(line)
    return message[1].replace('\\"', '"') if message else line
