"""Run folders: the complete record of a run, written atomically and readable at any time.

run.json      the resolved spec, the command, the controller process, the status
job.sh        the script that was started
inventory.json  the machine's hardware and software
inputs.json   the files it reads (data, tokenizer, weights), with manifests of staged assets
logs/         output of the programs, one file per rank
steps/        the trainer's event lines, one file per rank, and a marker for each failed rank
checkpoints/  checkpoints, if `checkpoint.every` is set
telemetry/    power, energy and clocks, one file per host
profiles/     output of a profiler; the source of profile.json and profile.html
steps.jsonl   steps merged over all ranks
result.json   metrics, measurement window, verdict
report.html
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import psutil
from pydantic import PositiveFloat

from paceline.core.errors import SystemFaultError, UserError
from paceline.core.layout_checks import layout_problems
from paceline.core.node_groups import Purpose
from paceline.core.result import FINAL, Status
from paceline.core.run import RunSettings, RunSpec
from paceline.core.text import as_text, is_text
from paceline.core.value import PositiveInt, Value
from paceline.files.documents import read_json, read_value
from paceline.files.home import home_path
from paceline.files.temporary_locks import remove_abandoned
from paceline.files.user_file import user_file

RUN_FILE = "run.json"
RESULT_FILE = "result.json"
INVENTORY_FILE = "inventory.json"
SCRIPT_FILE = "job.sh"
STEPS_FILE = "steps.jsonl"
STEPS_FOLDER = "steps"
LOGS_FOLDER = "logs"
LAUNCHER_LOG = "launcher.log"
NCCL_LOG_FILE = f"{LOGS_FOLDER}/nccl.%h.%p.log"
"""Log of NCCL's set-up; NCCL replaces %h by the host and %p by the process."""
REPORT_FILE = "report.html"

RUN_SCHEMA = 2
"""Version of run.json; other versions are rejected."""

_DAY = re.compile(r"\d{4}-\d{2}-\d{2}-")


class Controller(Value):
    """The process that controls a run; it is alive only if pid, boot and start time still match."""

    pid: PositiveInt
    boot_id: str
    started_unix: float
    started_ticks: int | None = None
    """Start in clock ticks since boot, unaffected by clock changes; None outside Linux."""
    host: str


class Repeat(Value):
    """Position of a run in a group of repeats, with the data to resume the group."""

    number: PositiveInt
    num_repeats: PositiveInt
    """Number of repeats that were requested of this configuration."""
    groups: tuple[str, ...]
    """Groups that run interleaved, including the run's own."""
    partner: RunSpec | None = None
    """Configuration of the other group, which may have no run yet."""
    sequential: bool = False
    """True for a sequential comparison: interim analyses spend the error over all `num_repeats`."""


class Trial(Value):
    """Position of a run in a scaling test."""

    campaign: str
    round: PositiveInt
    """Round number, over all sizes and repeats."""
    purpose: Purpose
    hosts: tuple[str, ...]


class RunRecord(Value):
    """Content of run.json: the configuration and the state of a run."""

    schema_version: Literal[2] = RUN_SCHEMA
    name: str
    tag: str | None = None
    created: str
    command: tuple[str, ...]
    spec: RunSpec | None
    """Configuration of a run that Paceline started; None for an imported log."""
    log_settings: RunSettings | None = None
    """Settings that an imported log, or the log of a bare command, reports."""
    log: str | None = None
    """Path of the imported log inside the folder."""
    log_sha256: str | None = None
    window: str | None = None
    """Rule for the measurement window that was given at the import."""
    group: str | None = None
    """Group of repeats that the run belongs to."""
    repeat: Repeat | None = None
    trial: Trial | None = None
    status: Status
    reason: str | None = None
    faulty_hosts: tuple[str, ...] = ()
    """Hosts that the launcher identifies as the cause."""
    controller: Controller | None = None
    launched_unix: float | None = None
    launched_monotonic_s: float | None = None
    """Launch time by the controller's monotonic clock, for durations on its host."""
    ended_unix: float | None = None
    ended_monotonic_s: float | None = None
    exit_code: int | None = None
    achievable_flops_per_s: PositiveFloat | None = None
    """Achievable GEMM throughput of all devices in the run's dtype, from an earlier probe."""
    achievable_source: str | None = None
    paceline_version: str
    log_tail: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def settings(self) -> RunSettings:
        """Settings of the run, from its spec or from its log."""
        return self.log_settings or (
            RunSettings.of(self.spec) if self.spec else RunSettings(origin="imported")
        )

    @property
    def key(self) -> str | None:
        """Eight hexadecimal digits that identify the configuration; None for an imported log."""
        return self.spec.key if self.spec else None


