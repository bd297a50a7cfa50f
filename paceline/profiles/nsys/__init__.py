"""Nsight Systems: its command, its import and export, and its SQLite files as timelines."""
