"""Quotas of a file system: what may be used, what is, and what that leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

QuotaKind = Literal["user", "group", "project"]


class UnknownQuotaError(Exception):
    """Nobody says whether a quota holds there; its text says why."""


class NobodyToAskError(UnknownQuotaError):
    """Nor will anybody say so of others."""


@dataclass(frozen=True)
class QuotaAmount:
    """Bytes or files that someone uses, and the limits of them; None is no limit."""

    used: int
    soft: int | None = None
    """May be exceeded until the grace time ends."""
    hard: int | None = None
    grace_s: int | None = None
    """Seconds until the soft limit holds, 0 where it does; None where no time runs."""

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit at all."""
        return self.soft is not None or self.hard is not None

    @property
    def left(self) -> int | None:
        """What more may be written now; None is no limit."""
        if self.grace_s == 0:
            return 0
        return None if self.hard is None else max(0, self.hard - self.used)

    def exceeds_soft(self, more: int) -> bool:
        """Whether `more` leads over the soft limit, or stays over it."""
        return more > 0 and self.soft is not None and self.used + more > self.soft


@dataclass(frozen=True)
class QuotaLimit:
    """Limits that hold for one user, group or project on a file system."""

    kind: QuotaKind
    name: str
    bytes: QuotaAmount
    files: QuotaAmount

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit at all."""
        return self.bytes.is_limited or self.files.is_limited

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True)
class QuotaAnswer:
    """All limits that are known; `unknown` says why there may be others."""

    limits: tuple[QuotaLimit, ...] = ()
    unknown: str | None = None
