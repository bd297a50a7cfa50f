"""Export a checkpoint to a Hugging Face folder.

Run as python -m paceline.trainer.programs.export '{"checkpoint": PATH, "to": FOLDER, ...}', an
object of `ExportSettings`. Prints one JSON line: {"event": "exported", checkpoint, step, folder,
form, dtypes, like, files: [{name, bytes}]}, or {"event": "refused" | "failed", reason} for what
cannot be exported, and for failures to read or write.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from paceline.trainer.checkpoint_reader import CorruptCheckpointError
from paceline.trainer.config import ConfigError
from paceline.trainer.hub.export import ExportSettings, export


def main(settings: dict[str, Any]) -> None:
    """Export and print the line."""
    print(json.dumps(outcome(ExportSettings(**settings))), flush=True)


def outcome(settings: ExportSettings) -> dict[str, Any]:
    """Return the object of the JSON line."""
    try:
        return {"event": "exported", **export(settings)}
    except ConfigError as error:
        return {"event": "refused", "reason": str(error)}
    except CorruptCheckpointError as error:
        return {"event": "refused", "reason": f"{settings.checkpoint}: {error}"}
    except OSError as error:
        where = error.filename or settings.to
        return {"event": "failed", "reason": f"{where}: {error.strerror or error!r}"}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
