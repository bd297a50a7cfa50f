"""kubectl with the user's configuration: short commands, and streams of output."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from paceline.core.errors import SystemFaultError
from paceline.core.hardware import KubernetesSettings
from paceline.core.interrupts import deferred_interrupts
from paceline.files.documents import parse_json
from paceline.files.programs import die_with_parent, run_program

LIMIT_S = 60.0
"""Time limit of a command in seconds."""
REQUEST_TIMEOUT = "--request-timeout=30s"
MAX_ERROR = 600
BLOCK_BYTES, MAX_BLOCKS = 1 << 16, 128
"""Size of a block of a stream, and maximum number of blocks that are read at a time."""
MAX_BYTES = 1 << 25
"""Maximum number of bytes of a stream that wait for the end of a line or a value."""
_NOISE = re.compile(r'^(error: |Error from server \(\w+\): )?(error when creating "STDIN": )?')
_NO_KIND = re.compile(r"""(?:no matches for kind|doesn't have a resource type) "(\w+)\"""")
_REMEDIES = (
    (re.compile(r"exceeded quota"), "use fewer --nodes, or wait until the quota has room"),
    (re.compile(r"AlreadyExists|already exists"), "delete it, or start the run again"),
    (re.compile(r"Forbidden|forbidden"), "ask for this right (RBAC), or use another namespace"),
    (
        re.compile(r"Unable to connect|connection refused|did not answer|no such host|refused"),
        "check `kubectl get pods`, kubernetes.context and KUBECONFIG",
    ),
    (
        re.compile(r"logged in|Unauthorized|credentials"),
        "log in again",
    ),
)
_DECODER = json.JSONDecoder()


def fault(text: str) -> SystemFaultError:
    """Return the error for a message of kubectl, with a remedy if its cause is known."""
    lines = [_NOISE.sub("", line) for line in text.splitlines() if line.strip()]
    what = "; ".join(dict.fromkeys(lines))[:MAX_ERROR] or "kubectl failed without a message"
    if match := _NO_KIND.search(text):
        kind = match[1]
        remedy = f"install the operator of {kind}, or set `kind: job` in the cluster file"
        return SystemFaultError("Kubernetes", f"the cluster has no {kind}", remedy=remedy)
    remedy = next((remedy for pattern, remedy in _REMEDIES if pattern.search(text)), None)
    return SystemFaultError("Kubernetes", what, remedy=remedy)


@contextlib.contextmanager
def well_formed() -> Iterator[None]:
    """Raise SystemFaultError if an object lacks a field that Kubernetes requires."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise fault("kubectl printed an object with a missing or invalid field") from error


@dataclass(frozen=True)
class Kubectl:
    """kubectl with a context and a namespace; None means those of the user's configuration."""

    context: str | None = None
    namespace: str | None = None

    @classmethod
    def of(cls, settings: KubernetesSettings) -> Kubectl:
        """Return kubectl for the settings of a cluster."""
        return cls(settings.context, settings.namespace)

    def words(self, *arguments: str) -> list[str]:
        """Return the command line."""
        context = [f"--context={self.context}"] if self.context else []
        namespace = [f"--namespace={self.namespace}"] if self.namespace else []
        return ["kubectl", *context, *namespace, *arguments]

    def ask(self, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command; raises SystemFaultError if it is missing or does not answer."""
        words = self.words(*arguments, REQUEST_TIMEOUT)
        try:
            return run_program(words, text=text, limit_s=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise fault(f"kubectl {arguments[0]} did not answer within {LIMIT_S:.0f} s") from None
        except OSError as error:
            raise SystemFaultError(
                "kubectl", f"cannot be started: {error.strerror}", remedy="install kubectl"
            ) from error

    def get(self, *arguments: str) -> dict[str, Any]:
        """Return the JSON of `kubectl get`; raises SystemFaultError if it fails."""
        result = self.ask("get", *arguments, "--output=json")
        if result.returncode:
            raise fault(result.stderr)
        return _document(result.stdout)

    def create(self, document: dict[str, Any]) -> dict[str, Any]:
        """Create an object and return it; raises SystemFaultError if Kubernetes refuses it."""
        result = self.ask("create", "--filename=-", "--output=json", text=json.dumps(document))
        if result.returncode:
            raise fault(result.stderr)
        return _document(result.stdout)

    def exists(self, document: dict[str, Any]) -> bool:
        """Return True if Kubernetes has the object with its labels.

        Raises SystemFaultError without an answer.
        """
        options = ("--filename=-", "--ignore-not-found", "--output=json")
        result = self.ask("get", *options, text=json.dumps(document))
        if result.returncode:
            raise fault(result.stderr)
        if not result.stdout.strip():
            return False
        with well_formed():
            answer = _document(result.stdout)
            # kubectl prints what it reads from standard input as a list, also if it is one object.
            objects = answer.get("items", [answer])
            labels = [item["metadata"].get("labels") or {} for item in objects]
            expected = document["metadata"]["labels"].items()
            return any(expected <= these.items() for these in labels)

    def set_owner(self, owner: dict[str, Any], documents: Sequence[dict[str, Any]]) -> None:
        """Let Kubernetes delete objects together with their owner.

        Raises SystemFaultError if Kubernetes does not do so.
        """
        keys = ("apiVersion", "kind")
        reference = {key: owner[key] for key in keys}
        reference |= {key: owner["metadata"][key] for key in ("name", "uid")}
        patch = json.dumps({"metadata": {"ownerReferences": [reference]}})
        text = json.dumps(_as_list(documents))
        result = self.ask("patch", "--filename=-", "--type=merge", f"--patch={patch}", text=text)
        if result.returncode:
            raise fault(result.stderr)

    def delete(self, documents: Sequence[dict[str, Any]]) -> None:
        """Delete objects and all that they own, without waiting for their end.

        Raises SystemFaultError if Kubernetes does not do so.
        """
        options = ("--filename=-", "--ignore-not-found", "--wait=false", "--cascade=foreground")
        result = self.ask("delete", *options, text=json.dumps(_as_list(documents)))
        if result.returncode:
            raise fault(result.stderr)


def _document(text: str) -> dict[str, Any]:
    try:
        document = parse_json(text)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise fault("kubectl printed no JSON object")
    return document


def _as_list(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "List", "items": list(documents)}


@dataclass
class KubectlStream:
    """Output of a kubectl that runs until it is closed. Its messages go to a file."""

    process: subprocess.Popen[bytes]
    _text: bytes = b""

    @classmethod
    def start(cls, words: Sequence[str], messages: Path) -> KubectlStream:
        """Start the command. It ends with this process."""
        streams: list[KubectlStream] = []
        try:
            # An interrupt inside Popen would leave a process that nobody knows and nobody stops.
            with messages.open("ab") as errors, deferred_interrupts():
                process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    start_new_session=True,
                    preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGKILL)
                    if sys.platform == "linux"
                    else None,
                )
                streams.append(cls(process))
        except KeyboardInterrupt:
            for stream in streams:
                stream.close()
            raise
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        return streams[0]

    @property
    def ended(self) -> bool:
        """True if the command has ended; what it wrote may not have been read."""
        return self.process.poll() is not None

    def lines(self) -> list[str]:
        """Return the complete lines that have arrived."""
        self._read()
        *lines, self._text = self._text.split(b"\n")
        return [line.decode("utf-8", "replace") for line in lines]

    def values(self) -> Iterator[dict[str, Any]]:
        """Yield the complete JSON values that have arrived."""
        self._read()
        while True:
            self._text = self._text.lstrip()
            text = self._text.decode("utf-8", "ignore")
            try:
                value, end = _DECODER.raw_decode(text)
            except RecursionError:
                self._text = b""
                return
            except ValueError:
                return
            self._text = self._text[len(text[:end].encode()) :]
            if isinstance(value, dict):
                yield cast(dict[str, Any], value)

    def close(self) -> None:
        """End the command."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()

    def _read(self) -> None:
        stdout = self.process.stdout
        if stdout and not stdout.closed:
            with contextlib.suppress(BlockingIOError):
                for _ in range(MAX_BLOCKS):
                    block = os.read(stdout.fileno(), BLOCK_BYTES)
                    self._text += block
                    if not block:
                        break
        if len(self._text) > MAX_BYTES:  # no record or pod is that large
            self._text = b""
