"""Diagnosis of how a run ended: the first rank that failed or hung, and why.

The sources are, in this order: the last event of each rank, the exit codes that the launcher saw,
and the logs. A rank that only lost its peer, or waited for it, does not identify the cause.

If several ranks failed by themselves, the first one by the clocks of their nodes is reported. If
two clocks differ by more than the time between two failures, this may be the later one. The first
failure that an agent reports cannot settle it: each node's agent knows only its own ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals

from paceline.core.result import Status
from paceline.core.text import shorten
from paceline.files.documents import LARGEST_BYTES, open_regular, read_lines
from paceline.files.events import Cause, EndEvent, RankLog, read_rank
from paceline.files.run_folder import LAUNCHER_LOG, LOGS_FOLDER, STEPS_FOLDER
from paceline.machines import JobEnd
from paceline.machines.slurm.foreign import job_outputs

TAIL_LINES = 15
TAIL_BYTES = 16_384
MAX_ERROR = 300
"""Maximum number of characters of a line that is quoted as the reason."""
STOPPED: tuple[Cause, ...] = ("no_progress", "waiting")
"""Causes for which a rank's watchdog ends it."""
NOT_RUNNING = "its watchdog could not run (the GIL was not released, or the process was stopped)"

_AGENT_EXIT = re.compile(r"^@exit rank=(\d+) code=(-?\d+) at=(\d+\.\d+)$", re.MULTILINE)
_GRAVEST = ("oom", "nan", "failed")
_STACK_LINE = re.compile(
    r"\s*(\[rank\d+\]:\s*)?(Traceback \(most recent|  File \"|    |\s*\^+\s*$)|\s*$"
)
"""Stack frames and empty lines, which are not part of a reason."""
_OWN_SIGNAL = re.compile(
    r".*(Received \d+ death signal, shutting down|closing signal SIG|SignalException: Process \d)"
)
"""Lines of torchrun about the signal that ends it; irrelevant if the user stopped the run."""


@dataclass(frozen=True)
class Ending:
    """Status of an ended run, with the reason if it did not end well."""

    status: Status
    reason: str | None
    warnings: tuple[str, ...] = ()
    rank: int | None = None
    """Rank that the reason refers to."""
    hosts: tuple[str, ...] = ()
    """Hosts at fault, if the launcher knows them."""
    on_request: bool = False
    """True if the ranks were stopped, so that their logs do not show the cause."""


@dataclass(frozen=True)
class EndEvidence:
    """Logs and exit codes of a job whose processes have ended."""

    ranks: Mapping[int, RankLog]
    world_size: int
    exit_code: int
    oom_killed: bool = False
    """True if the kernel's OOM killer ended a process during the run."""
    exits: Mapping[int, int] = field(default_factory=dict[int, int])
    """Exit codes of ranks that the launcher saw fail, first failure first; -N for signal N."""
    tails: Mapping[int, Sequence[str]] = field(default_factory=dict[int, Sequence[str]])
    """Last lines that each rank printed, without stack frames."""
    tail: Sequence[str] = ()
    """Last lines of the most informative log."""
    job_end: JobEnd | None = None
    """Launcher's own report of the end."""
    hung_ranks: frozenset[int] = frozenset()
    """Ranks whose stack a timer wrote because their watchdog could not run."""

    @property
    def ends(self) -> dict[int, EndEvent]:
        """End events by rank."""
        return {rank: log.end for rank, log in sorted(self.ranks.items()) if log.end is not None}

    @property
    def silent(self) -> list[int]:
        """Ranks without an end event."""
        return [rank for rank in range(self.world_size) if rank not in self.ends]

    def with_rank(self, rank: int, reason: str) -> str:
        """Return the reason with the rank's number, unless all ranks have the same reason."""
        reasons = {end.reason for end in self.ends.values()}
        alike = len(self.ends) == self.world_size and reasons == {reason}
        return reason if self.world_size == 1 or alike else f"rank {rank}: {reason}"


def read_ranks(folder: Path) -> dict[int, RankLog]:
    """Return the events of a run folder by rank."""
    logs: dict[int, RankLog] = {}
    for rank, path in _rank_files(folder / STEPS_FOLDER, "jsonl"):
        try:
            logs[rank] = read_rank(read_lines(path))
        except OSError:  # missing or unreadable: this rank gives no information
            continue
    return logs


def read_evidence(
    folder: Path,
    world_size: int,
    exit_code: int,
    oom_killed: bool,
    job_end: JobEnd | None = None,
) -> EndEvidence:
    """Collect the evidence about an ended job from its run folder and launcher."""
    logs = folder / LOGS_FOLDER
    return EndEvidence(
        ranks=read_ranks(folder),
        world_size=world_size,
        exit_code=exit_code,
        oom_killed=oom_killed,
        exits=agent_exits(
            file_text(path, TAIL_BYTES) for path in (logs / LAUNCHER_LOG, *logs.glob("host-*.log"))
        ),
        tails={rank: _tail(path) for rank, path in _rank_files(logs, "log")},
        tail=log_tail(folder),
        job_end=job_end,
        hung_ranks=frozenset(
            rank for rank, path in _rank_files(logs, "timer") if file_text(path, 1)
        ),
    )


