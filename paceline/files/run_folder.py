"""Run folders: the truth about a run, written atomically, readable at every moment.

run.json      the resolved spec, the command, the controller's identity, status
job.sh        exactly what was started
inventory.json  the machine
inputs.json   what it reads: data, tokenizer, weights, and the manifests of what was staged
logs/         what the programs printed, one file a rank
steps/        the trainer's event lines, one file a rank; beside it a mark where a rank failed
checkpoints/  what `checkpoint.every` asked for
telemetry/    power, energy, clocks, one file a host
profiles/     what a profiler left; profile.json and profile.html are made of it
steps.jsonl   the ranks merged
result.json   metrics, window, verdict
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
from paceline.core.value import PositiveInt, Value
from paceline.files.documents import read_json, read_value
from paceline.files.home import home_path

RUN_FILE = "run.json"
RESULT_FILE = "result.json"
INVENTORY_FILE = "inventory.json"
SCRIPT_FILE = "job.sh"
STEPS_FILE = "steps.jsonl"
STEPS_FOLDER = "steps"
LOGS_FOLDER = "logs"
LAUNCHER_LOG = "launcher.log"
REPORT_FILE = "report.html"

RUN_SCHEMA = 2
"""Version of run.json; another one may mean other things by the same words."""

_DAY = re.compile(r"\d{4}-\d{2}-\d{2}-")


class Controller(Value):
    """The process that watches a run; it is alive only if pid, boot and start still match."""

    pid: PositiveInt
    boot_id: str
    started_unix: float
    started_ticks: int | None = None
    """Start in clock ticks since boot, which no change of the clock moves; None outside Linux."""
    host: str


class Repeat(Value):
    """Which repeat of a group a run is; what a series that was broken off needs to go on."""

    number: PositiveInt
    wanted: PositiveInt
    """Repeats that were asked for of this configuration."""
    groups: tuple[str, ...]
    """The groups that run in turn, the run's own among them."""
    partner: RunSpec | None = None
    """What the other group runs, which may have no run of its own yet."""
    sequential: bool = False
    """Whether the pairs are looked at while they are made, the error spent over all `wanted`."""


class Trial(Value):
    """Which part of a scaling campaign a run is."""

    campaign: str
    round: PositiveInt
    """Number of the round, over all sizes and repeats."""
    purpose: Purpose
    hosts: tuple[str, ...]


class RunRecord(Value):
    """run.json: what was asked for and what is known while it runs."""

    schema_version: Literal[2] = RUN_SCHEMA
    name: str
    tag: str | None = None
    created: str
    command: tuple[str, ...]
    spec: RunSpec | None
    """What Paceline itself runs; None for an imported log."""
    facts: RunSettings | None = None
    """What is known of an imported log, or what the log of a bare command told."""
    log: str | None = None
    """The imported log, by its path inside the folder."""
    log_sha256: str | None = None
    window: str | None = None
    """The rule by which the imported log's window was asked for."""
    group: str | None = None
    """The set of repeats that the run belongs to."""
    repeat: Repeat | None = None
    trial: Trial | None = None
    status: Status
    reason: str | None = None
    faulty_hosts: tuple[str, ...] = ()
    """Hosts that the launcher names as the cause."""
    controller: Controller | None = None
    launched_unix: float | None = None
    launched_monotonic_s: float | None = None
    """The same by the controller's monotonic clock, for durations on its own host."""
    ended_unix: float | None = None
    exit_code: int | None = None
    achievable_flops_per_s: PositiveFloat | None = None
    """Reachable rate of this machine in the run's dtype, all devices together, as probed before."""
    achievable_source: str | None = None
    paceline_version: str
    log_tail: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def known(self) -> RunSettings:
        """What is known of the run, started here or imported."""
        return self.facts or (
            RunSettings.of(self.spec) if self.spec else RunSettings(origin="imported")
        )

    @property
    def key(self) -> str | None:
        """Eight hexadecimal digits of what runs; None for an imported log."""
        return self.spec.key if self.spec else None


def runs_root(option: Path | None) -> Path:
    """The folder of all runs: the option, else $PACELINE_RUNS, else ./runs."""
    return home_path("", str(option or os.environ.get("PACELINE_RUNS") or "runs"))


def folder_name(spec: RunSpec, when: datetime, tag: str | None) -> str:
    """`<date>-<recipe>-<layout>-<n>x<device>-<key>`, with the tag if there is one."""
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
    """`<date>-<recipe or the log's name>-<tag>-<engine>-<n>x<device>-imported`."""
    devices = f"{facts.num_devices or ''}x{facts.device}" if facts.device else None
    parts = [f"{when:%Y-%m-%d}", facts.recipe or log[:60], tag, facts.engine, devices, "imported"]
    return "-".join(_slug(part) for part in parts if part)


def new_run_folder(root: Path, spec: RunSpec, tag: str | None = None) -> Path:
    """A new folder for one run under `root`; a number is added when the name is taken."""
    return new_folder(root, folder_name(spec, datetime.now(UTC), tag))


