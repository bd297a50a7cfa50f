"""The memory of the most loaded device, by part."""
