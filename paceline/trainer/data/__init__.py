"""Data sources, samples and batches."""
