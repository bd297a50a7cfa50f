"""What a training's wall time was spent on, over all its restarts."""
