"""Parallel layouts chosen: swept, searched, and planned for a batch that ramps up."""