def runs_root(option: Path | None) -> Path:
    """Return the folder of all runs: the option, $PACELINE_RUNS, paceline.toml, ./runs."""
    folder = option or os.environ.get("PACELINE_RUNS")
    if folder and not is_text(str(folder)):
        raise UserError("folder of runs", f"{as_text(str(folder))!r} is not UTF-8 text")
    defaults = None if folder else user_file()
    return home_path("", str(folder or (defaults and defaults.runs_dir) or "runs"))


def folder_name(spec: RunSpec, when: datetime, tag: str | None) -> str:
    """Return `<date>-<recipe>-<layout>-<n>x<device>-<key>`, with the tag if there is one."""
    layout = None if spec.bare else spec.layout.label(spec.world_size).replace(" ", "")
    parts = [
        f"{when:%Y-%m-%d}",
        spec.recipe,
        spec.variant,
        tag,
        spec.profile and f"profile-{spec.profile.tool}",
        layout,
        f"{spec.world_size}x{spec.cluster.device}",
        spec.key,
    ]
    return "-".join(_slug(part) for part in parts if part)


def imported_name(facts: RunSettings, log: str, when: datetime, tag: str | None) -> str:
    """Return `<date>-<recipe or name of the log>-<tag>-<engine>-<n>x<device>-imported`."""
    devices = f"{facts.num_devices or ''}x{facts.device}" if facts.device else None
    parts = [f"{when:%Y-%m-%d}", facts.recipe or log[:60], tag, facts.engine, devices, "imported"]
    return "-".join(_slug(part) for part in parts if part)


def new_run_folder(root: Path, spec: RunSpec, tag: str | None = None) -> Path:
    """Create a folder for one run under `root`; add a number if the name exists."""
    return new_folder(root, folder_name(spec, datetime.now(UTC), tag))


def new_folder(root: Path, base: str) -> Path:
    """Create the folder `base` under `root`; add a number if the name exists."""
    remove_abandoned(root)
    for number in range(1, 10_000):
        folder = root / (base if number == 1 else f"{base}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise UserError(
                    f"run folder {base[:40]}...",
                    f"the name is too long for a file: {len(base):,} characters",
                    remedy="give a shorter --tag or recipe name",
                ) from error
            raise SystemFaultError(
                str(root),
                f"the run folder cannot be created: {error.strerror}",
                remedy="choose another folder with --runs-dir",
            ) from error
        return folder
    raise SystemFaultError(str(root), f"contains 10,000 runs named {base}")


def read_record(folder: Path) -> RunRecord:
    """Return run.json of a folder; raise UserError for another schema or an impossible layout."""
    file = folder / RUN_FILE
    try:
        record = read_value(file, RunRecord)
    except UserError:
        content = read_json(file)
        version = content.get("schema_version")
        if not isinstance(version, int) or version == RUN_SCHEMA:
            raise
        writer = content.get("paceline_version")
        raise UserError(
            str(file),
            f"has schema {version}, but this version of Paceline reads schema {RUN_SCHEMA}",
            remedy="update Paceline"
            if version > RUN_SCHEMA
            else f"open it with the Paceline that wrote it ({writer}), or run it again",
        ) from None
    if (spec := record.spec) is not None:
        for problem in layout_problems(replace(spec.parallel, seq_len=None)):
            raise UserError(str(file), f"spec.layout: {problem}")
    return record


def this_controller() -> Controller:
    """Return the identity of the running process."""
    process = psutil.Process()
    return Controller(
        pid=process.pid,
        boot_id=boot_id(),
        started_unix=process.create_time(),
        started_ticks=_start_ticks(process.pid),
        host=os.uname().nodename,
    )


