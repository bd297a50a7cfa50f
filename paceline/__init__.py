"""Paceline measures how fast a machine or a cluster trains large language models."""

__version__ = "0.2.0"
