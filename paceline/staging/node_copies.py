"""Copies of staged assets on the disks of other nodes, made by rsync and checked by sha256sum.

A node is reached over SSH or by a step of a Slurm job. A node that sees the stage folder copies
from it directly. Otherwise rsync sends the files through the same remote shell, and resumes
partial files. The manifest is written last, after every byte has been read back on the node.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess
from typing import Literal, cast, get_args

from paceline.core.assets import UNSTAGED_FOLDERS, AssetState, Manifest
from paceline.core.errors import PacelineError, UserError
from paceline.core.hardware import Cluster
from paceline.core.launchers import capabilities
from paceline.core.text import one_line
from paceline.files.documents import open_regular
from paceline.files.programs import MAX_OUTPUT_BYTES, run_program
from paceline.files.staged import CONTENT_FOLDER, DAMAGED_FILE, MANIFEST_FILE, read_manifest
from paceline.files.temporary import temporary_folder
from paceline.machines.slurm import client
from paceline.machines.slurm.client import allocation_hosts
from paceline.machines.slurm.script import sbatch_word
from paceline.machines.slurm.steps import check_allocation
from paceline.machines.ssh.connection import explain, ssh_argv
from paceline.staging.connection import StopSignal
from paceline.staging.download_log import DownloadLog, StageWatcher
from paceline.staging.hub_cache import hub_links

MAX_NODES_AT_ONCE = 32
"""Maximum number of concurrent nodes; more would compete for a shared network link."""
SILENT_INTERVALS = 12
"""Keep-alive intervals (`alive_interval_s`) without a byte after which a transfer fails."""
PARTIAL = ".rsync-partial"
SHELL = ("bash", "--noprofile", "--norc", "-s")
IGNORE_USR1 = ("bash", "-c", 'trap "" USR1; exec "$0" "$@"')
"""Prefix of rsync's remote shell that ignores SIGUSR1.