def boot_id() -> str:
    """Return a text that changes at every boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"boot-{psutil.boot_time():.0f}"


def is_alive(controller: Controller) -> bool:
    """Return True if the process that `controller` describes still runs on this machine.

    A controller on another host is assumed to be alive.
    """
    if controller.host != os.uname().nodename:
        return True
    if controller.boot_id != boot_id():
        return False
    try:
        process = psutil.Process(controller.pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        if controller.started_ticks is not None:
            return _start_ticks(controller.pid) == controller.started_ticks
        return abs(process.create_time() - controller.started_unix) < 1.0
    except psutil.NoSuchProcess:
        return False


def _start_ticks(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # Field 22. Field 2, the program's name, may itself contain blanks and brackets.
    return int(text.rpartition(")")[2].split()[19])


def current_status(record: RunRecord) -> Status:
    """Return the current status; a run whose controller died before the end is `incomplete`."""
    if record.status in FINAL or record.status == "incomplete":
        return record.status
    if record.controller is None or is_alive(record.controller):
        return record.status
    return "incomplete"


def run_folders(root: Path) -> list[Path]:
    """Return all run folders under `root`, sorted by name, which starts with the day.

    Raises UserError if `root` is a file, SystemFaultError if it cannot be read.
    """
    try:
        folders = sorted(root.iterdir())
    except FileNotFoundError:
        return []
    except NotADirectoryError as error:
        raise UserError(
            str(root), "is not a folder", remedy="set the folder of all runs with --runs-dir"
        ) from error
    except OSError as error:
        raise SystemFaultError(str(root), f"cannot be read: {error.strerror}") from error
    # Unlike Path.is_file, this returns False for a folder that the user may not read.
    # A name that is not text could not be stored in the index, printed or written as JSON.
    return [f for f in folders if is_text(f.name) and os.path.isfile(f / RUN_FILE)]  # noqa: PTH113


def find_run(root: Path, name: str) -> Path:
    """Return the folder of a run by path, folder name, unique prefix, tag or `last`."""
    if os.path.isfile(Path(name) / RUN_FILE):  # noqa: PTH113
        return Path(name).resolve()
    folders = run_folders(root)
    if not folders:
        raise UserError(
            str(root), "contains no runs", remedy="start one with `paceline run tiny-llama`"
        )
    if name == "last":
        return _newest(folders)
    matches = [f for f in folders if f.name == name] or [
        f for f in folders if f.name.startswith(name) or name in (_tag_of(f), _group(f))
    ]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        raise UserError(
            f"run {name!r}", f"is not in {root}", remedy="`paceline runs list` shows the runs"
        )
    names = ", ".join(f.name for f in matches[:5])
    raise UserError(f"run {name!r}", f"matches {len(matches)} runs", allowed=names)


def find_runs(root: Path, name: str) -> list[Path]:
    """Return the folders of a run, a group of repeats, a tag, or a comma-separated list of these.

    The oldest comes first. Raises the errors of `find_run`; a prefix must match one run.
    """
    if "," in name:
        parts = [part.strip() for part in name.split(",") if part.strip()]
        return list(dict.fromkeys(folder for part in parts for folder in find_runs(root, part)))
    alike = [f for f in run_folders(root) if name in (_tag_of(f), _group(f))]
    return sorted(alike, key=_creation_time) if len(alike) > 1 else [find_run(root, name)]


def is_stored_name(root: Path, name: str) -> bool:
    """Return whether `name` is exactly the name, group or tag of a run under `root`."""
    return any(name in (f.name, _tag_of(f), _group(f)) for f in run_folders(root))


def run_files(folder: Path) -> tuple[str, ...]:
    """Return the path of every file of a run inside the folder, except hidden files."""
    files = (p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    visible = (p for p in files if not any(part.startswith(".") for part in p.parts))
    return tuple(sorted(map(str, visible)))


def groups(root: Path) -> dict[str, list[Path]]:
    """Return the folders of every group of repeats under `root`, oldest first; the newest group
    last."""
    creation_times = {folder: _creation_time(folder) for folder in run_folders(root)}
    by_group: dict[str, list[Path]] = {}
    for folder in sorted(creation_times, key=lambda folder: creation_times[folder]):
        if group := _group(folder):
            by_group[group] = [*by_group.pop(group, []), folder]
    return by_group


def _newest(folders: list[Path]) -> Path:
    """Return the run created last; folders named by an earlier day are not read."""
    days = {folder: day[0] for folder in folders if (day := _DAY.match(folder.name))}
    last_day = max(days.values(), default="")
    latest = [folder for folder in folders if days.get(folder, last_day) == last_day]
    return max(latest, key=lambda folder: (_creation_time(folder), folder.name))


def _creation_time(folder: Path) -> str:
    return str(read_json(folder / RUN_FILE).get("created", ""))


def _tag_of(folder: Path) -> str | None:
    return _word(folder, "tag")


def _group(folder: Path) -> str | None:
    return _word(folder, "group")


def _word(folder: Path, field: str) -> str | None:
    """Return a field of run.json if it is a text, because the file may be foreign."""
    word = read_json(folder / RUN_FILE).get(field)
    return word if isinstance(word, str) else None


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.") or "run"
