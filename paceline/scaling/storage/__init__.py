"""Measurement of disks for data loaders and checkpoints, and the demand of a training run."""
