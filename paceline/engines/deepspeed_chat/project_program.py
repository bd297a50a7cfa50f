"""Prepare a DeepSpeed-Chat checkout's folder on a node, then become its program.

    python project_program.py FOLDER [SOURCE=TARGET ...] -- PROGRAM [ARGUMENT ...]

Lambda's fork looks for models in PROJECT_PATH/.cache/huggingface/transformers, whatever HF_HOME is.
Here that folder is a link to the node's hub cache, so that downloaded and staged models are found.

The fork of deepspeedai reads local data sets only as `save_to_disk` writes them. Each SOURCE, a
folder of data files, is converted to TARGET once per node.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from pathlib import Path


def main(folder: Path, data: list[str], program: list[str]) -> None:
    """Link the hub cache, convert the data, set PROJECT_PATH, and replace this process."""
    cache = folder / ".cache" / "huggingface"
    cache.mkdir(parents=True, exist_ok=True)
    link, hub = cache / "transformers", hub_cache()
    if link.is_symlink() and link.readlink() != hub:
        link.unlink(missing_ok=True)
    with contextlib.suppress(FileExistsError):  # another rank made it
        link.symlink_to(hub)
    for conversion in data:
        source, _, target = conversion.partition("=")
        convert(source, Path(target), cache / "datasets")
    os.environ["PROJECT_PATH"] = str(folder)
    os.execv(program[0], program)


def hub_cache() -> Path:
    """Return the folder of downloaded models and data sets, as huggingface_hub has it."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME")
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return (Path(home) if home else caches / "huggingface").expanduser() / "hub"


def convert(source: str, target: Path, cache: Path) -> None:
    """Write a data set as `load_from_disk` reads it; the node's other ranks wait."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            return
        from datasets import load_dataset  # pyright: ignore

        partial = target.with_suffix(".partial")
        load_dataset(source, cache_dir=str(cache)).save_to_disk(str(partial))  # pyright: ignore
        partial.rename(target)


if __name__ == "__main__":
    end = sys.argv.index("--")
    main(Path(sys.argv[1]), sys.argv[2:end], sys.argv[end + 1 :])
