"""What one form of data becomes in another: functions from files to files.

`CONVERTERS` are those that need no input: each fills a folder and says how far it is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline.staging.conversions import made
from paceline.staging.conversions.progress import Progress

CONVERTERS: dict[str, Callable[[Path, Progress], None]] = {
    "tokenizer": made.make_tokenizer,
    "jsonl": made.make_jsonl,
    "indexed": made.make_indexed,
    "gpt2": made.make_gpt2,
}
"""What an asset of kind `made` may name."""
