"""Run the commands that the documentation shows, and record what they print.

    python docs/outputs.py [PAGE ...]      rewrite the console blocks of the pages

A `console` block holds commands after `$ ` and what they print. The commands of a page run in
order, in a new folder that holds a copy of `docs/examples/`. The comment `<!-- setup: COMMAND -->`
runs a command without showing it. The comment `<!-- varies -->` in front of a block says that its
output differs from run to run, so that tests compare exit codes alone. Commands that need a
cluster or a GPU are in `sh` blocks: tests check their options, and nothing runs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parent
BLOCK = re.compile(
    r"^<!-- setup: (?P<setup>.+?) -->$"
    r"|(?P<varies><!-- varies -->\n\n?)?^```console\n(?P<block>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
LIMIT_S = 300


class Step(NamedTuple):
    """One command of a page: what the page shows as its output, and where that text is."""

    command: str
    output: str
    start: int
    end: int
    kind: str
    """`recorded`, `varies` or `setup`."""


def pages() -> list[Path]:
    """Return all pages with console blocks."""
    paths = [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]
    return [path for path in paths if "```console\n" in path.read_text("utf-8")]


def steps(text: str) -> Iterator[Step]:
    """Yield the commands of a page in order."""
    for match in BLOCK.finditer(text):
        if match["setup"]:
            yield Step(match["setup"], "", match.end(), match.end(), "setup")
            continue
        command, start, end = "", 0, match.start("block")
        kind = "varies" if match["varies"] else "recorded"
        for line in match["block"].splitlines(keepends=True):
            continues = command.endswith("\\\n")
            if line.startswith("$ ") or continues:
                if command and not continues:
                    yield Step(command, text[start:end], start, end, kind)
                    command = ""
                command += line.removeprefix("$ ")
                start = end + len(line)
            end += len(line)
        yield Step(command, text[start:end], start, end, kind)


class Shell:
    """A folder in which the commands of one page run."""

    def __init__(self, folder: Path) -> None:
        shutil.copytree(DOCS / "examples", folder / "work")
        self.folder = folder / "work"
        self.code = 0
        self.env = {
            **{name: value for name, value in os.environ.items() if "PACELINE" not in name},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "COLUMNS": "100",
            "NO_COLOR": "1",
            "XDG_CACHE_HOME": str(folder / "cache"),
            "XDG_DATA_HOME": str(folder / "data"),
        }

    def run(self, command: str) -> str:
        """Return what the command prints, without the path of the folder."""
        process = subprocess.run(
            ["bash", "-c", f"(exit {self.code}); {command}"],
            cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        self.code = process.returncode
        lines = process.stdout.replace(f"{self.folder}/", "").splitlines()
        return "".join(f"{line.rstrip()}\n" for line in lines)


def rewrite(page: Path) -> None:
    """Run the commands of a page and write their output into it."""
    text = page.read_text("utf-8")
    parts, position = [], 0
    with tempfile.TemporaryDirectory() as folder:
        shell = Shell(Path(folder))
        for step in steps(text):
            output = shell.run(step.command)
            parts += [text[position : step.start], "" if step.kind == "setup" else output]
            position = step.end
    page.write_text("".join(parts) + text[position:], "utf-8")


def main() -> None:
    """Rewrite the named pages, or all."""
    for page in [Path(name) for name in sys.argv[1:]] or pages():
        print(page)
        rewrite(page)


if __name__ == "__main__":
    main()
