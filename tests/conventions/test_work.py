"""How much of the package's own code a command calls: a recipe is read and checked once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import contextlib, io, sys
from pathlib import Path

import paceline

package = str(Path(paceline.__file__).parent) + "/"
calls = 0

def count(frame, event, argument):
    global calls
    calls += event == "call" and frame.f_code.co_filename.startswith(package)

sys.argv = ["paceline", *sys.argv[1:]]
sys.setprofile(count)
from paceline.cli import main

with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main()
sys.setprofile(None)
print(calls)
"""


@pytest.mark.parametrize(
    ("command", "limit"),
    [
        ("estimate llama31-70b --device H100 --gpus 1024", 12_352),
        ("run tiny-llama --dry-run", 9_856),
    ],
)
def test_a_command_calls_few_functions(command: str, limit: int, tmp_path: Path):
    """Count calls of Python functions of the package, comprehensions and imports included.

    Every command runs in an interpreter of its own, so that nothing is cached.
    """
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *command.split()],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert 1_000 < int(done.stdout) <= limit
