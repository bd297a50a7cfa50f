"""Foreign batch scripts: job.sh exports the run's variables and submits the script unchanged."""

from __future__ import annotations

import contextlib
import hashlib
import shlex
import shutil
from pathlib import Path

from paceline.core.assets import InnerPath
from paceline.core.errors import UserError
from paceline.core.job import RUN_FOLDER, BatchScript, Job
from paceline.core.value import Value
from paceline.files.documents import open_regular, read_value, write_text, write_value
from paceline.files.run_folder import LOGS_FOLDER, SCRIPT_FILE, STEPS_FOLDER
from paceline.machines.node.script import open_variables

OWN_OPTIONS = ("--parsable", "--no-requeue", '--output="$folder/slurm-%j.log"')
"""Additional options of sbatch: its answer is parsed, the run is started once only, and its output
is kept."""
RECORD_FILE, COPY_FOLDER = "batch.json", "batch"
"""File with the record of the submission, and folder with a copy of the script."""
MAX_SCRIPT_BYTES = 1 << 24
OUTPUT_PATTERN = "slurm-*.log"


class SubmittedScript(Value):
    """Foreign batch script of a run, as in batch.json of the run folder."""

    script: str
    """Path of the script when it was submitted."""
    sha256: str
    folder: str
    """Folder in which sbatch was called."""
    options: tuple[str, ...]
    logs: tuple[InnerPath, ...]
    """Patterns of the files in the run folder that hold the log of the whole job."""


def submission_script(job: Job, batch: BatchScript) -> str:
    """Return job.sh of a job with a foreign batch script, which was not written by Paceline.

    job.sh prints the job's number. It contains no secrets; they are expected in the environment.
    Raises ValueError for a variable name that bash would misread.
    """
    what = "submits the job" if batch.submits else "is submitted unchanged"
    title = " ".join(f"{job.name}: {batch.script} {what}".split())
    words = [_quote(word) for word in (*batch.options, batch.script)]
    lines = [
        "#!/usr/bin/env bash",
        f"# {title}",
        "set -euo pipefail",
        'folder=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)',
        *(f"export {name}={_quote(value)}" for name, value in open_variables(job.env).items()),
        f"cd -- {_quote(batch.folder)}",
        f'exec bash {words[-1]} "$@"'
        if batch.submits
        else f'exec sbatch {" ".join(OWN_OPTIONS)} "$@" {" ".join(words)}',
    ]
    return "\n".join(lines) + "\n"


def prepare_foreign(job: Job, batch: BatchScript, folder: Path) -> None:
    """Write the job's files and job.sh, and keep a copy of the batch script.

    Raises UserError if the script does not exist or cannot be read as text.
    """
    for name, text in job.files.items():
        write_text(folder / name, text)
    for name in (LOGS_FOLDER, STEPS_FOLDER):
        (folder / name).mkdir(exist_ok=True)
    place = Path(batch.folder.replace(RUN_FOLDER, str(folder))).absolute()
    path = place / batch.script.replace(RUN_FOLDER, str(folder))
    try:
        with open_regular(path) as file:
            content = file.read(MAX_SCRIPT_BYTES)
        write_text(folder / COPY_FOLDER / path.name, content.decode())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            str(path), "is not a readable batch script", remedy="specify another script"
        ) from error
    record = SubmittedScript(
        script=str(path),
        sha256=hashlib.sha256(content).hexdigest(),
        folder=str(place),
        options=batch.options,
        logs=job.logs,
    )
    write_value(folder / RECORD_FILE, record)
    write_text(folder / SCRIPT_FILE, submission_script(job, batch))


def submitted_logs(folder: Path) -> list[Path]:
    """Return the log files of a foreign batch script in a run folder, sorted by name.

    The script's own output comes last. It is included because not every srun uses $SRUN_OUTPUT, by
    which scripts redirect the output of their steps.
    """
    try:
        record = read_value(folder / RECORD_FILE, SubmittedScript)
    except UserError:
        return []
    logs = sorted({path for pattern in record.logs for path in folder.glob(pattern)})
    return [*logs, *sorted(folder.glob(OUTPUT_PATTERN))]


def job_outputs(folder: Path) -> list[Path]:
    """Return the files with output of a batch job in a run folder, programs before its script.

    A script may redirect the errors of its programs from a log `x.out` to `x.err`.
    """
    logs = submitted_logs(folder)
    outputs = sorted(folder.glob(OUTPUT_PATTERN), key=lambda path: path.stat().st_mtime)
    try:
        patterns = read_value(folder / RECORD_FILE, SubmittedScript).logs
    except UserError:
        return outputs
    errors = {
        path
        for pattern in patterns
        if pattern.endswith(".out")
        for path in folder.glob(f"{pattern.removesuffix('.out')}.err")
    }
    programs = [path for path in logs if path not in outputs]
    return [*programs, *sorted(errors), *outputs]


def keep_linked_logs(folder: Path) -> None:
    """Replace a link to a folder with logs of the ended job by copies of these logs.

    The run folder then still has its logs after the submitting tool cleans up. The link is kept if
    the logs cannot be copied.
    """
    logs_by_link: dict[Path, list[Path]] = {}
    for path in submitted_logs(folder):
        if path.parent != folder and path.parent.is_symlink():
            logs_by_link.setdefault(path.parent, []).append(path)
    for link, logs in logs_by_link.items():
        copies = link.with_name(f"{link.name}.part")
        with contextlib.suppress(OSError):
            copies.mkdir(exist_ok=True)
            for path in logs:
                shutil.copyfile(path, copies / path.name)
            link.unlink()
            copies.rename(link)


def _quote(text: str) -> str:
    """Quote one word for bash; the path of the run folder is filled in when the script runs."""
    parts = (shlex.quote(part) if part else "" for part in text.split(RUN_FOLDER))
    return '"$folder"'.join(parts) or "''"
