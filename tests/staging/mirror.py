"""A server on loopback: a part of the hub's protocol and plain files, with faults on request."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_" + "Zz9y8X7w6V5u4T3s2R1q"
LARGE_BYTES = 1 << 16
"""Files from here on are stored apart, with a SHA-256."""


@dataclass
class Mirror:
    """What the server has, what it does wrong, and what it was asked."""

    files: dict[str, bytes] = field(default_factory=dict)
    """By path of a URL."""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """By `model/NAME` or `dataset/NAME`: content by path."""
    gated: set[str] = field(default_factory=set)
    faults: dict[str, deque[Any]] = field(default_factory=dict)
    """What goes wrong with the next requests of a path, one after the other: an HTTP status, or
    ("cut", bytes), the same with headers behind it, ("damage",), ("slow", event, bytes),
    ("redirect", url), or ("headers", {...}): None is none, and a range is sent whatever version is
    asked for."""
    silent: bool = False
    """Tell no sizes in advance."""
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    """Method, path and headers of each request."""
    url: str = ""

    def fail(self, path: str, *faults: Any) -> None:
        """Let the next requests of a path fail."""
        self.faults.setdefault(path, deque()).extend(faults)

    def gets(self, path: str) -> list[dict[str, str]]:
        """Headers of the requests for the content of a path."""
        return [
            headers for method, asked, headers in self.asked if (method, asked) == ("GET", path)
        ]


@contextmanager
def serving(mirror: Mirror) -> Iterator[Mirror]:
    """The mirror while it answers."""

    class Handler(_Handler):
        of = mirror

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    mirror.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield mirror
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    of: Mirror
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        self.of.asked.append((self.command, path, dict(self.headers)))
        queue = self.of.faults.get(path)
        fault = queue.popleft() if queue and self.command == "GET" else None
        if self.of.silent and self.command == "HEAD":
            self._send(b"", 405)
        elif isinstance(fault, tuple) and fault[0] == "redirect":
            self._send(b"", 302, {"Location": fault[1]})
        elif isinstance(fault, int):
            self._send(b"{}", fault, {"Retry-After": "0"})
        elif match := re.fullmatch(r"/api/(model|dataset)s/(.+?)(?:/revision/([^/]+))?", path):
            self._repository(match[1], match[2])
        elif match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            name = f"{'dataset' if match[1] else 'model'}/{match[2]}"
            self._content(self.of.repositories.get(name, {}).get(match[3]), name, fault)
        else:
            self._content(self.of.files.get(path), None, fault)

    def _repository(self, kind: str, name: str) -> None:
        files = self.of.repositories.get(f"{kind}/{name}")
        if files is None:
            self._send(b"{}", 404, {"X-Error-Code": "RepoNotFound"})
            return
        answer = {
            "id": name,
            "sha": COMMIT,
            "siblings": [_file_entry(*item) for item in files.items()],  # language: allow
            "tags": [],
            "private": False,
        }
        self._send(json.dumps(answer).encode(), 200, {"Content-Type": "application/json"})

    def _content(self, content: bytes | None, repository: str | None, fault: Any) -> None:
        if content is None:
            self._send(b"", 404)
        elif repository in self.of.gated and TOKEN not in self.headers.get("Authorization", ""):
            self._send(b"", 401, {"X-Error-Code": "GatedRepo"})
        else:
            self._file(content, fault)

    def _file(self, content: bytes, fault: Any) -> None:
        tag = f'"{hashlib.md5(content).hexdigest()}"'
        begin, status = 0, 200
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        other = fault[1] if fault and fault[0] == "headers" else {}
        if fault and fault[0] == "cut":
            other = dict(*fault[2:])
        if match and (other or self.headers.get("If-Range", tag) == tag):
            begin, status = int(match[1]), 206
        if begin > len(content):
            self._send(b"", 416)
            return
        body = content[begin:]
        headers = {"ETag": tag, "Accept-Ranges": "bytes"}
        if status == 206:
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        if fault and fault[0] == "damage":
            body = bytes([body[0] ^ 1]) + body[1:]
        self._send(body, status, headers | other, fault)

    def _send(
        self, body: bytes, status: int, headers: dict[str, str] | None = None, fault: Any = None
    ) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault and fault[0] == "slow":
            self.wfile.write(body[: fault[2]])
            self.wfile.flush()
            fault[1].wait(30)
            body = body[fault[2] :]
        if fault and fault[0] == "cut":
            self.wfile.write(body[: fault[1]])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)
            return
        try:
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True


def _file_entry(path: str, content: bytes) -> dict[str, Any]:
    """A file in the hub's answer."""
    blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
    told: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": blob}
    if len(content) >= LARGE_BYTES:
        digest = hashlib.sha256(content).hexdigest()
        told["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
    return told
