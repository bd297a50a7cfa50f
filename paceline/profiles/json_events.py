"""The events of a trace in Chrome's JSON form, one by one: a gigabyte of it is never held.

A trace is an object whose `traceEvents` is the list of events, or that list alone. Around the list
stand short fields, as Kineto's `distributedInfo`.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from paceline.core.errors import UserError
from paceline.files.documents import open_regular

EVENTS = "traceEvents"
CHUNK = 1 << 20
"""Characters that are read at once."""
LARGEST_VALUE = 1 << 26
"""Characters of a field, or of an event: what is longer is no trace."""
_BLANK = " \t\r\n"
_GZIP = b"\x1f\x8b"

Event = dict[str, Any]


class TraceFile:
    """A trace that is read once: iterate over its events, then look at its other `fields`.

    Raises UserError for what cannot be read or is no trace, and for a torn one with the event at
    which it ends.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fields: dict[str, Any] = {}
        self.num_events = 0
        self._text, self._at = "", 0
        self._decoder = json.JSONDecoder()

    def __iter__(self) -> Iterator[Event]:
        try:
            with open_regular(self.path) as raw, _decompressed(raw) as self._source:
                yield from self._document()
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise self._torn(f"its compression is broken: {error}") from error
        except UnicodeDecodeError as error:
            raise UserError(str(self.path), "is no JSON: it is not UTF-8") from error
        except OSError as error:
            what = f"cannot be read: {error.strerror or error}"
            raise UserError(str(self.path), what) from error

    def _document(self) -> Iterator[Event]:
        first = self._next()
        if first == "[":
            yield from self._events()
            return
        if first != "{":
            raise UserError(str(self.path), "is no trace: it holds no JSON object or list")
        while (mark := self._next()) != "}":
            if mark == ",":
                continue
            self._at -= 1
            name = self._value()
            if not isinstance(name, str) or self._next() != ":":
                raise self._torn("an object's field has no name")
            if name == EVENTS:
                if self._next() != "[":
                    raise UserError(str(self.path), f"is no trace: its {EVENTS} are no list")
                yield from self._events()
            else:
                self.fields[name] = self._value()

    def _events(self) -> Iterator[Event]:
        while (mark := self._next()) != "]":
            if mark == ",":
                continue
            self._at -= 1
            event = self._value()
            self.num_events += 1
            if isinstance(event, dict):
                yield cast(Event, event)

    def _next(self) -> str:
        """The next character that is no blank, which is then behind us."""
        while True:
            text, at = self._text, self._at
            while at < len(text) and text[at] in _BLANK:
                at += 1
            self._at = at
            if at < len(text):
                self._at = at + 1
                return text[at]
            if not self._more():
                if not self._text:
                    raise UserError(str(self.path), "is empty", allowed="a trace in JSON")
                raise self._torn("it ends in the middle")

    def _value(self) -> Any:
        """The JSON value that begins here, once all of it is there."""
        self._next()
        self._at -= 1
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except ValueError as error:
                # Of a whole value that is wrong no more text makes a right one.
                if len(self._text) - self._at > LARGEST_VALUE or not self._more():
                    raise self._torn(f"{error}") from error
            except RecursionError as error:
                raise self._torn("is nested too deeply") from error
            else:
                # A number may go on where the text that was read ends.
                if end < len(self._text) or not self._more():
                    self._at = end
                    return value

    def _more(self) -> bool:
        """Read on; False at the end of the file."""
        chunk = self._source.read(max(CHUNK, len(self._text) - self._at))
        if chunk:
            self._text, self._at = self._text[self._at :] + chunk, 0
        return bool(chunk)

    def _torn(self, why: str) -> UserError:
        return UserError(
            str(self.path),
            f"is no whole trace: behind event {self.num_events:,} {why}",
            remedy="profile fewer steps, or copy the file again",
        )


def _decompressed(raw: BinaryIO) -> io.TextIOWrapper:
    """The text of a file, which may be compressed by gzip whatever it is called."""
    packed = raw.read(2) == _GZIP
    raw.seek(0)
    content = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if packed else raw
    return io.TextIOWrapper(content, encoding="utf-8")
