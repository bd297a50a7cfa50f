"""Published tables recomputed from their own speeds; figures converted between conventions."""
