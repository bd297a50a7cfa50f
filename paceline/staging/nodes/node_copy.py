"""One node on its way to having all assets: its program is started, answered and listened to."""

from __future__ import annotations

import json
import os
import selectors
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO, Literal

from paceline.core.errors import SystemFaultError
from paceline.core.text import one_line
from paceline.files.staged import CONTENT_FOLDER, MANIFEST_FILE, read_manifest
from paceline.machines.ssh.connection import meaning
from paceline.staging.ending import StageEnd
from paceline.staging.nodes.outbox import BLOCK_BYTES, Outbox

LOOK_S = 0.2
END_S, STEP_END_S = 2.0, 10.0
"""How long ssh or srun may take to end by itself, and after it was asked to."""
MAX_LINE_BYTES = 1 << 26
"""Of what a node says at once: it may lack very many files."""
KEPT_MESSAGES = 4096
NodeState = Literal["staged", "damaged", "missing", "partial", "failed"]
NO_PYTHON = "exec: python3: not found"
"""What bash says at last; any Python does, and the usual one may lie on a folder of its own."""
UP_OR_OUT = "see whether it is up, or leave it out"


@dataclass(frozen=True)
class NodeOutcome:
    """What became of the assets on one node."""

    host: str
    state: NodeState
    """`failed` where `fault` says why; else of the first asset that is not staged."""
    assets: Mapping[str, str] = field(default_factory=dict[str, str])
    """State of each asset by its folder, as far as the node told it."""
    copied: tuple[str, ...] = ()
    """Folders of the assets that came now."""
    way: Literal["shared", "sent"] | None = None
    """Whether the node read the folder itself; None where nothing came."""
    faults: tuple[tuple[str, str, str], ...] = ()
    """Folder of the asset, path and what is wrong with it, where all was read again."""
    come_bytes: int = 0
    """Bytes that came now, also of an asset that is not whole."""
    seconds: float = 0.0
    fault: str | None = None
    remedy: str | None = None


@dataclass(frozen=True)
class NodeOrder:
    """What every node is to have."""

    source: Path
    """The stage folder of this machine."""
    local: str
    """The folder on each node."""
    folders: tuple[Path, ...]
    """Of the assets, all of them staged here."""
    verify: bool = False
    """Read all again, and copy nothing."""

    @property
    def request(self) -> bytes:
        """The line that a node's program begins with."""
        assets = [
            {
                "folder": folder.name,
                "manifest": (folder / MANIFEST_FILE).read_text(encoding="utf-8"),
            }
            for folder in self.folders
        ]
        request = {
            "root": self.local,
            "source": str(self.source),
            "verify": self.verify,
            "assets": assets,
        }
        return (json.dumps(request) + "\n").encode()


@dataclass(frozen=True)
class NodeShell:
    """How a shell is started on a node that runs what comes on its standard input."""

    host: str
    argv: tuple[str, ...]
    python: str
    silence_s: float
    """Without a word for so long a node counts as lost."""
    environment: Mapping[str, str] | None = None
    """None is this process's."""


