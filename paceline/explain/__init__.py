"""Why a run is as slow as it is: its lost time by cause, each with evidence and what to try."""
