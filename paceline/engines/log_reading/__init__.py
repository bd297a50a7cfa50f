"""Readers of log formats that span several modules."""