@dataclass
class NodeCopy:
    """The talk with one node."""

    shell: NodeShell
    order: NodeOrder
    ended: StageEnd
    at: Callable[[str, int, int], None]
    """Told of the node's phase, the bytes that it has, and those of them that came now."""
    _outbox: Outbox = field(default_factory=Outbox)
    _states: dict[str, str] = field(default_factory=dict[str, str])
    _copied: list[str] = field(default_factory=list[str])
    _faults: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    _shared: bool = False
    _come: int = 0
    _heard: bytes = b""
    _fault: str | None = None
    _remedy: str | None = None
    _over: bool = False

    def run(self) -> NodeOutcome:
        """Talk until the node has said its last word.

        Raises StageEndedError at the end, SystemFaultError where a file cannot be read here.
        """
        began = time.monotonic()
        with tempfile.TemporaryFile() as messages:
            with _started(self.shell, messages) as process:
                self._converse(process)
            if not (self._over or self._fault):
                self._blame(messages)
        worst = next((state for state in self._states.values() if state != "staged"), "staged")
        return NodeOutcome(
            host=self.shell.host,
            state="failed" if self._fault else _state(worst),
            assets=dict(self._states),
            copied=tuple(self._copied),
            way=("shared" if self._shared else "sent") if self._copied else None,
            faults=tuple(self._faults),
            come_bytes=self._come,
            seconds=round(time.monotonic() - began, 3),
            fault=self._fault,
            remedy=self._remedy,
        )

    def _converse(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin and process.stdout
        source, target = process.stdout.fileno(), process.stdin.fileno()
        os.set_blocking(target, False)
        self._outbox.add(_program(self.shell.python))
        self._outbox.add(self.order.request)
        last_word = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(source, selectors.EVENT_READ)
            while not self._over:
                self.ended.check(self.shell.host)
                _await_room(selector, target, bool(self._outbox))
                for key, _ in selector.select(LOOK_S):
                    if key.fd == target:
                        self._outbox.write(target)
                        continue
                    data = os.read(source, BLOCK_BYTES)
                    if not data:
                        return
                    last_word = time.monotonic()
                    self._take(data)
                if time.monotonic() - last_word > self.shell.silence_s:
                    self._fault = f"said nothing for {self.shell.silence_s:g} s"
                    self._remedy = UP_OR_OUT
                    return

    def _take(self, data: bytes) -> None:
        *lines, self._heard = (self._heard + data).split(b"\n")
        if len(self._heard) > MAX_LINE_BYTES:
            self._heard = b""
        for line in lines:
            try:
                said = json.loads(line)
            except ValueError:
                continue  # what its log-in prints
            if isinstance(said, dict) and "word" in said:
                try:
                    self._heed(said)
                except (KeyError, TypeError, ValueError, AttributeError, StopIteration):
                    # The output of other hosts is not trusted to be that of our program.
                    self._fault, self._over = "says what its program never would", True

    def _heed(self, said: dict[str, Any]) -> None:
        match said["word"]:
            case "here":
                self._states = {str(k): str(v) for k, v in said["states"].items()}
                self._shared = said["shared"]
            case "at":
                self._come = said["come"]
                self.at(said["phase"], said["present"], said["come"])
            case "send":
                self._send(said["folder"], said["files"])
            case "asset":
                name = said["folder"]
                self._states[name] = said["state"]
                self._copied += [name] if said.get("copied") else []
                self._faults += [(name, path, what) for path, what in said.get("faults", ())]
            case "fault":
                self._fault, self._remedy = one_line(said["what"]), said["remedy"]
            case _:
                self._over = True

    def _send(self, name: str, asked: Sequence[tuple[str, int]]) -> None:
        """Send files from the byte on that the node has not."""
        folder = next(folder for folder in self.order.folders if folder.name == name)
        manifest = read_manifest(folder)
        listed = {file.path: file for file in manifest.files} if manifest else {}
        kept = {str(path): int(count) for path, count in asked}
        if not set(kept).issubset(listed):
            raise SystemFaultError(self.shell.host, f"asks for what is no file of {name}")
        if any(not 0 <= count <= listed[path].bytes for path, count in kept.items()):
            raise ValueError("more than the file has")
        files = [(listed[path], count) for path, count in kept.items()]
        self._outbox.add_files(folder / CONTENT_FOLDER, files)

    def _blame(self, messages: BinaryIO) -> None:
        """The fault of a node that went without its last word, by what ssh or srun said."""
        messages.seek(-min(KEPT_MESSAGES, messages.seek(0, os.SEEK_END)), os.SEEK_END)
        said = messages.read().decode(errors="replace")
        if NO_PYTHON in said:
            self._fault = f"has neither {self.shell.python} nor a python3"
            self._remedy = "install Python 3.9 or newer there"
            return
        fault, self._remedy = meaning(said)
        self._fault = one_line(fault)


def _state(text: str) -> NodeState:
    for state in ("staged", "damaged", "missing"):
        if text == state:
            return state
    return "partial"


def _program(python: str) -> bytes:
    """What a shell is sent first; what comes behind it belongs to the program."""
    text = (resources.files("paceline.staging.nodes") / "node_program.py").read_text(
        encoding="utf-8"
    )
    first = f'python={shlex.quote(python)}; command -v "$python" >/dev/null || python=python3'
    return f'{first}; exec "$python" -c {shlex.quote(text)}\n'.encode()


def _await_room(selector: selectors.BaseSelector, target: int, waits: bool) -> None:
    """Look at whether more can be sent as long as there is more."""
    listed = target in selector.get_map()
    if waits and not listed:
        selector.register(target, selectors.EVENT_WRITE)
    elif listed and not waits:
        selector.unregister(target)


@contextmanager
def _started(shell: NodeShell, messages: BinaryIO) -> Iterator[subprocess.Popen[bytes]]:
    """The local end of a node's shell, out of reach of the terminal's signals."""
    with subprocess.Popen(
        shell.argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=messages,
        env=dict(shell.environment) if shell.environment is not None else None,
        start_new_session=True,
        bufsize=0,
    ) as process:
        try:
            yield process
        finally:
            assert process.stdin
            process.stdin.close()
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let it end by itself, as it does after the node's last word, else end it."""
    for limit_s, end in ((END_S, process.terminate), (STEP_END_S, process.kill)):
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            end()
        else:
            return
