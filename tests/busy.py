"""Run a command next to busy loops: python tests/busy.py LOOPS ROUNDS COMMAND [ARGUMENT ...]

The command must end well in every round; the exit code is that of the first round in which it does
not.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def busy_loops(count: int) -> Iterator[list[int]]:
    """The ids of `count` processes that take all the processor time they get, until the end."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield [loop.pid for loop in loops]
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


def main(loops: int, rounds: int, command: Sequence[str]) -> int:
    """Run the command `rounds` times; return the first exit code that is not 0."""
    with busy_loops(loops):
        for number in range(1, rounds + 1):
            print(f"== next to {loops} busy loops, round {number} of {rounds}", flush=True)
            code = subprocess.run(command).returncode
            if code:
                return code
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
