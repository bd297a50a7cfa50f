"""Profiles of runs: attaching profilers, reading their files, attributing step time. No torch."""
