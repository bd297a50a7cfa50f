"""A job that reads staged assets from the nodes' own disks, where its cluster has them there."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace

from paceline.core.job import Job
from paceline.files.staged import CONTENT_FOLDER, MANIFEST_FILE, stage_root


def on_node_disks(job: Job) -> Job:
    """`job` with the nodes' own folder (`cluster.stage`) in the place of this machine's.

    Itself where the cluster names none. Every path below the stage folder that its words, variables
    and files name is changed; the folders of the assets have equal names on both sides.
    """
    local = job.cluster.stage if job.cluster else None
    if local is None:
        return job
    here, there = str(stage_root()), local.rstrip("/")
    # In a file of JSON a path may be written in another way.
    moves = {here: there, json.dumps(here)[1:-1]: json.dumps(there)[1:-1]}

    def moved(text: str) -> str:
        for old, new in moves.items():
            text = re.sub(rf"(?<![\w./-]){re.escape(old)}/", lambda _, to=new: f"{to}/", text)
        return text

    return replace(
        job,
        program=tuple(moved(word) for word in job.program),
        env={name: moved(value) for name, value in job.env.items()},
        files={name: moved(text) for name, text in job.files.items()},
    )


def presence_lines(job: Job) -> list[str]:
    """Lines of bash that end a node on which an asset of such a job is not."""
    local = job.cluster.stage if job.cluster else None
    if local is None:
        return []
    folder = local.rstrip("/")
    pattern = re.compile(rf"{re.escape(folder)}/([a-z0-9][a-z0-9.-]*)/{CONTENT_FOLDER}\b")
    texts = (*job.program, *job.env.values(), *job.files.values())
    names = sorted({name for text in texts for name in pattern.findall(text)})
    what = f"is not staged in {folder}; `paceline stage RECIPE` with --cluster or --local copies it"
    return [
        f"[ -f {shlex.quote(f'{folder}/{name}/{MANIFEST_FILE}')} ] ||"
        f' {{ echo "error: $(hostname): {name} "{shlex.quote(what)} >&2; exit 66; }}'
        for name in names
    ]
