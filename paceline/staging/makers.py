"""What is made on the spot: each maker writes files into a folder, from other assets or nothing."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import UserError, did_you_mean

Setting = str | int | float | bool


@dataclass(frozen=True)
class Making:
    """What a maker works with; `inputs` are the contents of the assets that it needs, by name."""

    folder: Path
    inputs: Mapping[str, Path]
    settings: Mapping[str, Setting]
    check: Callable[[], None]
    """Raises when the staging ends; to be called now and then."""

    def number(self, name: str, usual: int) -> int:
        """A whole number of the settings; raises UserError for anything else."""
        value = self.settings.get(name, usual)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"settings.{name}", f"must be a whole number above 0, not {value!r}")
        return value


Maker = Callable[[Making], None]
CORPUS_FILE = "corpus.jsonl"
PARAGRAPH_CHARACTERS = 200


def corpus(making: Making) -> None:
    """`corpus.jsonl`: a paragraph of this interpreter's own sources a line, as `{"text": ...}`."""
    left = making.number("documents", 2000)
    with (making.folder / CORPUS_FILE).open("w", encoding="utf-8") as file:
        for text in _paragraphs():
            making.check()
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            left -= 1
            if not left:
                return


def _paragraphs() -> Iterator[str]:
    """Paragraphs of some length, of the modules in the order of their names."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        for text in source.split("\n\n"):
            if len(text.strip()) >= PARAGRAPH_CHARACTERS:
                yield text.strip("\n")


MAKERS: dict[str, Maker] = {"corpus": corpus}
"""By the `source` of a made asset."""


def maker(name: str) -> Maker:
    """The maker called `name`; raises UserError with the nearest name."""
    if name not in MAKERS:
        raise UserError(
            f"made asset: source {name!r}",
            "is unknown",
            allowed=", ".join(MAKERS),
            remedy=did_you_mean(name, MAKERS) or None,
        )
    return MAKERS[name]
