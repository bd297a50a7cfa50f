"""Models in the hub's form: safetensors and config.json, read and written by one table of names."""
