"""Training steps on tensors without memory."""
