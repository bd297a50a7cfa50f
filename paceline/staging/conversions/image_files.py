"""Files out of a container image, such as the scripts of a submission that only its image has."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from paceline.core.assets import plain_path
from paceline.core.errors import SystemFaultError, UserError
from paceline.files.programs import last_line, run_program

EXTRACTOR = "unsquashfs"


def copy_from_image(
    target: Path, image_folder: Path, folder: str, pattern: str, check: Callable[[], None]
) -> None:
    """Copy the matching files of a folder in an image to `target`, subfolders included.

    Links are left out: they may point outside the image. Raises UserError if there is no SquashFS
    image, no `unsquashfs` or no matching file, or if the path of the folder has a link.
    """
    images = sorted(image_folder.glob("*.sqsh"))
    if len(images) != 1:
        raise UserError(
            str(image_folder),
            "has no SquashFS image",
            remedy="stage the container with enroot, or copy its files by hand",
        )
    if shutil.which(EXTRACTOR) is None:
        raise UserError(EXTRACTOR, "is not installed", remedy="install squashfs-tools")
    try:
        inner = plain_path(folder.strip("/"))
    except ValueError as error:
        raise UserError(f"made asset image-files: folder {folder!r}", str(error)) from error
    image_root = target / ".image"
    command = (EXTRACTOR, "-force", "-no-progress", "-dest", str(image_root), str(images[0]), inner)
    try:
        result = run_program(command, check)
        top = image_root / inner
        real_top = image_root.resolve() / inner
        if top.resolve() != real_top:
            raise UserError(
                f"{images[0].name}: /{inner}", "is a link", remedy="name the folder it points to"
            )
        files = [
            path
            for path in sorted(top.rglob(pattern))
            if path.is_file() and path.resolve() == real_top / path.relative_to(top)
        ]
        if not files and result.returncode:
            raise SystemFaultError(str(images[0]), last_line(result.stderr) or "cannot be read")
        if not files:
            raise UserError(f"{images[0].name}: /{inner}", f"has no file {pattern}")
        for path in files:
            place = target / path.relative_to(top)
            place.parent.mkdir(parents=True, exist_ok=True)
            path.replace(place)
    finally:
        shutil.rmtree(image_root, ignore_errors=True)
