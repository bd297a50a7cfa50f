"""What a sweep varies: fields of a recipe with the values that each of them takes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from paceline.core.errors import UserError
from paceline.files.recipe import full_key

SHORT = {
    "tp": "layout.tp",
    "pp": "layout.pp",
    "cp": "layout.cp",
    "vp": "layout.vp",
    "zero": "layout.zero_stage",
    "mbs": "layout.micro_batch",
    "recompute": "layout.recompute",
    "gbs": "training.global_batch",
}
"""Options with a name of their own, and the field that each sets."""
MOST = 2000
"""Combinations that one sweep takes."""
_OPEN, _CLOSE, _QUOTES = "[{(", "]})", "\"'"


@dataclass(frozen=True)
class Dimension:
    """One field, and its values as they are written after `--set field=`."""

    field: str
    values: tuple[str, ...]
    option: str | None = None
    """The option of its own that its values were given by; None is `--set`."""

    def typed(self, value: str) -> str:
        """One of its values as it was asked for: `--tp 4`, `--set layout.vp=2`."""
        return f"{self.option} {value}" if self.option else f"--set {self.field}={value}"

    @property
    def short(self) -> str:
        """How a person names it: `mbs`, else the field's last name."""
        names = {field: name for name, field in SHORT.items()}
        return names.get(self.field, self.field.rpartition(".")[2])


def dimensions(
    named: Mapping[str, str | None], overrides: Iterable[str]
) -> tuple[tuple[Dimension, ...], tuple[str, ...]]:
    """(what varies, the overrides that do not).

    `named` are the options of SHORT with their text. A value with commas is a list of values; what
    stands in brackets, braces or quotes is one of them. Raises UserError for no list at all, a
    field given twice, an empty value, or too many combinations.
    """
    lists: list[tuple[str, str, str, str | None]] = [
        (f"--{name}", SHORT[name], text, f"--{name}")
        for name, text in named.items()
        if text is not None
    ]
    varied: dict[str, Dimension] = {}
    fixed: list[str] = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or len(split_list(value)) < 2:
            fixed.append(text)
        else:
            lists.append((f"--set {text}", full_key(key.strip()), value, None))
    for where, field, text, option in lists:
        if field in varied:
            raise UserError(where, f"{field} is given twice", remedy="put its values in one list")
        values = tuple(dict.fromkeys(split_list(text)))
        if "" in values:
            raise UserError(where, "has an empty value", allowed="values separated by commas")
        varied[field] = Dimension(field, values, option)
    _check(varied.values())
    return tuple(varied.values()), tuple(fixed)


def combinations(varied: Sequence[Dimension]) -> Iterator[dict[str, str]]:
    """Every combination as field -> value, the last dimension changing fastest."""
    fields = [dimension.field for dimension in varied]
    for values in product(*(dimension.values for dimension in varied)):
        yield dict(zip(fields, values, strict=True))


def split_list(text: str) -> list[str]:
    """The parts between commas outside of brackets, braces and quotes: `1,[2,3]` has two."""
    parts, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in _QUOTES and not parts[-1].strip():
            quote = sign
        elif sign in _OPEN:
            depth += 1
        elif sign in _CLOSE:
            depth -= 1
        elif sign == "," and depth <= 0:
            parts.append("")
            continue
        parts[-1] += sign
    return [part.strip() for part in parts]


def _check(varied: Collection[Dimension]) -> None:
    sizes = [len(dimension.values) for dimension in varied]
    if not sizes or max(sizes) < 2:
        given = ", ".join(f"{dimension.short} {dimension.values[0]}" for dimension in varied)
        raise UserError(
            "paceline sweep",
            "is told nothing to vary" + (f": {given} is one value each" if given else ""),
            allowed=f"lists for {', '.join(f'--{name}' for name in SHORT)} or --set",
            remedy="for example --tp 1,2 --mbs 1,2,4",
        )
    if prod(sizes) > MOST:
        raise UserError(
            "paceline sweep", f"asks for {prod(sizes):,} combinations", allowed=f"at most {MOST:,}"
        )
