"""A training step on tensors without memory."""
