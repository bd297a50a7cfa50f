"""Run a command and print what it used, from a process that is itself small.

    python -S benchmarks/_usage.py ANSWER COMMAND...

A child's largest resident set includes what its parent had when it was started, so the parent must
have little. The command's standard output goes to the file ANSWER.
"""

import os
import sys

WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
answer, *command = sys.argv[1:]
child = os.posix_spawn(
    command[0], command, os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 1, answer, WRITE, 0o600)]
)
_, status, usage = os.wait4(child, 0)
print(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)
