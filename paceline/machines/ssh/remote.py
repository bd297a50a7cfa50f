"""Bash program that runs on a host along with the job; it is sent on standard input.

The command given to ssh is the same for every host and every run, so no process list shows names,
paths or secrets. The program writes messages to standard error, in lines that begin with `@`.
Standard output belongs to the job. The program starts the job in a session of its own (`@pgid N`),
answers the controller's heartbeats, and reports the job's exit code last (`@rc N`; ssh's own 255
also means death by a signal). It ends the job if the heartbeats stop or the connection ends.

Processes are identified by a mark in their environment as well as by their group. A reused process
id, or a process that has left the group, therefore does not lead to the wrong process.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from importlib import resources

COMMAND = "exec bash --noprofile --norc -s"
"""Command that ssh runs on every host."""
MESSAGE_WORDS = frozenset(
    {"@ready", "@clock", "@facts", "@unable", "@pgid", "@alive", "@rc", "@ended"}
)
"""First words of the program's messages; ssh has lines of its own that begin with `@`."""
MARK = "PACELINE_MARK"
GRACE_S = 8
"""Time in seconds that ranks have to write their stacks after SIGTERM. It exceeds the grace period
of the node's agent."""

PROGRAM = rf"""
trap '' HUP PIPE
exec 3<&0
paceline_signal() {{ # MARK GROUP SIGNAL: to all processes with the mark; false if there are none
  local file pid stat to sent=1 done=
  for file in $(grep -lsaz "^{MARK}=$1\$" /proc/[0-9]*/environ </dev/null 3<&-); do
    pid=${{file#/proc/}} pid=${{pid%/environ}}
    {{ read -r stat <"/proc/$pid/stat"; }} 2>/dev/null || continue
    stat=(${{stat##*) }}) to=$pid sent=0
    [[ ${{stat[2]}} == "$2" ]] && to=-$2
    [[ $done == *" $to "* ]] || kill -s "$3" -- "$to" 2>/dev/null
    done+=" $to "
  done
  return $sent
}}
paceline_end() {{ # MARK GROUP: SIGTERM, then SIGKILL
  local deadline=$((SECONDS + {GRACE_S}))
  paceline_signal "$1" "$2" TERM || return 0
  paceline_signal "$1" "$2" CONT
  while ((SECONDS < deadline)); do
    sleep 0.2 </dev/null 3<&-
    paceline_signal "$1" "$2" 0 || return 0
  done
  paceline_signal "$1" "$2" KILL
}}
paceline_ask() {{ # PYTHON ARGUMENT ...
  local reply
  reply=$'\n'$(PYTHONSAFEPATH=1 "$1" -c "$paceline_facts" "${{@:2}}" </dev/null 3<&- 2>&1)
  if [[ $reply == *$'\n{{'* ]]; then
    reply=${{reply##*$'\n{{'}}
    echo "@facts {{${{reply%%$'\n'*}}" >&2
  else
    echo "@unable ${{reply##*$'\n'}}" >&2
  fi
}}
paceline_run() {{ # FOLDER MARK SILENCE NODE ADDRESS PORT
  local group watcher code
  cd -- "$1" || {{ echo "@rc 72" >&2; exit; }}
  (
    trap - HUP PIPE
    export {MARK}=$2
    exec setsid bash -c 'echo "@pgid $$" >&2; exec bash node.sh "$@" 2>&1' node "${{@:4}}"
  ) </dev/null 3<&- &
  group=$!
  (
    while read -r -t "$3" line; do echo "@alive $line" >&2; done
    while kill -0 "$group" 2>/dev/null; do # a job without its mark is not found yet
      paceline_end "$2" "$group"
      sleep 0.1 </dev/null
    done
  ) <&3 >/dev/null &
  watcher=$!
  wait "$group"
  code=$?
  paceline_end "$2" "$group"
  kill "$watcher" 2>/dev/null
  echo "@rc $code" >&2
  exit
}}
"""


def greeting(env: Mapping[str, str]) -> str:
    """Return the program, the job's environment, and a first message: `@ready ADDRESS`."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
    facts = (resources.files("paceline.machines.node") / "host_facts.py").read_text(
        encoding="utf-8"
    )
    ready = 'paceline_words=($SSH_CONNECTION); echo "@ready ${paceline_words[2]}" >&2'
    return "\n".join([PROGRAM, f"paceline_facts={shlex.quote(facts)}", *exports, ready, ""])


def request_time() -> str:
    """Return the request for `@clock SECONDS`."""
    return 'echo "@clock $(date +%s.%N </dev/null)" >&2\n'


def request_facts(python: str, *arguments: str) -> str:
    """Return the request to run host_facts.py.

    The answer is `@facts JSON`, or `@unable WHY` if the interpreter does not run it.
    """
    return call("paceline_ask", python, *arguments)


def start(
    folder: str, mark: str, silence_s: float, *node: str, env: Mapping[str, str] | None = None
) -> str:
    """Return the request to start node.sh with the arguments `node`.

    The host ends the job after `silence_s` seconds without a heartbeat.
    """
    exports = [f"export {name}={shlex.quote(value)}\n" for name, value in (env or {}).items()]
    return "".join(exports) + call("paceline_run", folder, mark, f"{silence_s:g}", *node)


def end(mark: str, group: int) -> str:
    """Return a separate program that ends all processes with the mark, and reports `@ended`."""
    return PROGRAM + call("paceline_end", mark, str(group)) + "echo @ended >&2; exit\n"


def call(function: str, *words: str) -> str:
    """Return a line of bash that calls a function, with its arguments quoted."""
    return shlex.join([function, *words]) + "\n"
