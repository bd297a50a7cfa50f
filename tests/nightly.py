"""Whether tests run as `make nightly` starts them, with more cases than by day."""

import os

NIGHTLY = bool(os.environ.get("PACELINE_NIGHTLY"))
