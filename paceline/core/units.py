"""Constants of units, and formatting of numbers for people.

In code, every quantity is in its base unit (seconds, bytes, FLOP/s), and its name states the unit.
Only reports scale it. GB is 1e9 bytes, GiB is 2**30 bytes.
"""

from __future__ import annotations

KIB = 2**10
MIB = 2**20
GIB = 2**30
GB = 10**9
TERA = 10**12
SECONDS_PER_DAY = 86_400
LARGEST_INT = 2**53
"""Largest integer that JSON readers keep exactly. Databases do not store larger ones."""

_OF_ONE = {"are": "is", "were": "was", "have": "has", "do": "does", "go": "goes"}
_SI = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def si(value: float, unit: str, digits: int = 3) -> str:
    """Format `value` with an SI prefix: `si(9.9e11, "FLOP/s")` = `990 GFLOP/s`."""
    for factor, prefix in _SI:
        if abs(value) >= factor:
            return f"{significant(value / factor, digits)} {prefix}{unit}"
    return f"{significant(value, digits)} {unit}"


def count(value: float, digits: int = 3) -> str:
    """Format a large count as is usual in the field: `70.6B` parameters, `3.41M`."""
    for factor, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= factor:
            return f"{significant(value / factor, digits)}{letter}"
    return f"{value:,.0f}"


def pluralize(number: int, thing: str, verb: str = "") -> str:
    """Format a number with its noun, and with a verb if given.

    Examples: `1 node`, `2,048 nodes`; with the verb `are`, `1 node is`.
    """
    if number == 1:
        return f"1 {thing} {verb_form(1, verb)}" if verb else f"1 {thing}"
    ending = "es" if thing.endswith(("ss", "ch")) else "s"
    return f"{number:,} {thing}{ending} {verb}".rstrip()


def verb_form(number: int, verb: str) -> str:
    """Return the verb form for a number: `is` and `takes` for one, `are` and `take` for others."""
    return _OF_ONE.get(verb, f"{verb}s") if number == 1 else verb


def there_are(number: int, thing: str) -> str:
    """Return a clause such as `there is 1 host` or `there are 2 hosts`."""
    return f"there {verb_form(number, 'are')} {pluralize(number, thing)}"


def all_steps_done(number: int) -> str:
    """Return a clause such as `all 60 steps are done` or `the only step is done`."""
    return "the only step is done" if number == 1 else f"all {number:,} steps are done"


def significant(value: float, digits: int = 3) -> str:
    """Format `value` with at least `digits` significant digits, never in exponent form."""
    if value == 0:
        return "0"
    magnitude = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    decimals = max(0, digits - magnitude)
    if magnitude == 0:
        leading_zeros = len(f"{abs(value):.12f}".split(".")[1]) - len(
            f"{abs(value):.12f}".split(".")[1].lstrip("0")
        )
        decimals = digits + leading_zeros
    return f"{value:,.{decimals}f}"


def compact(value: float, digits: int = 4) -> str:
    """Format `value` with up to `digits` significant digits, as `.4g` but without exponent."""
    text = significant(value, digits)
    return text.rstrip("0").rstrip(".") if "." in text else text


def step_seconds(value: float) -> str:
    """Format a step time without unit, with four digits or all integer ones: `12.40`, `12,340`."""
    return significant(value, 4)


def binary(num_bytes: float) -> str:
    """Format a size in binary units: `16 MiB`."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes:.4g} B"


def gib(num_bytes: float) -> str:
    """Format bytes in GiB with two decimals: `0.61 GiB`."""
    return f"{num_bytes / GIB:,.2f} GiB"


def seconds(value_s: float) -> str:
    """Format seconds; from two minutes on, in hours, minutes and seconds.

    Times below 10 s have four decimals, others one.
    """
    if value_s >= 120:
        minutes, remaining_s = divmod(round(value_s), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {remaining_s:02d} s"
    return f"{value_s:.4f} s" if value_s < 10 else f"{value_s:.1f} s"


def days(value: float) -> str:
    """Format a number of days; below one day with two significant digits: `0.071 days`."""
    return f"{day_count(value)} days"


def day_count(value: float) -> str:
    """Format a number of days without the unit."""
    return f"{value:,.1f}" if value >= 1 else significant(value, 2)


def percent(fraction: float, digits: int = 1) -> str:
    """Format a fraction as a percentage: `percent(0.361)` = `36.1%`."""
    return f"{100 * fraction:.{digits}f}%"
