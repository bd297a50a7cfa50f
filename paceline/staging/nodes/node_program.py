"""Takes staged assets to a disk of the node that it runs on; sent there as text.

On standard input comes one line of JSON: `root` (where to), `source` (where they lie on the machine
that sends), `verify`, `assets` (`folder` and the text of its `manifest` each). On standard output
go lines of JSON with a word each: `here` (what is there), `at` (bytes that are there, every
second), `send` (files that are to come on standard input, and how many bytes
of each are here: a line with mode and kind, then the other bytes), `asset` (what became of one),
`fault`, `end`. Where this node sees the source itself nothing is sent. It ends when standard input
does. Only the standard library is used.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import sys
import threading
from pathlib import Path
from typing import Any

BLOCK_BYTES = 1 << 20
EVERY_S = 1.0
MANIFEST, DAMAGED, CONTENT, PARTIAL, LOCK = (
    "manifest.json",
    "damaged.json",
    "content",
    "partial",
    "copy.lock",
)
UNDERWAY = "copying-"
"""How the name of a file begins that is not whole."""
LEFT_OUT = {".git", "__pycache__"}
"""Belong to the programs that use an asset."""
ANOTHER_FOLDER = "give another folder with --local"
MAKE_ROOM = "make room there, or " + ANOTHER_FOLDER
READ_AGAIN = "see where it was staged: --verify without --local"
FULL = {errno.ENOSPC: "is full", errno.EDQUOT: "is over its quota"}


class FaultError(Exception):
    """What is told to the sender: what is wrong, and what helps."""


class SenderLine:
    """What is said to the sender: by this thread, and by one that says how far it is."""

    def __init__(self) -> None:
        self.present = self.come = 0
        self.phase = "looking"
        self._lock = threading.Lock()
        self._over = threading.Event()

    def say(self, word: str, **content: Any) -> None:
        """One line, whole."""
        text = json.dumps({"word": word, **content}) + "\n"
        with self._lock:
            os.write(1, text.encode())

    def keep_saying(self) -> None:
        """How far it is, as long as it lasts; the sender takes silence for the node's end."""

        def beat() -> None:
            while not self._over.wait(EVERY_S):
                self.say_at()

        threading.Thread(target=beat, daemon=True).start()

    def say_at(self) -> None:
        """Bytes that are there, and those of them that came now."""
        self.say("at", phase=self.phase, present=self.present, come=self.come)

    def count(self, num_bytes: int) -> None:
        """So many bytes have come."""
        self.present += num_bytes
        self.come += num_bytes

    def end(self) -> None:
        """The last word."""
        self._over.set()
        self.say_at()
        self.say("end")


