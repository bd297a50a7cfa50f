"""Prepare the project folder of Lambda's fork on a node, then become its program.

    python project_program.py FOLDER PROGRAM [ARGUMENT ...]

The fork looks for models in PROJECT_PATH/.cache/huggingface/transformers, whatever HF_HOME is. Here
that folder is a link to the node's hub cache, so that downloaded and staged models are found.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path


def main(folder: Path, program: list[str]) -> None:
    """Link the hub cache, set PROJECT_PATH, and replace this process."""
    cache = folder / ".cache" / "huggingface"
    cache.mkdir(parents=True, exist_ok=True)
    link, hub = cache / "transformers", hub_cache()
    if link.is_symlink() and link.readlink() != hub:
        link.unlink(missing_ok=True)
    with contextlib.suppress(FileExistsError):  # another rank made it
        link.symlink_to(hub)
    os.environ["PROJECT_PATH"] = str(folder)
    os.execv(program[0], program)


def hub_cache() -> Path:
    """Return the folder of downloaded models and data sets, as huggingface_hub has it."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME")
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return (Path(home) if home else caches / "huggingface").expanduser() / "hub"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
