"""What must hold on every host before anything starts there, asked of all hosts at once."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

from paceline.core.hardware import SshSettings
from paceline.files.documents import write_text
from paceline.machines.ssh import remote
from paceline.machines.ssh.connection import meaning, ssh_argv
from paceline.machines.ssh.fanout import Fanout, allow_files
from paceline.machines.ssh.host_rules import HostCheck, Questions, judged
from paceline.machines.ssh.session import Heard, Session

CLOCK_QUESTIONS = 3
ANSWER_LIMIT_S = 60.0
"""How long a connected host may take to answer; its interpreter may lie on a slow folder."""
LATE_S = 1.0
"""What a connection may take beyond ssh's own limit, so that ssh can say itself why it failed."""
_NUMBER = re.compile(r"\d+(\.\d+)?")
SLOW = "see what its shell does at log-in and what its interpreter waits for"


@dataclass
class _Examination:
    """The questions to one host and what it answered."""

    session: Session
    first: str
    questions: Questions
    settings: SshSettings
    nonce: str = ""
    asked_s: float = 0.0
    server: str = ""
    clock: list[tuple[float, float | None]] = field(
        default_factory=list[tuple[float, float | None]]
    )
    """(round trip, skew) of each question; no skew where the host told no time."""
    facts: dict[str, Any] | None = None
    unable: str | None = None
    late: str | None = None

    @property
    def done(self) -> bool:
        answer = self.facts or self.unable or self.late
        return answer is not None or (self.session.ended and not self.session.heard)

    def look(self) -> None:
        """Take what was heard, ask the next question, and give up when it takes too long."""
        while self.session.heard and not self.done:
            self._take(self.session.heard.popleft())
        started_s = self.session.started_s
        if self.done or started_s is None:
            self.session.settled = self.done
            return
        limit_s = self.settings.connect_timeout_s
        if not self.asked_s and time.monotonic() - started_s > limit_s + LATE_S:
            self.late = f"its log-in did not end within {limit_s:g} s"
        elif self.asked_s and time.monotonic() - self.asked_s > ANSWER_LIMIT_S:
            self.late = f"did not answer the checks within {ANSWER_LIMIT_S:g} s"
        if self.late:
            self.session.kill()

    def _take(self, heard: Heard) -> None:
        if heard.word == "@ready":
            self.server = _address(heard.rest.strip())
            self._ask(remote.tell_time())
        elif heard.word == "@clock":
            self._take_clock(heard)
            more = len(self.clock) < CLOCK_QUESTIONS
            self._ask(remote.tell_time() if more else self._facts_question())
        elif heard.word == "@facts":
            self._take_facts(heard.rest)
        elif heard.word == "@unable":
            self.unable = heard.rest or "said nothing"

    def _take_facts(self, text: str) -> None:
        try:
            self.facts = json.loads(text)
        except ValueError:
            self.unable = text

    def _ask(self, text: str) -> None:
        self.session.send(text)
        self.session.write()
        self.asked_s = time.monotonic()

    def _facts_question(self) -> str:
        questions = self.questions
        folder = str(questions.folder) if questions.folder else ""
        words = (folder, self.nonce, questions.interface or "", self.first, self.server)
        return remote.ask(questions.python, "facts", *words)

    def _take_clock(self, heard: Heard) -> None:
        """The host's clock minus this one's at the middle of the round trip (Cristian's method)."""
        trip_s = heard.at_s - self.asked_s
        middle_unix = time.time() - (time.monotonic() - heard.at_s) - trip_s / 2
        match = _NUMBER.match(heard.rest)  # a `date` without %N leaves the letter behind the dot
        skew_s = float(match[0]) - middle_unix if match else None
        self.clock.append((trip_s, skew_s))


def examine(fanout: Fanout, questions: Questions, settings: SshSettings) -> tuple[HostCheck, ...]:
    """Ask every host of `fanout`; its sessions stay open where the host answered."""
    nonce = f".paceline-{secrets.token_hex(8)}={secrets.token_hex(16)}" if questions.folder else ""
    first = fanout.sessions[0].host
    examinations = [_Examination(s, first, questions, settings, nonce) for s in fanout.sessions]
    file, _, content = nonce.partition("=")
    if questions.folder:
        write_text(questions.folder / file, content)
    try:
        while not all(examination.done for examination in examinations):
            fanout.step(0.05)
            for examination in examinations:
                examination.look()
    finally:
        if questions.folder:
            (questions.folder / file).unlink(missing_ok=True)
    return judged([_host_check(examination) for examination in examinations], questions)


def check_hosts(
    hosts: Sequence[str],
    questions: Questions,
    settings: SshSettings,
    env: Mapping[str, str] | None = None,
) -> tuple[HostCheck, ...]:
    """What each host tells, in their order, with the fault of each at which a job would fail."""
    allow_files(len(hosts))
    sessions = [Session(host, ssh_argv(host, settings)) for host in hosts]
    for session in sessions:
        session.send(remote.greeting(env or {}))
    fanout = Fanout(sessions)
    try:
        return examine(fanout, questions, settings)
    finally:
        fanout.close()


def _address(text: str) -> str:
    """An address, empty where sshd says none (`UNKNOWN` where it was reached by no network)."""
    try:
        return str(ip_address(text))
    except ValueError:
        return ""


def _host_check(examination: _Examination) -> HostCheck:
    host = examination.session.host
    if examination.late:
        return HostCheck(host=host, fault=examination.late, remedy=SLOW)
    if examination.unable:
        python = os.fspath(examination.questions.python)
        return HostCheck(
            host=host,
            fault=f"cannot run {python}: {examination.unable[:200]}",
            remedy="install it at the same path, or name another interpreter (cluster.python)",
        )
    if examination.facts is None:
        what, remedy = meaning("\n".join(examination.session.messages))
        return HostCheck(host=host, fault=what, remedy=remedy)
    trip_s, skew_s = min(examination.clock, key=lambda reading: reading[0])
    facts = {**examination.facts, "round_trip_s": trip_s, "clock_skew_s": skew_s}
    return HostCheck(host=host, server_address=examination.server or None, **facts)
