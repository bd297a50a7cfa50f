"""How samples/s are read in an audit, which tokens/s follow from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.files.recipe import load_recipe
from paceline.files.references import Row

SAMPLES_PER_S = {"samples_per_s", "samples_per_s_unrounded"}


def samples_notes(rows: Sequence[Row]) -> Iterator[str]:
    """What samples/s count in the rows that print them, and in which tables they are padded."""
    printing = [row for row in rows if SAMPLES_PER_S & row.printed.keys()]
    if not printing:
        return
    yield (
        "samples/s are read as all samples of a step over its time, padding included; tokens/s "
        "that follow from them count every position"
    )
    padded = [row for row in printing if row.recipe and _pads(row.recipe)]
    tables = list(dict.fromkeys(row.table for row in padded))
    if tables:
        yield (
            f"the samples of {', '.join(tables)} are records filled up to seq_len: how much of "
            "them is text is not printed, so their samples/s give no tokens/s of text"
        )


def _pads(recipe: str) -> bool:
    return load_recipe(recipe).data.packing == "padded"