def new_folder(root: Path, base: str) -> Path:
    """A new folder called `base` under `root`, with a number when that is taken."""
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
                    f"its name has {len(base):,} characters, more than a file may have",
                    remedy="give a shorter --tag or recipe name",
                ) from error
            raise SystemFaultError(
                str(root),
                f"the run folder cannot be made: {error.strerror}",
                remedy="give another place with --runs-dir",
            ) from error
        return folder
    raise SystemFaultError(str(root), f"holds 10,000 runs named {base}")


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
            f"has schema {version}, and this version of Paceline reads schema {RUN_SCHEMA}",
            remedy="update Paceline"
            if version > RUN_SCHEMA
            else f"open it with the Paceline that wrote it ({writer}), or run it again",
        ) from None
    if (spec := record.spec) is not None:
        for problem in layout_problems(replace(spec.parallel, seq_len=None)):
            raise UserError(str(file), f"spec.layout: {problem}")
    return record


def this_controller() -> Controller:
    """The identity of the running process."""
    process = psutil.Process()
    return Controller(
        pid=process.pid,
        boot_id=boot_id(),
        started_unix=process.create_time(),
        started_ticks=_start_ticks(process.pid),
        host=os.uname().nodename,
    )


def boot_id() -> str:
    """A text that changes at every boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"boot-{psutil.boot_time():.0f}"


def is_alive(controller: Controller) -> bool:
    """True while the very process that `controller` describes runs on this machine.

    A controller on another host is taken to be alive: this machine cannot know.
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
    # Field 22. The second one, the program's name, may hold blanks and brackets itself.
    return int(text.rpartition(")")[2].split()[19])


def current_status(record: RunRecord) -> Status:
    """The status now: a run whose controller is gone without a final word is `incomplete`."""
    if record.status in FINAL or record.status == "incomplete":
        return record.status
    if record.controller is None or is_alive(record.controller):
        return record.status
    return "incomplete"


def run_folders(root: Path) -> list[Path]:
    """All run folders under `root` by name, which begins with the day; none of them is read.

    Raises UserError when `root` is a file, SystemFaultError when it cannot be read.
    """
    try:
        folders = sorted(root.iterdir())
    except FileNotFoundError:
        return []
    except NotADirectoryError as error:
        raise UserError(
            str(root), "is not a folder", remedy="give the folder of all runs with --runs-dir"
        ) from error
    except OSError as error:
        raise SystemFaultError(str(root), f"cannot be read: {error.strerror}") from error
    # Unlike Path.is_file, this is False and no error where a folder is closed to this user.
    return [folder for folder in folders if os.path.isfile(folder / RUN_FILE)]  # noqa: PTH113


def find_run(root: Path, name: str) -> Path:
    """The folder of a run named by path, folder name, unique prefix, tag or `last`."""
    if os.path.isfile(Path(name) / RUN_FILE):  # noqa: PTH113
        return Path(name).resolve()
    folders = run_folders(root)
    if not folders:
        raise UserError(
            str(root), "holds no runs", remedy="start one with `paceline run tiny-llama`"
        )
    if name == "last":
        return _newest(folders)
    matches = [f for f in folders if f.name == name] or [
        f for f in folders if f.name.startswith(name) or name in (_created_tag(f), _group(f))
    ]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        raise UserError(
            f"run {name!r}", f"is not in {root}", remedy="`paceline list` shows the runs"
        )
    shown = ", ".join(f.name for f in matches[:5])
    raise UserError(f"run {name!r}", f"names {len(matches)} runs", allowed=shown)


def find_runs(root: Path, name: str) -> list[Path]:
    """The folders that a name stands for, oldest first: one run, a group of repeats, all runs of a
    tag, or several of these joined by commas.

    Raises UserError as find_run does; a prefix must still name one run.
    """
    if "," in name:
        parts = [part.strip() for part in name.split(",") if part.strip()]
        return list(dict.fromkeys(folder for part in parts for folder in find_runs(root, part)))
    alike = [f for f in run_folders(root) if name in (_created_tag(f), _group(f))]
    return sorted(alike, key=_created) if len(alike) > 1 else [find_run(root, name)]


def run_files(folder: Path) -> tuple[str, ...]:
    """Every file of a run by its path inside the folder, hidden ones left out."""
    files = (p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    shown = (p for p in files if not any(part.startswith(".") for part in p.parts))
    return tuple(sorted(map(str, shown)))


def groups(root: Path) -> dict[str, list[Path]]:
    """The folders of every group of repeats under `root`, oldest first; the newest group last."""
    created = {folder: _created(folder) for folder in run_folders(root)}
    by_group: dict[str, list[Path]] = {}
    for folder in sorted(created, key=lambda folder: created[folder]):
        if group := _group(folder):
            by_group[group] = [*by_group.pop(group, []), folder]
    return by_group


def _newest(folders: list[Path]) -> Path:
    """The run created last; of folders named by their day only those of the last day are read."""
    days = {folder: day[0] for folder in folders if (day := _DAY.match(folder.name))}
    last_day = max(days.values(), default="")
    latest = [folder for folder in folders if days.get(folder, last_day) == last_day]
    return max(latest, key=lambda folder: (_created(folder), folder.name))


def _created(folder: Path) -> str:
    return str(read_json(folder / RUN_FILE).get("created", ""))


def _created_tag(folder: Path) -> str | None:
    return _word(folder, "tag")


def _group(folder: Path) -> str | None:
    return _word(folder, "group")


def _word(folder: Path, field: str) -> str | None:
    """A field of run.json where it is a text; others may have put anything there."""
    word = read_json(folder / RUN_FILE).get(field)
    return word if isinstance(word, str) else None


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.") or "run"