class CopiedAsset:
    """One asset on this node."""

    def __init__(
        self, root: str, source: str, folder: str, manifest: str, line: SenderLine
    ) -> None:
        self.folder, self.source = Path(root, folder), Path(source, folder)
        self.text, self.line = manifest, line
        self.files: list[dict[str, Any]] = json.loads(manifest)["files"]
        self.content, self.partial = self.folder / CONTENT, self.folder / PARTIAL
        self.done = self.partial / "done"

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file["bytes"] for file in self.files)

    def state(self) -> str:
        """missing, partial, damaged, or staged: the same manifest, and files of its sizes."""
        if not (self.folder / MANIFEST).is_file():
            if (self.folder / DAMAGED).is_file():
                return "damaged"
            return "partial" if self.content.exists() or self.partial.exists() else "missing"
        same = {f["path"]: f["sha256"] for f in self._manifest_files()} == {
            f["path"]: f["sha256"] for f in self.files
        }
        whole = all(size_of(self.content / f["path"]) == f["bytes"] for f in self.files)
        return "staged" if same and whole else "damaged"

    def is_seen(self) -> bool:
        """Whether this node sees what is to be copied, as the sender has it."""
        try:
            return (self.source / MANIFEST).read_text(encoding="utf-8") == self.text
        except (OSError, UnicodeError):
            return False

    def faults(self) -> list[list[str]]:
        """Every file that is missing, changed or extra; such an asset is marked as damaged."""
        self.line.phase = "checking"
        wrong: list[list[str]] = []
        for file in self.files:
            path = self.content / file["path"]
            if size_of(path) is None:
                wrong.append([file["path"], "missing"])
            elif digest_of(path) != file["sha256"]:
                wrong.append([file["path"], "changed"])
            self.line.present += file["bytes"]
        listed = {file["path"] for file in self.files}
        wrong += [[path, "extra"] for path in paths_below(self.content) if path not in listed]
        if wrong and (self.folder / MANIFEST).is_file():
            (self.folder / MANIFEST).replace(self.folder / DAMAGED)
        return wrong

    def take(self, copying: bool) -> bool:
        """Copy or receive what is lacking, then the manifest; False where it was there already."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / LOCK).open("w") as lock:
            self.line.phase = "waiting for another copy"
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.state() == "staged":
                self.line.present += self.num_bytes
                return False
            self._prepare()
            lacking = self._lacking()
            self.line.phase = "copying" if copying else "receiving"
            while lacking:
                if not copying:
                    asked = [[file["path"], self._kept(file)] for file in lacking]
                    self.line.say("send", folder=self.folder.name, files=asked)
                lacking = [file for file in lacking if not self._taken(file, copying)]
            self._finish()
            return True

    def _manifest_files(self) -> list[dict[str, Any]]:
        try:
            return json.loads((self.folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def _prepare(self) -> None:
        """A folder for whole files, with what an earlier call had left."""
        for name in (MANIFEST, DAMAGED):
            (self.folder / name).unlink(missing_ok=True)
        if self.content.exists():
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir()
            self.content.replace(self.done)
        self.done.mkdir(parents=True, exist_ok=True)

    def _lacking(self) -> list[dict[str, Any]]:
        """The files that must come; what is there and whole stays, all else goes."""
        self.line.phase = "checking"
        by_path = {file["path"]: file for file in self.files}
        for path in paths_below(self.done):
            file, place = by_path.get(path), self.done / path
            if file and size_of(place) == file["bytes"] and digest_of(place) == file["sha256"]:
                del by_path[path]
                self.line.present += file["bytes"]
            else:
                place.unlink()
        kept = {self._underway(file): self._kept(file) for file in by_path.values()}
        for place in self.partial.glob(UNDERWAY + "*"):
            if place not in kept:
                place.unlink()
        self.line.present += sum(kept.values())
        self._refuse_without_room(list(by_path.values()), sum(kept.values()))
        return list(by_path.values())

    def _refuse_without_room(self, lacking: list[dict[str, Any]], kept_bytes: int) -> None:
        """A disk without inodes is as full as one without bytes."""
        disk = os.statvfs(self.folder)
        free, needed = disk.f_bavail * disk.f_frsize, sum(f["bytes"] for f in lacking) - kept_bytes
        if needed > free:
            what = f"{needed / 1e6:.1f} MB are to come and {free / 1e6:.1f} MB are free"
            raise FaultError(f"{self.folder}: {what}", MAKE_ROOM)
        if disk.f_files and len(lacking) > disk.f_favail:
            files = "1 file is" if len(lacking) == 1 else f"{len(lacking):,} files are"
            free = "1 is" if disk.f_favail == 1 else f"{disk.f_favail:,} are"
            what = f"{files} to come and {free} free (inodes)"
            raise FaultError(f"{self.folder}: {what}", MAKE_ROOM)

    def _underway(self, file: dict[str, Any]) -> Path:
        """Where a file waits until it is whole; of another content nothing is kept."""
        return self.partial / underway_name(file["path"], file["sha256"])

    def _kept(self, file: dict[str, Any]) -> int:
        """Bytes of a file that had come before the copy was broken off."""
        size = size_of(self._underway(file)) or 0
        return size if size <= file["bytes"] else 0

    def _taken(self, file: dict[str, Any], copying: bool) -> bool:
        """Take one file; False where it must come again from its begin."""
        if copying:
            path = self.source / CONTENT / file["path"]
            return self._write(file, path, stat.S_IMODE(path.lstat().st_mode))
        head = json.loads(sys.stdin.buffer.readline() or b"null")
        if head is None:
            raise SystemExit(75)
        return self._write(file, None, head["mode"], head["link"])

    def _write(
        self, file: dict[str, Any], source: Path | None, mode: int, link: bool = False
    ) -> bool:
        """One file, from a folder or from standard input, read again before it counts.

        False where what was kept of it is at fault.
        """
        place = self.done / file["path"]
        place.parent.mkdir(parents=True, exist_ok=True)
        underway, kept = self._underway(file), self._kept(file)
        if link or (source is not None and source.is_symlink()):
            target = received(file["bytes"]).decode() if source is None else str(source.readlink())
            place.symlink_to(target)
            underway.unlink(missing_ok=True)
            self.line.present -= kept
            self.line.count(file["bytes"])
            kept = 0
        else:
            with underway.open("ab" if kept else "wb") as target_file:
                if source is None:
                    self._receive(file["bytes"] - kept, target_file)
                else:
                    self._copy(source, kept, target_file)
            underway.chmod(mode)
            underway.replace(place)
        if digest_of(place) == file["sha256"]:
            return True
        place.unlink()
        if kept:
            self.line.present -= file["bytes"]
            return False
        origin = "what was sent" if source is None else str(source)
        raise FaultError(f"{file['path']}: {origin} is not what the manifest says", READ_AGAIN)

    def _receive(self, left: int, target: Any) -> None:
        while left:
            block = received(min(left, BLOCK_BYTES))
            target.write(block)
            left -= len(block)
            self.line.count(len(block))

    def _copy(self, source: Path, begin: int, target: Any) -> None:
        with source.open("rb") as content:
            content.seek(begin)
            while block := content.read(BLOCK_BYTES):
                target.write(block)
                self.line.count(len(block))

    def _finish(self) -> None:
        self.done.replace(self.content)
        new = self.folder / (MANIFEST + ".new")
        with new.open("w", encoding="utf-8") as file:
            file.write(self.text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.folder / MANIFEST)
        shutil.rmtree(self.partial, ignore_errors=True)


def received(count: int) -> bytes:
    """So many bytes of standard input; its end is the end of this program."""
    block = sys.stdin.buffer.read(count)
    if len(block) < count:
        raise SystemExit(75)
    return block


def underway_name(path: str, sha256: str) -> str:
    """The name under which a file waits until it is whole: its own, and that of its content."""
    return UNDERWAY + hashlib.sha256(f"{sha256} {path}".encode()).hexdigest()


def size_of(path: Path) -> int | None:
    """Bytes of a file, of a link's target as it is written; None where there is none."""
    try:
        return path.lstat().st_size
    except OSError:
        return None