def find_ending(evidence: EndEvidence) -> Ending:
    """Return how a run ended: a rank's own fault, a killed rank, a hang, or success."""
    ending = (
        _own_fault(evidence)
        or _launcher_ending(evidence)
        or _killed_rank(evidence)
        or _hung_rank(evidence)
    )
    if ending is not None:
        return ending
    ends = evidence.ends
    if len(ends) == evidence.world_size and all(end.status == "ok" for end in ends.values()):
        late = f"all ranks finished, yet the launcher ended with code {evidence.exit_code}"
        return Ending("ok", None, (late,) if evidence.exit_code else ())
    return _fallback_ending(evidence)


def log_tail(folder: Path, rank: int | None = None, on_request: bool = False) -> list[str]:
    """Return the last lines of a log without stack frames.

    The log is that of `rank` if it printed anything, else of the first rank with an error, else of
    the launcher, else of the agent of a host, of the programs of a batch script, or of that script.
    `on_request` drops the launcher's lines about the signal that ended a cancelled run.
    """
    files = dict(_rank_files(folder / LOGS_FOLDER, "log"))
    if rank in files and (tail := _tail(files[rank])):
        return tail
    launcher = folder / LOGS_FOLDER / LAUNCHER_LOG
    tails = [_tail(path) for path in [*files.values(), launcher]]
    if on_request:
        tails = [[line for line in tail if not _OWN_SIGNAL.match(line)] for tail in tails]
    tails = [tail for tail in tails if tail]
    with_error = [tail for tail in tails if last_error(tail)]
    agents = sorted((folder / LOGS_FOLDER).glob("host-*.log"))
    outputs = [tail for path in (*job_outputs(folder), *agents) if (tail := _tail(path))]
    outputs_with_error = [tail for tail in outputs if last_error(tail)]
    return (with_error or tails[-1:] or outputs_with_error or outputs[-1:] or [[]])[0]


def stacks(folder: Path) -> dict[str, str]:
    """Return the end of each rank's stack file by its path.

    The timer's file, which a signal may have truncated, is used only if there is no other.
    """
    texts: dict[int, tuple[str, str]] = {}
    for suffix in ("timer", "stack"):
        for rank, path in _rank_files(folder / LOGS_FOLDER, suffix):
            if text := file_text(path, TAIL_BYTES):
                texts[rank] = str(path.relative_to(folder)), text
    return {name: text for _, (name, text) in sorted(texts.items())}


def launcher_exits(text: str) -> dict[int, int]:
    """Return the exit codes by rank of the failures that torchrun lists, root cause first."""
    failures = text.rpartition("Failures:")[2]
    pairs = re.findall(r"rank\s*:\s*(\d+).*?\n\s*exitcode\s*:\s*(-?\d+)", failures)
    return {int(rank): int(code) for rank, code in reversed(pairs)}


def agent_exits(logs: Iterable[str]) -> dict[int, int]:
    """Return the exit codes by rank in the logs of the node agents, first failure first."""
    exits = [line for text in logs for line in _AGENT_EXIT.findall(text)]
    exits.sort(key=lambda line: float(line[2]))
    return {int(rank): int(code) for rank, code, _ in exits}


