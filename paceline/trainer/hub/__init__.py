"""Hugging Face folders (safetensors and config.json), read and written by one table of names."""