def digest_of(path: Path) -> str:
    """SHA-256 of a file, of a link's target as it is written."""
    if path.is_symlink():
        return hashlib.sha256(str(path.readlink()).encode()).hexdigest()
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def paths_below(folder: Path) -> list[str]:
    """Every file below a folder, what programs keep there left out."""
    paths: list[str] = []
    for place, names, files in os.walk(folder):
        names[:] = [name for name in names if name not in LEFT_OUT]
        paths += [
            Path(place, name).relative_to(folder).as_posix() for name in files if name != ".git"
        ]
    return sorted(paths)


def end_with_input() -> None:
    """End this program when the sender is gone, where nothing else reads what it says."""

    def watch() -> None:
        # Not through sys.stdin, whose lock the interpreter takes when it ends.
        if not os.read(0, 1):
            os._exit(75)

    threading.Thread(target=watch, daemon=True).start()


def work(request: dict[str, Any], line: SenderLine) -> None:
    """Look at all assets, then check or take each."""
    root, source = request["root"], request["source"]
    assets = [
        CopiedAsset(root, source, asset["folder"], asset["manifest"], line)
        for asset in request["assets"]
    ]
    states = {asset.folder.name: asset.state() for asset in assets}
    lacking = [asset for asset in assets if states[asset.folder.name] != "staged"]
    copying = Path(root).resolve() != Path(source).resolve() and all(
        asset.is_seen() for asset in lacking
    )
    line.say("here", states=states, shared=copying and bool(lacking))
    line.keep_saying()
    if request["verify"] or copying:
        end_with_input()
    for asset in assets:
        name = asset.folder.name
        if request["verify"]:
            faults = asset.faults() if states[name] in ("staged", "damaged") else []
            state = "damaged" if faults else states[name]
            line.say("asset", folder=name, state=state, faults=faults)
        elif asset in lacking:
            line.say("asset", folder=name, state="staged", copied=asset.take(copying))
        else:
            line.present += asset.num_bytes
            line.say("asset", folder=name, state="staged", copied=False)


def main() -> None:
    """Do what the first line asks for."""
    line = SenderLine()
    try:
        work(json.loads(sys.stdin.buffer.readline()), line)
    except FaultError as fault:
        what, remedy = fault.args
        line.say("fault", what=what, remedy=remedy)
    except OSError as error:
        full = FULL.get(error.errno or 0)
        what = f"{error.filename or 'the disk'} {full or f'cannot be used: {error.strerror}'}"
        line.say("fault", what=what, remedy=MAKE_ROOM if full else ANOTHER_FOLDER)
    line.end()


if __name__ == "__main__":
    main()