def file_text(path: Path, last_bytes: int | None = None) -> str:
    """Return the text of a run folder's file, or the end of it; empty if it cannot be read."""
    try:
        with open_regular(path, follow=False) as file:
            if last_bytes:
                file.seek(max(0, path.stat().st_size - last_bytes))
            return file.read(LARGEST_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _own_fault(evidence: EndEvidence) -> Ending | None:
    """Return the first rank that failed by itself; of simultaneous ones the most severe."""
    faults = [
        (end.time_unix, _GRAVEST.index(end.status), rank, end)
        for rank, end in evidence.ends.items()
        if end.cause == "own_fault"
    ]
    if not faults:
        return None
    *_, rank, end = min(faults, key=lambda fault: fault[:3])
    return Ending(end.status, evidence.with_rank(rank, _reason(end)), rank=rank)


def _launcher_ending(evidence: EndEvidence) -> Ending | None:
    """Return the launcher's reason: a lost host, or a job that the batch system ended."""
    end = evidence.job_end
    return Ending(end.status, end.reason, hosts=end.hosts) if end else None


def _killed_rank(evidence: EndEvidence) -> Ending | None:
    """Return a rank without an end event that a signal ended; out-of-memory faults first."""
    exits = _signals(evidence)
    for rank in evidence.silent:
        if any("bad_alloc" in line for line in evidence.tails.get(rank, ())):
            return Ending("oom", evidence.with_rank(rank, "std::bad_alloc in C++ code"), rank=rank)
    if evidence.oom_killed and evidence.silent:
        rank = next((rank for rank, number in exits.items() if number == Signals.SIGKILL), None)
        who = "a rank" if rank is None else f"rank {rank}"
        reason = f"the kernel killed {who} because the machine ran out of memory"
        return Ending("oom", reason, rank=rank)
    for rank, number in exits.items():
        error = last_error(evidence.tails.get(rank, ()))
        reason = f"rank {rank} was killed by {_signal_name(number)}"
        return Ending("failed", f"{reason}: {error}" if error else reason, rank=rank)
    return None


def _signals(evidence: EndEvidence) -> dict[int, int]:
    """Return the signals that ended ranks without an end event, except the launcher's.

    When a rank has ended, the launcher sends SIGTERM to the others, and SIGKILL if they persist.
    """
    first = next(iter(evidence.exits), None)
    hangs = any(end.cause in STOPPED for end in evidence.ends.values())
    return {
        rank: -code
        for rank, code in evidence.exits.items()
        if code < 0
        and rank in evidence.silent
        and (rank == first or not (hangs or code == -Signals.SIGTERM))
    }


def _hung_rank(evidence: EndEvidence) -> Ending | None:
    """Return the rank that blocks the others, once a watchdog has ended one."""
    ended_by_watchdog = [
        (rank, end)
        for rank, end in sorted(evidence.ends.items(), key=lambda item: item[1].time_unix)
        if end.cause in STOPPED
    ]
    for rank, end in ended_by_watchdog:
        if end.cause == "no_progress":
            return Ending("failed", evidence.with_rank(rank, _reason(end)), rank=rank)
    waiter, wait = ended_by_watchdog[0] if ended_by_watchdog else (None, None)
    silent = evidence.silent
    for rank in silent:
        if rank in evidence.hung_ranks:
            reason = f"{_no_progress(wait)}: {NOT_RUNNING}"
            return Ending("failed", evidence.with_rank(rank, reason), rank=rank)
    if wait is None:
        return None
    if not silent:
        return Ending("failed", f"{_no_progress(wait)}: every rank waits for others")
    names = ", ".join(map(str, silent[:8])) + (", ..." if len(silent) > 8 else "")
    who = f"rank {names}" if len(silent) == 1 else f"ranks {names}"
    reason = f"{who} showed no activity while rank {waiter} waited ({_reason(wait)})"
    return Ending("failed", reason, rank=silent[0])


def _reason(end: EndEvent) -> str:
    return end.reason or "no reason given"


def _no_progress(wait: EndEvent | None) -> str:
    if wait is None or wait.silent_s is None:
        return "no progress"
    return f"no progress for {wait.silent_s:g} s {wait.doing}"


def _fallback_ending(evidence: EndEvidence) -> Ending:
    """Return the best guess: an exit code, an error in the logs, or the rank that noticed."""
    for rank, code in evidence.exits.items():
        if code > 0 and rank in evidence.silent:
            error = last_error(evidence.tails.get(rank, ()))
            reason = f"ended with exit code {code}" + (f": {error}" if error else "")
            return Ending("failed", evidence.with_rank(rank, reason), rank=rank)
    noticed_reason = next(
        (end.reason for end in evidence.ends.values() if end.status != "ok"), None
    )
    reason = last_error(evidence.tail) or noticed_reason
    return Ending("failed", reason or f"the launcher ended with code {evidence.exit_code}")


def _signal_name(number: int) -> str:
    names = {signal.value: signal.name for signal in Signals}
    return names.get(number, f"signal {number}")


def _rank_files(folder: Path, suffix: str) -> Iterator[tuple[int, Path]]:
    """Yield the files rank-NNNNN.<suffix> of a folder with their ranks."""
    for path in sorted(folder.glob(f"rank-*.{suffix}")):
        number = path.stem.removeprefix("rank-")
        if number.isdigit():
            yield int(number), path


def last_error(tail: Sequence[str]) -> str | None:
    """Return the last line with an error; None if there is none."""
    errors = [line.strip() for line in tail if "Error" in line or "error:" in line.lower()]
    return shorten(errors[-1], MAX_ERROR) if errors else None


def _tail(path: Path) -> list[str]:
    lines = file_text(path, TAIL_BYTES).splitlines()
    lines_without_noise = [
        line for line in lines if not (_STACK_LINE.match(line) or _AGENT_EXIT.match(line))
    ]
    return [line[:500] for line in lines_without_noise[-TAIL_LINES:]]