A failing rsync kills its remote shell by SIGUSR1. The error message of the node's own rsync comes
on the standard error of that shell, and would be lost if it had not arrived yet.
"""
OTHER_FOLDER = "choose another folder with --local"
FAULTS = (
    (
        r"(?:rsync|sha256sum): (?:command )?not found",
        "has no rsync or sha256sum",
        "install them",
    ),
    (r"No space left on device", "the disk is full", f"free some space, or {OTHER_FOLDER}"),
    (r"Disk quota exceeded", "the disk quota is exceeded", f"free some space, or {OTHER_FOLDER}"),
    (
        r"(Permission denied|Read-only file system)(?! \()",
        "the folder is not writable",
        OTHER_FOLDER,
    ),
    (r"timeout in data send/receive", "no data for too long", "check that the node is up"),
)
"""Error pattern of a node's programs, its meaning and its remedy; `meaning` covers ssh's own."""

_PROBE = f"""
probe() {{  # folder, digest of the manifest, the manifest at its source, name
  if sha256sum 2>/dev/null <"$1/{MANIFEST_FILE}" | grep -q "^$2"; then state=staged
  elif [ -e "$1/{DAMAGED_FILE}" ]; then state=damaged
  elif [ -d "$1" ]; then state=partial
  else state=missing; fi
  if sha256sum 2>/dev/null <"$3" | grep -q "^$2"; then transfer=shared; else transfer=sent; fi
  echo "$4 $state $transfer"
}}
"""

NodeState = Literal["staged", "damaged", "missing", "partial", "failed"]


@dataclass(frozen=True)
class NodeShell:
    """Command lines that start programs on a node."""

    host: str
    argv: tuple[str, ...]
    """Command line of a shell that runs the script on its standard input."""
    remote: tuple[str, ...]
    """Remote shell of rsync, which appends the host and the remote command."""
    silence_s: int
    environment: Mapping[str, str] | None = None
    """Environment variables; None for those of this process."""


@dataclass(frozen=True)
class NodeSyncRequest:
    """Assets to copy to every node, or to verify there."""

    source: Path
    """Stage folder of this machine."""
    local: str
    """Stage folder on each node."""
    folders: tuple[Path, ...]
    """Folders of the assets, which are all staged on this machine."""
    verify: bool = False
    """Read all files back and copy nothing."""


@dataclass(frozen=True)
class NodeOutcome:
    """State of the assets on one node."""

    host: str
    state: NodeState
    """`failed` if there is a `fault`; otherwise the state of the first asset that is not staged."""
    assets: Mapping[str, AssetState] = field(default_factory=dict[str, AssetState])
    """Known state of each asset by the name of its folder."""
    copied_assets: tuple[str, ...] = ()
    """Folder names of the assets that were copied, at least in part."""
    transfer: Literal["shared", "sent"] | None = None
    """`shared` if the node read the stage folder itself; None if nothing was copied."""
    faults: tuple[tuple[str, str, str], ...] = ()
    """Asset folder, path and fault of each bad file, from reading all files back."""
    bytes_copied: int = 0
    seconds: float = 0.0
    fault: str | None = None
    remedy: str | None = None


class _NodeError(Exception):
    """Fault of a node and its remedy."""


def node_shells(cluster: Cluster, limit: int | None = None) -> tuple[NodeShell, ...]:
    """Return the shell of each node of a cluster, or of its first `most` nodes.

    Raises UserError if the cluster lists no nodes, or fewer.
    """
    launcher = capabilities(cluster.launcher)
    allocation = cluster.slurm.allocation if launcher.allocations else None
    if not launcher.needs_hosts and allocation is None:
        raise UserError(
            "--local",
            "copies to other nodes, but none are given",
            allowed="--hosts FILE|LIST, --allocation JOBID, --cluster FILE with hosts",
            remedy="with Slurm, allocate nodes first: salloc",
        )
    if shutil.which("rsync") is None:
        raise UserError(
            "--local", "requires rsync, which is not installed", remedy="apt install rsync"
        )
    silence_s = max(1, round(SILENT_INTERVALS * cluster.ssh.alive_interval_s))
    if launcher.needs_hosts or allocation is None:
        shells: list[NodeShell] = []
        for host in cluster.hosts[:limit]:
            words = tuple(ssh_argv(host, cluster.ssh))
            shells.append(NodeShell(host, words, words[: words.index("--")], silence_s))
        return tuple(shells)
    hosts = cluster.hosts or tuple(host.name for host in allocation_hosts(allocation))
    check_allocation(allocation, hosts, max(len(hosts), limit or 0))
    options = ("--nodes=1", "--ntasks=1", "--overlap", "--mem=0", "--cpu-bind=none", "--export=ALL")
    step = ("srun", f"--jobid={sbatch_word('allocation', allocation)}", *options)
    # By default srun forwards complete lines, so rsync's binary protocol would wait until its
    # timeout. With --unbuffered it forwards partial lines, but also mixes its own messages with
    # those of a script. So only rsync's remote shell uses it.
    remote = (*step, "--unbuffered", "--nodelist")
    environment = client.environment({})
    return tuple(
        NodeShell(
            host,
            (*step, "--nodelist", sbatch_word("nodelist", host), *SHELL),
            remote,
            silence_s,
            environment,
        )
        for host in hosts[:limit]
    )


def sync_nodes(
    shells: Sequence[NodeShell],
    request: NodeSyncRequest,
    watch: StageWatcher = lambda progress: None,
    stop: StopSignal | None = None,
) -> tuple[NodeOutcome, ...]:
    """Copy or verify the assets on all nodes; return one outcome per node, in order.

    A failed node does not stop the others. Raises StageEndedError if staging is stopped.
    """
    stop = stop or StopSignal()
    log = DownloadLog(watch)
    manifests = {folder: read_manifest(folder) for folder in request.folders}
    for shell in shells:
        log.add(shell.host, sum(manifest.bytes for manifest in manifests.values() if manifest))
    copies = [_NodeCopy(shell, request, stop, log, manifests) for shell in shells]
    with ThreadPoolExecutor(MAX_NODES_AT_ONCE, "node") as pool:
        answers = [pool.submit(copy.run) for copy in copies]
        try:
            wait(answers)
        except BaseException:  # an interrupt must stop the threads too
            stop.set()
            raise
    for answer in answers:
        if isinstance(error := answer.exception(), PacelineError):
            raise error
    return tuple(answer.result() for answer in answers)


@dataclass
class _NodeCopy:
    """Copy or verification of all assets on one node."""

    shell: NodeShell
    request: NodeSyncRequest
    stop: StopSignal
    log: DownloadLog
    manifests: Mapping[Path, Manifest | None]
    states: dict[str, AssetState] = field(default_factory=dict[str, AssetState])
    copied_assets: list[str] = field(default_factory=list[str])
    faults: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    shared: bool = False
    num_bytes: int = 0

    def run(self) -> NodeOutcome:
        """Copy or verify all assets; raises StageEndedError if staging is stopped."""
        start = time.monotonic()
        fault: tuple[str | None, str | None] = (None, None)
        try:
            self._probe()
            for folder in self.request.folders:
                self._verify(folder) if self.request.verify else self._copy(folder)
            links = hub_links(self.request.folders).script(self.request.local)
            if links and not self.request.verify:
                self._script(links)
        except _NodeError as error:
            fault = error.args[0], error.args[1]
        incomplete_states: list[NodeState] = [
            state for state in self.states.values() if state != "staged"
        ]
        worst: NodeState = incomplete_states[0] if incomplete_states else "staged"
        self.log.phase(self.shell.host, fault[0] or worst)
        return NodeOutcome(
            host=self.shell.host,
            state="failed" if fault[0] else worst,
            assets=dict(self.states),
            copied_assets=tuple(self.copied_assets),
            transfer=("shared" if self.shared else "sent") if self.copied_assets else None,
            faults=tuple(self.faults),
            bytes_copied=self.num_bytes,
            seconds=round(time.monotonic() - start, 3),
            fault=fault[0],
            remedy=fault[1],
        )

    def _probe(self) -> None:
        """Read the state of every asset, and whether the node sees the stage folder."""
        words = (
            "" if self.request.verify else f"mkdir -p -- {shlex.quote(self.request.local)} || exit"
        )
        lines = [_PROBE, "type rsync sha256sum >/dev/null || exit", words]
        for folder in self.request.folders:
            digest = hashlib.sha256((folder / MANIFEST_FILE).read_bytes()).hexdigest()
            source = self.request.source / folder.name / MANIFEST_FILE
            place = f"{self.request.local}/{folder.name}"
            lines.append(shlex.join(("probe", place, digest, str(source), folder.name)))
        text = self._script("\n".join(lines))
        folder_names = {folder.name for folder in self.request.folders}
        transfers: set[str] = set()
        for line in text.splitlines():
            match line.split():
                case [name, state, transfer] if name in folder_names and state in get_args(
                    AssetState
                ):
                    self.states[name] = cast(AssetState, state)
                    transfers.add(transfer)
                case _:
                    pass  # output of the login shell
        if self.states.keys() != folder_names:
            raise _NodeError("unexpected output from the node's shell", None)
        self.shared = transfers == {"shared"}

    def _copy(self, folder: Path) -> None:
        state = self.states[folder.name]
        self.states[folder.name] = "staged" if state == "staged" else "partial"
        has_changes = self._rsync(folder, with_checksums=state == "damaged")
        if state == "staged" and not has_changes:
            return
        self._verify(folder)
        if self.faults:
            path = self.faults[0][1]
            remedy = "check the source: --verify without --local"
            self.states[folder.name] = "partial"
            raise _NodeError(f"{path} differs from the manifest", remedy)
        place = shlex.quote(f"{self.request.local}/{folder.name}")
        manifest = shlex.quote((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
        self._script(
            f"cd -- {place} && printf %s {manifest} > .{MANIFEST_FILE} && "
            f"mv -f .{MANIFEST_FILE} {MANIFEST_FILE} && rm -f {DAMAGED_FILE}"
        )
        self.states[folder.name] = "staged"
        self.copied_assets.append(folder.name)

    def _rsync(self, folder: Path, with_checksums: bool) -> bool:
        """Copy the content of an asset to the node; return whether anything changed there."""
        options = [
            "-rlpt",
            "--delete",
            f"--partial-dir={PARTIAL}",
            "--stats",
            "--no-human-readable",
        ]
        options += ["--info=progress2", *(["--checksum"] if with_checksums else [])]
        options += [f"--exclude={name}" for name in sorted(UNSTAGED_FOLDERS)]
        target = f"{self.request.local}/{folder.name}/"
        with temporary_folder() as place:
            before, progress = self.num_bytes, place / "progress"
            progress.touch()

            def check() -> None:
                self.stop.check(self.shell.host)
                self._report(f"copying {folder.name}", before, progress)

            self._script(f"mkdir -p -- {shlex.quote(target)}")
            if self.shared:
                source = self.request.source / folder.name / CONTENT_FOLDER
                command = shlex.join(["rsync", *options, str(source), target])
                result = self._run(self.shell.argv, check, f"{command}\n", progress)
            else:
                remote = ["-e", shlex.join((*IGNORE_USR1, *self.shell.remote))]
                # rsync is silent while it computes checksums, so a timeout would stop it. In that
                # phase only ssh or Slurm detect a lost node.
                remote += [] if with_checksums else [f"--timeout={self.shell.silence_s}"]
                host = f"[{self.shell.host}]" if ":" in self.shell.host else self.shell.host
                place = [str(folder / CONTENT_FOLDER), f"{host}:{target}"]
                result = self._run(
                    ("rsync", *options, *remote, "-s", *place), check, None, progress
                )
            text = _end_of(progress, MAX_OUTPUT_BYTES)
        if result.returncode:
            raise _failure(result)
        if match := re.search(r"^Literal data: (\d+)", text, re.MULTILINE):
            self._add_bytes(before + int(match[1]) - self.num_bytes)
        numbers = re.findall(r"^Number of (?:created|deleted|regular) files.*?: (\d+)", text, re.M)
        return any(int(number) for number in numbers)

    def _verify(self, folder: Path) -> None:
        """Read every file back on the node; mark the asset there as damaged if one is wrong."""
        name, state, manifest = folder.name, self.states[folder.name], self.manifests[folder]
        if self.request.verify and (manifest is None or state not in ("staged", "damaged")):
            return
        if manifest is None:  # A copy must not be published without verification.
            raise _NodeError(f"{name} has no manifest", "stage it again")
        self.log.phase(self.shell.host, f"verifying {name}")
        content = folder / CONTENT_FOLDER
        links = {file.path for file in manifest.files if (content / file.path).is_symlink()}
        sums = "".join(f"{f.sha256}  {f.path}\n" for f in manifest.files if f.path not in links)
        script = [f"cd -- {shlex.quote(f'{self.request.local}/{name}/{CONTENT_FOLDER}')} || exit"]
        script += [f"sha256sum --check --quiet <<'END_OF_SUMS'\n{sums}END_OF_SUMS"] if sums else []
        script += [
            f'printf %s "$(readlink -- {shlex.quote(file.path)})" | sha256sum | '
            f"grep -q ^{file.sha256} || echo {shlex.quote(file.path + ': FAILED')}"
            for file in manifest.files
            if file.path in links
        ]
        prune = " ".join(f"-name {left_out} -prune -o" for left_out in sorted(UNSTAGED_FOLDERS))
        script.append(f"echo; find . {prune} \\( -type f -o -type l \\) -print; true")
        text = self._script("\n".join(script), is_long=True)
        wrong, _, listing = text.partition("\n./")
        present = {line.removeprefix("./") for line in f"./{listing}".splitlines()} - {""}
        expected = {file.path for file in manifest.files}
        failed = {line.rpartition(": FAILED")[0] for line in wrong.splitlines()} & expected
        faults = [(name, path, "missing") for path in sorted(expected - present)]
        faults += [(name, path, "changed") for path in sorted(failed & present)]
        faults += [(name, one_line(path), "extra") for path in sorted(present - expected)]
        self.faults += faults
        self.states[name] = "damaged" if faults else state
        if faults:
            place = shlex.quote(f"{self.request.local}/{name}")
            self._script(f"cd -- {place} && mv -f {MANIFEST_FILE} {DAMAGED_FILE} 2>/dev/null; true")

    def _script(self, text: str, is_long: bool = False) -> str:
        """Return the output of a script on the node; unless `is_long`, its limit is `silence_s`."""
        start, silence_s = time.monotonic(), self.shell.silence_s

        def check() -> None:
            self.stop.check(self.shell.host)
            if not is_long and time.monotonic() - start > silence_s:
                raise _NodeError(f"no response for {silence_s} s", "check that the node is up")

        result = self._run(self.shell.argv, check, f"{text}\n")
        if result.returncode:
            raise _failure(result)
        return result.stdout

    def _run(
        self,
        argv: Sequence[str],
        check: Callable[[], None],
        text: str | None,
        output: Path | None = None,
    ) -> CompletedProcess[str]:
        environment = {**(self.shell.environment or os.environ), "LC_ALL": "C"}
        removed = [word for name in os.environ.keys() - environment for word in ("-u", name)]
        to_file = ("bash", "-c", 'exec "$@" > "$0"', str(output)) if output else ()
        if text is not None:
            text = f"export LC_ALL=C\n{text}"
        return run_program(
            ("env", *removed, *to_file, *argv), check, text, {**os.environ, **environment}
        )

    def _report(self, phase: str, before: int, progress: Path) -> None:
        self.log.phase(self.shell.host, phase)
        if progress.stat().st_size > MAX_OUTPUT_BYTES:
            raise _NodeError(f"rsync prints more than {MAX_OUTPUT_BYTES:,} bytes", None)
        text = _end_of(progress, 200)
        if numbers := re.findall(r"(\d+) +\d+%", text):
            self._add_bytes(before + int(numbers[-1]) - self.num_bytes)

    def _add_bytes(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.log.add_received(self.shell.host, num_bytes)


def _end_of(path: Path, max_bytes: int) -> str:
    with open_regular(path) as file:
        file.seek(max(0, path.stat().st_size - max_bytes))
        return file.read(max_bytes).decode(errors="replace")


def _failure(result: CompletedProcess[str]) -> _NodeError:
    """Return the error that the node's programs, ssh or srun report."""
    for pattern, fault, remedy in FAULTS:
        if re.search(pattern, result.stderr):
            return _NodeError(fault, remedy)
    fault, remedy = explain(result.stderr)
    if remedy is None:
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        # srun appends its own message about the failed task to the task's error.
        lines = [line for line in lines if not line.startswith("srun: ")] or lines
        first = [line for line in lines if line.startswith("rsync: ")][:1]
        silent = [f"exited with code {result.returncode} without output"]
        fault = one_line((first or lines[-1:] or silent)[0][:200])
    return _NodeError(fault, remedy)
