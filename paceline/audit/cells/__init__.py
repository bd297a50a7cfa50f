"""Cells of a published table: what they follow from, and why one does not."""
